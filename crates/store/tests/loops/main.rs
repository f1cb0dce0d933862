//! The statements of the worker's loops, each test on a fresh database of a real Postgres.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic, as tests do")]

mod changes;
mod clock;
mod connections;
mod corrupt;
mod due_work;
mod erasing;
mod expiry;
mod files;
mod fixture;
mod invocations;
mod lock_order;
mod maintenance;
mod outbox_relay;
mod pages;
mod pooled;
mod pooler;
mod presence;
mod push;
mod reading;
mod recovery;
mod redrives;
mod reencryption;
mod sessions;
mod subscriptions;
mod triggers;
mod usage;
