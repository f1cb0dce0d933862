//! Shares of tenants in the connections of a process. The work of one family of workspaces holds three quarters of them at
//! a time, so that a tenant whose statements wait for each other's locks leaves some to others, and to the process itself.
//!
//! The edge serves each request and each socket within [`serve_caller`], and names the family with [`count_for`] once the
//! caller is known. Statements of other tasks, such as commits, count for no family.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
};

use relay_domain::workspaces::family::FamilyId;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::{ConnectionPool, Lease};

/// Entries of the map above which those of families without a connection are removed.
const REMEMBERED: usize = 1024;

tokio::task_local! {
    static FAMILY: OnceLock<FamilyId>;
}

/// Runs the work of one caller, whose family is named later.
pub async fn serve_caller<F: Future>(work: F) -> F::Output {
    FAMILY.scope(OnceLock::new(), work).await
}

/// Counts the connections that the present caller's work takes from now on for a family. Does nothing outside of
/// [`serve_caller`].
pub fn count_for(family: FamilyId) {
    let _ = FAMILY.try_with(|counted| counted.set(family));
}

/// Connections of each family that may be in use at the same time.
#[derive(Debug)]
pub(super) struct Shares {
    most: usize,
    of_family: Mutex<HashMap<FamilyId, Weak<Semaphore>>>,
}

impl Shares {
    /// Shares of a pool of this size.
    pub(super) fn new(connections: u32) -> Self {
        Self { most: (connections as usize * 3 / 4).max(1), of_family: Mutex::default() }
    }

    /// Waits until the family of the present caller may use one more connection. `None` if it is not known.
    pub(super) async fn take(&self) -> Option<OwnedSemaphorePermit> {
        let family = FAMILY.try_with(|counted| counted.get().copied()).ok()??;
        // Never closed.
        self.share_of(family).acquire_owned().await.ok()
    }

    fn share_of(&self, family: FamilyId) -> Arc<Semaphore> {
        let mut of_family = self.of_family.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(share) = of_family.get(&family).and_then(Weak::upgrade) {
            return share;
        }
        if of_family.len() >= REMEMBERED {
            of_family.retain(|_, share| share.strong_count() > 0);
        }
        let share = Arc::new(Semaphore::new(self.most));
        of_family.insert(family, Arc::downgrade(&share));
        share
    }
}

impl ConnectionPool {
    /// Takes a connection within the share of the present caller's family, for which it waits as long as for a
    /// connection.
    pub(super) async fn acquire_share(&self) -> sqlx::Result<Lease> {
        let wait = self.driver.options().get_acquire_timeout();
        let share = timeout(wait, self.shares.take()).await.map_err(|_| sqlx::Error::PoolTimedOut)?;
        let mut lease = self.acquire().await?;
        lease.share = share;
        Ok(lease)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use relay_domain::WorkspaceId;

    use super::*;

    #[tokio::test]
    async fn a_family_takes_three_quarters_and_work_without_one_is_not_counted() {
        let shares = Shares::new(4);
        let take = |id: i64| {
            let shares = &shares;
            serve_caller(async move {
                count_for(FamilyId::of_workspace(WorkspaceId::new(id), None));
                shares.take().await.expect("counted")
            })
        };
        let mut held = vec![take(1).await, take(1).await, take(1).await];
        assert!(take(1).now_or_never().is_none(), "three of four");
        assert!(take(2).now_or_never().is_some(), "another family");
        assert!(serve_caller(shares.take()).await.is_none(), "a caller that is not known yet");
        assert!(shares.take().await.is_none());
        held.pop();
        assert!(take(1).now_or_never().is_some());
    }
}
