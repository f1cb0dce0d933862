//! Housekeeping: partitions, pruning, compaction, statistics of tables.

mod compaction;
mod grown_tables;
mod partitions;
mod pruning;
