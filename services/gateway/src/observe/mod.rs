//! Observers: whoever watches a workspace, over a socket, as server-sent events, or page by page.
//!
//! All three read the same log in the same order (`relay_engine::events`); what one of them shows with a
//! number, the others show with that number. An observer never slows anything down: one that reads too
//! slowly is cut off with a reason, and resumes from the log.

mod access;
pub(crate) mod log;
pub(crate) mod socket;
pub(crate) mod sse;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axum::{Router, routing::get};
use relay_domain::{WorkspaceId, WorkspaceScope};

use crate::{error::ApiError, state::AppState};

/// Observers that one gateway serves at once.
const MOST: usize = 8192;
/// Of these the ones of one workspace, so that no tenant takes all places.
const MOST_OF_ONE: usize = MOST / 4;

/// The places for observers at this gateway. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Seats(Arc<Mutex<Taken>>);

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    of: HashMap<WorkspaceId, usize>,
}

/// One observer's place, given back when dropped.
#[derive(Debug)]
struct Seat {
    seats: Seats,
    workspace: WorkspaceId,
}

impl Seats {
    fn take(&self, scope: WorkspaceScope) -> Result<Seat, ApiError> {
        let workspace = scope.workspace_id();
        let mut taken = self.taken();
        let own = taken.of.get(&workspace).copied().unwrap_or_default();
        if taken.all >= MOST || own >= MOST_OF_ONE {
            return Err(ApiError::unavailable("workspace_busy", "Too many observers at this gateway, try again"));
        }
        taken.all += 1;
        taken.of.insert(workspace, own + 1);
        Ok(Seat { seats: self.clone(), workspace })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = self.seats.taken();
        taken.all -= 1;
        if let Some(own) = taken.of.get_mut(&self.workspace) {
            *own -= 1;
            if *own == 0 {
                taken.of.remove(&self.workspace);
            }
        }
    }
}

/// The observers' routes.
pub fn routes() -> Router<AppState> {
    Router::new()
        .route("/v1/ws", get(socket::upgrade))
        .route("/v1/workspace/events", get(log::page))
        .route("/v1/workspace/events/stream", get(sse::stream))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_workspace_leaves_places_for_others_and_places_come_back() {
        let scope = |id| WorkspaceScope::from_engine_row(WorkspaceId::new(id));
        let seats = Seats::default();
        let mut greedy: Vec<Seat> = (0..MOST_OF_ONE).map(|_| seats.take(scope(1)).unwrap()).collect();
        assert!(seats.take(scope(1)).is_err(), "its part is taken");
        let others: Vec<Seat> = (MOST_OF_ONE..MOST).map(|n| seats.take(scope(1 + n as i64)).unwrap()).collect();
        assert!(seats.take(scope(2)).is_err(), "all are taken");
        greedy.pop();
        let again = seats.take(scope(2)).unwrap();
        drop((greedy, others, again));
        let taken = seats.taken();
        assert_eq!((taken.all, taken.of.len()), (0, 0));
    }
}
