//! Slots of the transfers in one process, with a share for each workspace. Main type: [`TransferSlots`].

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use relay_domain::{WorkspaceId, WorkspaceScope};

/// Bound of the uploads and downloads in one process. Each upload needs up to 15 MiB.
const MAX_TRANSFERS: usize = 64;
/// Bound of those of one workspace, so that one with slow clients leaves room for others.
const MAX_PER_WORKSPACE: usize = MAX_TRANSFERS / 4;

/// Transfers in progress, by workspace. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct TransferSlots(Arc<Mutex<HashMap<WorkspaceId, usize>>>);

/// Slot of a transfer. It is free again when this is dropped.
#[derive(Debug)]
pub(crate) struct TransferSlot {
    slots: TransferSlots,
    workspace: WorkspaceId,
}

impl TransferSlots {
    /// Takes a slot; `None` when the process or the workspace has none left.
    pub(crate) fn take(&self, scope: WorkspaceScope) -> Option<TransferSlot> {
        let workspace = scope.workspace_id();
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.values().sum::<usize>() >= MAX_TRANSFERS {
            return None;
        }
        let own = taken.entry(workspace).or_default();
        if *own >= MAX_PER_WORKSPACE {
            return None;
        }
        *own += 1;
        Some(TransferSlot { slots: self.clone(), workspace })
    }
}

impl Drop for TransferSlot {
    fn drop(&mut self) {
        let mut taken = self.slots.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = taken.get_mut(&self.workspace) {
            *own -= 1;
            if *own == 0 {
                taken.remove(&self.workspace);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_has_a_quarter_of_the_slots() {
        let slots = TransferSlots::default();
        let scope = |id| WorkspaceScope::from_engine_row(WorkspaceId::new(id));
        let mut taken: Vec<_> = (0..100).filter_map(|_| slots.take(scope(1))).collect();
        assert_eq!(taken.len(), 16);
        let others: Vec<_> = (2..100).filter_map(|id| slots.take(scope(id))).collect();
        assert_eq!(others.len(), 48);
        taken.pop();
        assert!(slots.take(scope(2)).is_some(), "a slot that is free again is taken");
        drop((taken, others));
        assert!(slots.0.lock().unwrap().is_empty());
    }
}
