//! Events that mutations record in the log, each test on a fresh database of a real Postgres.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic, as tests do")]

#[path = "../loops/fixture.rs"]
#[allow(dead_code, reason = "shared with the tests of the worker loops, which use other parts")]
mod fixture;

mod acks;
mod commits;
mod fanouts;
mod gateways;
mod nodes;
mod numbering;
mod placing;
