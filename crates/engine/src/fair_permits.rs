//! Places for costly work: some for this process, and fewer for each family of workspaces, so that none takes all.

use std::{sync::Arc, time::Duration};

use moka::sync::Cache;
use relay_domain::workspaces::family::FamilyId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bound of the families whose place is remembered.
const MAX_TENANTS: u64 = 100_000;
const TENANT_IDLE: Duration = Duration::from_secs(60);

/// Places of one kind of work. Cheap to clone.
#[derive(Clone)]
pub(crate) struct FairPlaces {
    tenants: Cache<FamilyId, Arc<Semaphore>>,
    places: Arc<Semaphore>,
    /// Places of one family.
    share: usize,
}

/// Taken place. It is free again when this is dropped.
#[derive(Debug)]
pub struct Place {
    _own: OwnedSemaphorePermit,
    _place: OwnedSemaphorePermit,
}

impl FairPlaces {
    /// One of these places for each family.
    pub(crate) fn new(places: usize) -> Self {
        Self::with_share(places, 1)
    }

    pub(crate) fn with_share(places: usize, share: usize) -> Self {
        Self {
            tenants: Cache::builder().max_capacity(MAX_TENANTS).time_to_idle(TENANT_IDLE).build(),
            places: Arc::new(Semaphore::new(places)),
            share,
        }
    }

    /// Waits for a place of a family, then for one of this process. `None` after `timeout`.
    pub(crate) async fn take(&self, family: FamilyId, timeout: Duration) -> Option<Place> {
        let tenant = self.tenants.get_with(family, || Arc::new(Semaphore::new(self.share)));
        let taken = async {
            let own = tenant.acquire_owned().await.ok()?;
            let place = Arc::clone(&self.places).acquire_owned().await.ok()?;
            Some(Place { _own: own, _place: place })
        };
        tokio::time::timeout(timeout, taken).await.ok()?
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::WorkspaceId;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_family_takes_one_place_and_leaves_the_others() {
        let places = FairPlaces::new(2);
        let family = |id| FamilyId::of_workspace(WorkspaceId::new(id), None);
        let wait = Duration::from_secs(1);
        let first = places.take(family(1), wait).await;
        assert!(first.is_some());
        assert!(places.take(family(1), wait).await.is_none(), "one at a time");
        let other = places.take(family(2), wait).await;
        assert!(other.is_some());
        assert!(places.take(family(3), wait).await.is_none(), "two in all");
        drop(first);
        assert!(places.take(family(1), wait).await.is_some());
    }
}
