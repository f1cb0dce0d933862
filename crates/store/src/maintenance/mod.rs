//! Maintenance: daily partitions, pruning and compaction, and the state of worker loops. Called by worker loops, and
//! [`loop_state`] by store functions that run in steps.

pub(crate) mod loop_state;
pub mod partitions;
pub mod pruning;
