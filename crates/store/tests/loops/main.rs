//! The statements of the worker's loops, each test on a fresh database of a real Postgres.

mod compaction;
mod connections;
mod expiry;
mod files;
mod fixture;
mod outbox_relay;
mod partitions;
mod presence;
mod pruning;
mod reading;
mod redrives;
mod subscriptions;
mod tries;
mod usage;
