//! Node socket: registration, per-agent delivery, acks.
//!
//! A live copy or a row read for repair enters the mailbox stream of its agent in `served_agent`, leaves it in seq
//! order in `flow`, and is written by `outbound`. Frames from the node are decoded by `relay_wire::nodes::frame`;
//! those that need the engine run in `control`. `connection` is the task that owns the socket; [`Registry`] holds all
//! connections of this gateway.

mod agent_routes;
mod connection;
mod control;
mod delayed_acks;
mod direct_agents;
mod flow;
mod hosting;
mod invocation_scan;
mod invocations;
mod liveness;
mod notices;
mod outbound;
mod pacing;
mod registration;
mod registry;
mod served_agent;
mod suspension;
mod timers;
pub(crate) mod upgrade;

pub use registry::Registry;

use axum::{Router, routing::get};

use crate::state::AppState;

pub fn routes() -> Router<AppState> {
    Router::new().route("/v1/node/ws", get(upgrade::upgrade))
}
