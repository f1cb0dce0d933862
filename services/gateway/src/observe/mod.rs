//! Observers of a workspace: over a socket, as server-sent events, or in pages.
//!
//! All three read the same log in the same order (`relay_engine::events`) and use the same numbers. An observer never
//! slows anything down: one that reads too slowly is disconnected with a reason, and resumes from the log.

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

/// Maximum observers of this gateway.
const MAX_OBSERVERS: usize = 8192;
/// Maximum observers of one workspace, so that one tenant cannot use all slots.
const MAX_WORKSPACE_OBSERVERS: usize = MAX_OBSERVERS / 4;

/// Slots for observers of this gateway. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct ObserverSlots(Arc<Mutex<SlotCounts>>);

#[derive(Debug, Default)]
struct SlotCounts {
    total: usize,
    by_workspace: HashMap<WorkspaceId, usize>,
}

/// Slot of one observer, released on drop.
#[derive(Debug)]
struct ObserverSlot {
    slots: ObserverSlots,
    workspace: WorkspaceId,
}

impl ObserverSlots {
    fn acquire(&self, scope: WorkspaceScope) -> Result<ObserverSlot, ApiError> {
        let workspace = scope.workspace_id();
        let mut counts = self.lock_counts();
        let own = counts.by_workspace.get(&workspace).copied().unwrap_or_default();
        if counts.total >= MAX_OBSERVERS || own >= MAX_WORKSPACE_OBSERVERS {
            return Err(ApiError::unavailable("workspace_busy", "Too many observers at this gateway, try again"));
        }
        counts.total += 1;
        counts.by_workspace.insert(workspace, own + 1);
        Ok(ObserverSlot { slots: self.clone(), workspace })
    }

    fn lock_counts(&self) -> MutexGuard<'_, SlotCounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ObserverSlot {
    fn drop(&mut self) {
        let mut counts = self.slots.lock_counts();
        counts.total -= 1;
        if let Some(own) = counts.by_workspace.get_mut(&self.workspace) {
            *own -= 1;
            if *own == 0 {
                counts.by_workspace.remove(&self.workspace);
            }
        }
    }
}

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
    fn one_workspace_cannot_use_all_slots_and_slots_are_released() {
        let scope = |id| WorkspaceScope::from_engine_row(WorkspaceId::new(id));
        let slots = ObserverSlots::default();
        let mut greedy: Vec<ObserverSlot> =
            (0..MAX_WORKSPACE_OBSERVERS).map(|_| slots.acquire(scope(1)).unwrap()).collect();
        assert!(slots.acquire(scope(1)).is_err(), "the workspace has its share");
        let others: Vec<ObserverSlot> =
            (MAX_WORKSPACE_OBSERVERS..MAX_OBSERVERS).map(|n| slots.acquire(scope(1 + n as i64)).unwrap()).collect();
        assert!(slots.acquire(scope(2)).is_err(), "the gateway is full");
        greedy.pop();
        let again = slots.acquire(scope(2)).unwrap();
        drop((greedy, others, again));
        let counts = slots.lock_counts();
        assert_eq!((counts.total, counts.by_workspace.len()), (0, 0));
    }
}
