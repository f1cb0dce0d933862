//! Permits of a bounded number per key. Main types: [`KeyedPermits`], and [`CallerPermits`] for the callers of requests
//! and sockets.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use relay_domain::{WorkspaceId, WorkspaceScope, metric_names as name, workspaces::family::FamilyId};
use relay_engine::access::limits::RateLimitSubject;

/// Limit that refused a connection, a socket or a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// Of this gateway.
    Process,
    /// Of the client's address.
    Address,
    /// Of a workspace with its family.
    Workspace,
    /// Of one caller, whose token may be rotated.
    Token,
}

impl Limit {
    /// Returns the label of the metric.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Address => "address",
            Self::Workspace => "workspace",
            Self::Token => "token",
        }
    }

    pub(crate) fn count_refusal(self) {
        metrics::counter!(name::CONNECTIONS_REFUSED, "reason" => self.as_str()).increment(1);
    }
}

/// A number of permits for each key. Cheap to clone. Holds no key without an acquired permit.
#[derive(Debug)]
pub(super) struct KeyedPermits<K> {
    taken: Arc<Mutex<HashMap<K, usize>>>,
    limit: usize,
}

/// Acquired permit, returned when this is dropped.
#[derive(Debug)]
pub(super) struct KeyedPermit<K: Eq + Hash> {
    taken: Arc<Mutex<HashMap<K, usize>>>,
    key: K,
}

impl<K> Clone for KeyedPermits<K> {
    fn clone(&self) -> Self {
        Self { taken: Arc::clone(&self.taken), limit: self.limit }
    }
}

impl<K: Eq + Hash + Clone> KeyedPermits<K> {
    pub(super) fn new(limit: usize) -> Self {
        Self { taken: Arc::default(), limit }
    }

    /// Acquires a permit of `key`; `None` if all are taken.
    pub(super) fn try_acquire(&self, key: K) -> Option<KeyedPermit<K>> {
        let mut taken = lock(&self.taken);
        let count = taken.get(&key).copied().unwrap_or_default();
        if count >= self.limit {
            return None;
        }
        taken.insert(key.clone(), count + 1);
        Some(KeyedPermit { taken: Arc::clone(&self.taken), key })
    }
}

impl<K: Eq + Hash> Drop for KeyedPermit<K> {
    fn drop(&mut self) {
        let mut taken = lock(&self.taken);
        if let Some(count) = taken.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.key);
            }
        }
    }
}

fn lock<K>(taken: &Mutex<HashMap<K, usize>>) -> MutexGuard<'_, HashMap<K, usize>> {
    taken.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Permits of callers, for one kind of connection.
#[derive(Debug, Clone)]
pub struct CallerPermits {
    total: KeyedPermits<()>,
    families: KeyedPermits<FamilyId>,
    callers: KeyedPermits<(WorkspaceId, RateLimitSubject)>,
}

/// Permit of one caller, returned when this is dropped.
#[derive(Debug)]
pub struct CallerPermit {
    _total: KeyedPermit<()>,
    family: KeyedPermit<FamilyId>,
    _caller: KeyedPermit<(WorkspaceId, RateLimitSubject)>,
}

impl CallerPermit {
    pub(super) const fn family(&self) -> FamilyId {
        self.family.key
    }
}

impl CallerPermits {
    pub(super) fn new(total: usize, family: usize, caller: usize) -> Self {
        Self {
            total: KeyedPermits::new(total),
            families: KeyedPermits::new(family),
            callers: KeyedPermits::new(caller),
        }
    }

    /// Acquires a permit for a caller.
    ///
    /// # Errors
    /// The limit that is reached.
    pub(crate) fn try_acquire(
        &self,
        family: FamilyId,
        scope: WorkspaceScope,
        caller: RateLimitSubject,
    ) -> Result<CallerPermit, Limit> {
        let workspace = scope.workspace_id();
        let permit = || {
            // Narrowest first: a caller at its own limit gets that reason, and permits before a refusal are returned by
            // its `?`.
            Ok(CallerPermit {
                _caller: self.callers.try_acquire((workspace, caller)).ok_or(Limit::Token)?,
                family: self.families.try_acquire(family).ok_or(Limit::Workspace)?,
                _total: self.total.try_acquire(()).ok_or(Limit::Process)?,
            })
        };
        permit().inspect_err(|limit: &Limit| limit.count_refusal())
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::AgentId;

    use super::*;

    #[test]
    fn one_family_cannot_take_all_permits_and_permits_are_returned() {
        let permits = CallerPermits::new(8, 4, 2);
        let take_in = |family: i64, workspace: i64, agent: i64| {
            let family = FamilyId::of_workspace(WorkspaceId::new(family), None);
            let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(workspace));
            permits.try_acquire(family, scope, RateLimitSubject::Agent(AgentId::new(agent)))
        };
        let take = |workspace, agent| take_in(workspace, workspace, agent);
        let mut greedy: Vec<CallerPermit> = (0..4).map(|n| take(1, n / 2).unwrap()).collect();
        assert_eq!(take(1, 0).unwrap_err(), Limit::Token);
        assert_eq!(take(1, 9).unwrap_err(), Limit::Workspace);
        assert_eq!(take_in(1, 11, 9).unwrap_err(), Limit::Workspace, "a child of it");
        let others: Vec<CallerPermit> = (4..8).map(|n| take(n, n).unwrap()).collect();
        assert_eq!(take(2, 9).unwrap_err(), Limit::Process);
        greedy.pop();
        let again = take(2, 9).unwrap();
        drop((greedy, others, again));
        assert!(lock(&permits.total.taken).is_empty());
        assert!(lock(&permits.families.taken).is_empty());
        assert!(lock(&permits.callers.taken).is_empty());
    }
}
