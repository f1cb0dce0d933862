//! Observers: whoever watches a workspace, over a socket, as server-sent events, or page by page.
//!
//! All three read the same log in the same order (`relay_engine::events`); what one of them shows with a
//! number, the others show with that number. An observer never slows anything down: one that reads too
//! slowly is cut off with a reason, and resumes from the log.

mod access;
pub(crate) mod log;
pub(crate) mod socket;
pub(crate) mod sse;

use std::sync::Arc;

use axum::{Router, routing::get};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{error::ApiError, state::AppState};

/// Observers that one gateway serves at once.
const MOST: usize = 8192;

/// The places for observers at this gateway. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Seats(Arc<Semaphore>);

/// One observer's place, given back when dropped.
#[derive(Debug)]
struct Seat {
    _permit: OwnedSemaphorePermit,
}

impl Default for Seats {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MOST)))
    }
}

impl Seats {
    fn take(&self) -> Result<Seat, ApiError> {
        let permit = Arc::clone(&self.0).try_acquire_owned();
        let full = |_| ApiError::unavailable("workspace_busy", "Too many observers at this gateway, try again");
        Ok(Seat { _permit: permit.map_err(full)? })
    }
}

/// The observers' routes.
pub fn routes() -> Router<AppState> {
    Router::new()
        .route("/v1/ws", get(socket::upgrade))
        .route("/v1/workspace/events", get(log::page))
        .route("/v1/workspace/events/stream", get(sse::stream))
}
