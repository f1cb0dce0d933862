//! Node socket: registration, per-agent delivery, acks.
//!
//! `upgrade` authenticates a socket; `connection` owns it until it ends. [`Registry`] holds all connections of this
//! gateway, routes agents and events to them, and renews the lease.

mod agent_routes;
mod connection;
mod direct_agents;
mod invocation_scan;
mod live_copies;
mod liveness;
mod notices;
mod queue;
mod registry;
mod relist_pause;
mod revocation;
mod silence_checks;
mod suspension;
pub(crate) mod upgrade;

pub use registry::Registry;

use axum::{Router, routing::get};

use crate::state::AppState;

pub fn routes() -> Router<AppState> {
    Router::new().route("/v1/node/ws", get(upgrade::upgrade))
}
