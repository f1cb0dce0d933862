//! The statements of the worker's loops, each test on a fresh database of a real Postgres.

mod compaction;
mod connections;
mod erasing;
mod expiry;
mod files;
mod fixture;
mod invocations;
mod outbox_relay;
mod partitions;
mod presence;
mod pruning;
mod push;
mod reading;
mod recovery;
mod redrives;
mod sealing;
mod sessions;
mod subscriptions;
mod tries;
mod usage;
