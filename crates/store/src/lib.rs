//! All SQL of the engine, over one Postgres.
//!
//! Functions here are single steps: they take a [`WorkspaceScope`](relay_domain::WorkspaceScope) and
//! plain values, and return plain values or an outcome. Rules live in `relay-domain`, use cases in
//! `relay-engine`. Losing a race is an outcome, "not there" is `None`; only a database that did not do
//! what was asked is an error.

mod error;
mod pool;

pub use error::{StoreError, StoreResult};
pub use pool::{MIGRATOR, Store};
