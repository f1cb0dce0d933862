//! The node socket: registration, per-agent delivery, acks.
//!
//! The way of a message: a live copy or a row read for repair enters its agent's
//! [`Session`](relay_domain::session::Session) in `served`, leaves it in seq order in
//! `flow`, and goes out through `outbound`. Frames from the node are decoded by
//! `relay_wire::frame`; those that need the engine wait their turn in
//! `control`. `connection` is the task around all of it.

mod connection;
mod control;
mod direct;
mod dispatching;
mod flow;
mod held;
mod hosting;
mod invoking;
mod keeping_out;
mod notice;
mod outbound;
mod pacing;
mod proving;
mod registering;
mod registry;
mod served;
mod serving;
mod ticking;
pub(crate) mod upgrade;

pub use registry::Registry;

use axum::{Router, routing::get};

use crate::state::AppState;

/// The socket's route.
pub fn routes() -> Router<AppState> {
    Router::new().route("/v1/node/ws", get(upgrade::upgrade))
}
