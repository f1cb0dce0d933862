//! Observers of a workspace: over a socket, as server-sent events, or in pages.
//!
//! All three read the same log in the same order (`relay_engine::events`) and use the same numbers. An observer never
//! slows anything down: one that reads too slowly is disconnected with a reason, and resumes from the log.
//!
//! Main types: `ObserverCredentials`, the token of a request, and `ObserverWatch`, an observer's access
//! while it is connected.

mod access;
pub(crate) mod log;
pub(crate) mod socket;
pub(crate) mod sse;

use axum::{Router, routing::get};

use crate::state::AppState;

pub fn routes() -> Router<AppState> {
    Router::new()
        .route("/v1/ws", get(socket::upgrade))
        .route("/v1/workspace/events", get(log::page))
        .route("/v1/workspace/events/stream", get(sse::stream))
}
