//! Permits for the transfers in one process, with a share for each family of workspaces. Main type:
//! [`TransferPermits`].

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use relay_domain::workspaces::family::FamilyId;

/// Bound of the uploads and downloads in one process. Each upload needs up to 15 MiB.
const MAX_TRANSFERS: usize = 64;
/// Bound of those of one family, so that one with slow clients leaves room for others.
const MAX_PER_FAMILY: usize = MAX_TRANSFERS / 4;

/// Transfers in progress, by family. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct TransferPermits(Arc<Mutex<HashMap<FamilyId, usize>>>);

/// Permit of a transfer. It is returned when this is dropped.
#[derive(Debug)]
pub(crate) struct TransferPermit {
    permits: TransferPermits,
    family: FamilyId,
}

impl TransferPermits {
    /// Acquires a permit; `None` when the process or the family has none left.
    pub(crate) fn try_acquire(&self, family: FamilyId) -> Option<TransferPermit> {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Only families with transfers have an entry, so this adds up 64 numbers at most.
        if taken.values().sum::<usize>() >= MAX_TRANSFERS {
            return None;
        }
        let own = taken.entry(family).or_default();
        if *own >= MAX_PER_FAMILY {
            return None;
        }
        *own += 1;
        Some(TransferPermit { permits: self.clone(), family })
    }
}

impl Drop for TransferPermit {
    fn drop(&mut self) {
        let mut taken = self.permits.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = taken.get_mut(&self.family) {
            *own -= 1;
            if *own == 0 {
                taken.remove(&self.family);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::WorkspaceId;

    use super::*;

    #[test]
    fn a_family_has_a_quarter_of_the_permits() {
        let permits = TransferPermits::default();
        let family = |id| FamilyId::of_workspace(WorkspaceId::new(id), None);
        let mut taken: Vec<_> = (0..100).filter_map(|_| permits.try_acquire(family(1))).collect();
        assert_eq!(taken.len(), 16);
        let others: Vec<_> = (2..100).filter_map(|id| permits.try_acquire(family(id))).collect();
        assert_eq!(others.len(), 48);
        taken.pop();
        assert!(permits.try_acquire(family(2)).is_some(), "a returned permit is acquired again");
        drop((taken, others));
        assert!(permits.0.lock().unwrap().is_empty());
    }
}
