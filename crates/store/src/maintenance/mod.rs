//! Maintenance: daily partitions, pruning and compaction, statistics of new tables, the state of worker loops and the
//! work that they wait for. Main types: `DailyTable`, `WorkKind`, `LoopState`. Called by worker loops, and
//! [`loop_state`] by store functions that run in steps.

pub mod due_work;
pub mod grown_tables;
pub(crate) mod loop_state;
pub mod partitions;
pub mod pruning;
