//! [`ByteBudget`]: bound of the bytes that a process holds of message bodies, shared fairly by workspaces.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError, Weak},
};

use relay_domain::{
    WorkspaceId,
    metric_names::{BODY_BYTES, BODY_WAITS},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Parts of a budget of which one workspace may hold one, so that a slow one leaves room for others.
const SHARES: usize = 4;
/// Entries of the map above which those of workspaces that hold nothing are removed.
const REMEMBERED: usize = 1024;

/// Bytes of one use in this process. Cheap to clone; all clones are the same budget.
#[derive(Debug, Clone)]
pub struct ByteBudget {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Label of its metrics.
    name: &'static str,
    share: usize,
    process: Arc<Semaphore>,
    workspaces: Mutex<HashMap<WorkspaceId, Weak<Semaphore>>>,
}

/// Reserved bytes. They are free again when this is dropped.
#[derive(Debug)]
pub struct ByteLease {
    name: &'static str,
    bytes: usize,
    _process: OwnedSemaphorePermit,
    _workspaces: Vec<OwnedSemaphorePermit>,
}

impl Drop for ByteLease {
    fn drop(&mut self) {
        metrics::gauge!(BODY_BYTES, "use" => self.name).decrement(as_metric(self.bytes));
    }
}

impl ByteBudget {
    /// Creates a budget of `total` bytes, a quarter of them for one workspace.
    #[must_use]
    pub fn new(name: &'static str, total: usize) -> Self {
        let process = Arc::new(Semaphore::new(total));
        Self { inner: Arc::new(Inner { name, share: total / SHARES, process, workspaces: Mutex::default() }) }
    }

    /// Bytes that one workspace may hold.
    #[must_use]
    pub fn share(&self) -> usize {
        self.inner.share
    }

    /// Waits until a workspace may hold `bytes` more. More than its share counts as its share, so that something too
    /// large is held alone.
    ///
    /// The holder must not reserve more before it has dropped the lease.
    pub async fn reserve(&self, workspace: WorkspaceId, bytes: usize) -> ByteLease {
        self.reserve_all([(workspace, bytes)]).await
    }

    /// Does the same for several workspaces.
    pub async fn reserve_all(&self, parts: impl IntoIterator<Item = (WorkspaceId, usize)>) -> ByteLease {
        let mut by_workspace = BTreeMap::new();
        for (workspace, bytes) in parts {
            *by_workspace.entry(workspace).or_insert(0) += bytes;
        }
        // Shares in the order of the workspaces, then the process, whose holders wait for nothing: no two wait for each
        // other.
        let (mut shares, mut total) = (Vec::with_capacity(by_workspace.len()), 0);
        for (workspace, bytes) in by_workspace {
            let bytes = bytes.min(self.inner.share);
            shares.push(self.inner.acquire(self.inner.workspace(workspace), bytes).await);
            total += bytes;
        }
        let total = total.min(self.inner.share * SHARES);
        let process = self.inner.acquire(Arc::clone(&self.inner.process), total).await;
        self.inner.lease(process, shares, total)
    }

    /// Reserves bytes for a workspace if they are free.
    #[must_use]
    pub fn try_reserve(&self, workspace: WorkspaceId, bytes: usize) -> Option<ByteLease> {
        let bytes = bytes.min(self.inner.share);
        let permits = u32::try_from(bytes).ok()?;
        let share = self.inner.workspace(workspace).try_acquire_many_owned(permits).ok()?;
        let process = Arc::clone(&self.inner.process).try_acquire_many_owned(permits).ok()?;
        Some(self.inner.lease(process, vec![share], bytes))
    }

    /// Bytes that a workspace could reserve now.
    #[must_use]
    pub fn free(&self, workspace: WorkspaceId) -> usize {
        self.inner.workspace(workspace).available_permits().min(self.inner.process.available_permits())
    }
}

impl Inner {
    fn workspace(&self, workspace: WorkspaceId) -> Arc<Semaphore> {
        let mut workspaces = self.workspaces.lock().unwrap_or_else(PoisonError::into_inner);
        if workspaces.len() >= REMEMBERED {
            workspaces.retain(|_, share| share.strong_count() > 0);
        }
        if let Some(share) = workspaces.get(&workspace).and_then(Weak::upgrade) {
            return share;
        }
        let share = Arc::new(Semaphore::new(self.share));
        workspaces.insert(workspace, Arc::downgrade(&share));
        share
    }

    async fn acquire(&self, semaphore: Arc<Semaphore>, bytes: usize) -> OwnedSemaphorePermit {
        let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
        match Arc::clone(&semaphore).try_acquire_many_owned(permits) {
            Ok(permit) => permit,
            Err(_) => {
                metrics::counter!(BODY_WAITS, "use" => self.name).increment(1);
                match semaphore.acquire_many_owned(permits).await {
                    Ok(permit) => permit,
                    // Semaphores of a budget are never closed.
                    Err(_) => std::future::pending().await,
                }
            }
        }
    }

    fn lease(&self, process: OwnedSemaphorePermit, shares: Vec<OwnedSemaphorePermit>, bytes: usize) -> ByteLease {
        metrics::gauge!(BODY_BYTES, "use" => self.name).increment(as_metric(bytes));
        ByteLease { name: self.name, bytes, _process: process, _workspaces: shares }
    }
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
const fn as_metric(bytes: usize) -> f64 {
    bytes as f64
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_workspace_holds_its_share_and_leaves_the_rest() {
        let budget = ByteBudget::new("test", 400);
        let (one, two) = (WorkspaceId::new(1), WorkspaceId::new(2));
        let held = budget.reserve(one, 60).await;
        assert!(budget.reserve(one, 60).now_or_never().is_none(), "its share is 100");
        assert!(budget.try_reserve(one, 41).is_none());
        assert_eq!((budget.free(one), budget.free(two)), (40, 100));
        let large = budget.reserve(two, 1_000_000).now_or_never().expect("more than its share is held alone");
        drop(held);
        assert!(budget.reserve(one, 100).now_or_never().is_some());
        drop(large);
        assert_eq!(budget.inner.process.available_permits(), 400);
    }

    #[tokio::test]
    async fn the_process_has_a_bound_as_well() {
        let budget = ByteBudget::new("test", 400);
        let mut held = Vec::new();
        for workspace in 0..4 {
            held.push(budget.reserve(WorkspaceId::new(workspace), 100).await);
        }
        let other = WorkspaceId::new(9);
        assert!(budget.try_reserve(other, 1).is_none());
        assert!(budget.reserve_all([(other, 1)]).now_or_never().is_none());
        held.pop();
        let both = budget.reserve_all([(other, 50), (WorkspaceId::new(3), 50)]).now_or_never();
        assert!(both.is_some());
    }
}
