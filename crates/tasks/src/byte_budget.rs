//! [`ByteBudget`]: bound of the bytes that a process holds of message bodies, shared fairly by tenants.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::metric_names::{BODY_BYTES, BODY_WAITS};

/// Parts of a budget of which one tenant may hold one, so that a slow one leaves room for others.
const SHARES: usize = 4;
/// Entries of the map above which those of tenants that hold nothing are removed.
const REMEMBERED: usize = 1024;

/// Bytes of one use in this process. Cheap to clone; all clones are the same budget.
#[derive(Debug)]
pub struct ByteBudget<K> {
    inner: Arc<Inner<K>>,
}

#[derive(Debug)]
struct Inner<K> {
    /// Label of its metrics.
    name: &'static str,
    share: usize,
    process: Arc<Semaphore>,
    tenants: Mutex<HashMap<K, Weak<Semaphore>>>,
}

/// Reserved bytes. They are free again when this is dropped.
#[derive(Debug)]
pub struct ByteLease {
    name: &'static str,
    bytes: usize,
    process: OwnedSemaphorePermit,
    share: OwnedSemaphorePermit,
}

impl ByteLease {
    /// Returns the bytes above `bytes` to the budget.
    pub fn shrink_to(&mut self, bytes: usize) {
        let excess = self.bytes.saturating_sub(bytes);
        self.bytes -= excess;
        // The permits return to their semaphores when they are dropped.
        drop((self.process.split(excess), self.share.split(excess)));
        metrics::gauge!(BODY_BYTES, "use" => self.name).decrement(as_metric(excess));
    }
}

impl Drop for ByteLease {
    fn drop(&mut self) {
        metrics::gauge!(BODY_BYTES, "use" => self.name).decrement(as_metric(self.bytes));
    }
}

impl<K> Clone for ByteBudget<K> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<K: Copy + Ord + Hash> ByteBudget<K> {
    /// Creates a budget of `total` bytes, a quarter of them for one tenant.
    #[must_use]
    pub fn new(name: &'static str, total: usize) -> Self {
        let process = Arc::new(Semaphore::new(total));
        Self { inner: Arc::new(Inner { name, share: total / SHARES, process, tenants: Mutex::default() }) }
    }

    /// Waits until a tenant may hold `bytes` more. More than its share counts as its share, so that something too
    /// large is held alone.
    ///
    /// The holder must not reserve more before it has dropped the lease.
    pub async fn reserve(&self, tenant: K, bytes: usize) -> ByteLease {
        let bytes = bytes.min(self.inner.share);
        // The process last: its holders wait for nothing, so no two wait for each other.
        let share = self.inner.acquire(self.inner.share_of(tenant), bytes).await;
        let process = self.inner.acquire(Arc::clone(&self.inner.process), bytes).await;
        self.inner.lease(process, share, bytes)
    }

    /// Reserves bytes for a tenant if they are free.
    #[must_use]
    pub fn try_reserve(&self, tenant: K, bytes: usize) -> Option<ByteLease> {
        let bytes = bytes.min(self.inner.share);
        let permits = u32::try_from(bytes).ok()?;
        let share = self.inner.share_of(tenant).try_acquire_many_owned(permits).ok()?;
        let process = Arc::clone(&self.inner.process).try_acquire_many_owned(permits).ok()?;
        Some(self.inner.lease(process, share, bytes))
    }

    /// Bytes that a tenant could reserve now.
    #[must_use]
    pub fn free(&self, tenant: K) -> usize {
        self.inner.share_of(tenant).available_permits().min(self.inner.process.available_permits())
    }
}

impl<K: Copy + Ord + Hash> Inner<K> {
    fn share_of(&self, tenant: K) -> Arc<Semaphore> {
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if tenants.len() >= REMEMBERED {
            tenants.retain(|_, share| share.strong_count() > 0);
        }
        if let Some(share) = tenants.get(&tenant).and_then(Weak::upgrade) {
            return share;
        }
        let share = Arc::new(Semaphore::new(self.share));
        tenants.insert(tenant, Arc::downgrade(&share));
        share
    }

    async fn acquire(&self, semaphore: Arc<Semaphore>, bytes: usize) -> OwnedSemaphorePermit {
        // At most a share, which is far below 4 GiB.
        let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
        // Tried first to count the reservations that have to wait.
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

    fn lease(&self, process: OwnedSemaphorePermit, share: OwnedSemaphorePermit, bytes: usize) -> ByteLease {
        metrics::gauge!(BODY_BYTES, "use" => self.name).increment(as_metric(bytes));
        ByteLease { name: self.name, bytes, process, share }
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
    async fn a_tenant_holds_its_share_and_leaves_the_rest() {
        let budget = ByteBudget::new("test", 400);
        let (one, two) = (1, 2);
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
    async fn a_lease_returns_what_it_does_not_need() {
        let budget = ByteBudget::new("test", 400);
        let mut lease = budget.reserve(1, 100).await;
        lease.shrink_to(30);
        assert_eq!(budget.free(1), 70);
        lease.shrink_to(50);
        assert_eq!(budget.free(1), 70);
        drop(lease);
        assert_eq!((budget.free(1), budget.inner.process.available_permits()), (100, 400));
    }

    #[tokio::test]
    async fn the_process_has_a_bound_as_well() {
        let budget = ByteBudget::new("test", 400);
        let mut held = Vec::new();
        for tenant in 0..4 {
            held.push(budget.reserve(tenant, 100).await);
        }
        let other = 9;
        assert!(budget.try_reserve(other, 1).is_none());
        assert!(budget.reserve(other, 1).now_or_never().is_none());
        held.pop();
        assert!(budget.reserve(other, 100).now_or_never().is_some());
    }
}
