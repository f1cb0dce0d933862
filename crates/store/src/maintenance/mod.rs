//! Maintenance: daily partitions, pruning and compaction, statistics of new tables, and the state of worker loops.
//! Called by worker loops, and [`loop_state`] by store functions that run in steps.

pub mod grown_tables;
pub(crate) mod loop_state;
pub mod partitions;
pub mod pruning;
