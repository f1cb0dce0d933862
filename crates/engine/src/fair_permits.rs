//! Permits for costly work: some for this process, and fewer for each family of workspaces, so that none takes all.

use std::{sync::Arc, time::Duration};

use moka::sync::Cache;
use relay_domain::workspaces::family::FamilyId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bound of the families whose permits are remembered.
const MAX_TENANTS: u64 = 100_000;
const TENANT_IDLE: Duration = Duration::from_secs(60);

/// Permits for one kind of work. Cheap to clone.
#[derive(Clone)]
pub(crate) struct FairPermits {
    tenants: Cache<FamilyId, Arc<Semaphore>>,
    permits: Arc<Semaphore>,
    /// Permits of one family.
    share: usize,
}

/// Permit of a family and of this process. It is returned when this is dropped.
#[derive(Debug)]
pub struct FairPermit {
    _own: OwnedSemaphorePermit,
    _permit: OwnedSemaphorePermit,
}

impl FairPermits {
    /// One of these permits for each family.
    pub(crate) fn new(permits: usize) -> Self {
        Self::with_share(permits, 1)
    }

    pub(crate) fn with_share(permits: usize, share: usize) -> Self {
        Self {
            tenants: Cache::builder().max_capacity(MAX_TENANTS).time_to_idle(TENANT_IDLE).build(),
            permits: Arc::new(Semaphore::new(permits)),
            share,
        }
    }

    /// Waits for a permit of a family, then for one of this process. `None` after `timeout`.
    pub(crate) async fn acquire(&self, family: FamilyId, timeout: Duration) -> Option<FairPermit> {
        let tenant = self.tenants.get_with(family, || Arc::new(Semaphore::new(self.share)));
        let acquired = async {
            // In this order: a family that waits for its own share holds no permit of the process meanwhile.
            let own = tenant.acquire_owned().await.ok()?;
            let permit = Arc::clone(&self.permits).acquire_owned().await.ok()?;
            Some(FairPermit { _own: own, _permit: permit })
        };
        tokio::time::timeout(timeout, acquired).await.ok()?
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::WorkspaceId;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_family_takes_one_permit_and_leaves_the_others() {
        let permits = FairPermits::new(2);
        let family = |id| FamilyId::of_workspace(WorkspaceId::new(id), None);
        let wait = Duration::from_secs(1);
        let first = permits.acquire(family(1), wait).await;
        assert!(first.is_some());
        assert!(permits.acquire(family(1), wait).await.is_none(), "one at a time");
        let other = permits.acquire(family(2), wait).await;
        assert!(other.is_some());
        assert!(permits.acquire(family(3), wait).await.is_none(), "two in all");
        drop(first);
        assert!(permits.acquire(family(1), wait).await.is_some());
    }
}
