//! Seats: places of a bounded number, counted per key.

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

/// Seats per key. Cheap to clone. Holds no key without a taken seat.
#[derive(Debug)]
pub(super) struct Seats<K> {
    taken: Arc<Mutex<HashMap<K, usize>>>,
    limit: usize,
}

/// Taken seat, free again when this is dropped.
#[derive(Debug)]
pub(super) struct Seat<K: Eq + Hash> {
    taken: Arc<Mutex<HashMap<K, usize>>>,
    key: K,
}

impl<K> Clone for Seats<K> {
    fn clone(&self) -> Self {
        Self { taken: Arc::clone(&self.taken), limit: self.limit }
    }
}

impl<K: Eq + Hash + Clone> Seats<K> {
    pub(super) fn new(limit: usize) -> Self {
        Self { taken: Arc::default(), limit }
    }

    /// Takes a seat of `key`; `None` if all are taken.
    pub(super) fn take(&self, key: K) -> Option<Seat<K>> {
        let mut taken = lock(&self.taken);
        let count = taken.get(&key).copied().unwrap_or_default();
        if count >= self.limit {
            return None;
        }
        taken.insert(key.clone(), count + 1);
        Some(Seat { taken: Arc::clone(&self.taken), key })
    }
}

impl<K: Eq + Hash> Drop for Seat<K> {
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

/// Seats of callers, of one kind of connection.
#[derive(Debug, Clone)]
pub struct CallerSeats {
    total: Seats<()>,
    families: Seats<FamilyId>,
    callers: Seats<(WorkspaceId, RateLimitSubject)>,
}

/// Seat of one caller, free again when this is dropped.
#[derive(Debug)]
pub struct CallerSeat {
    _total: Seat<()>,
    family: Seat<FamilyId>,
    _caller: Seat<(WorkspaceId, RateLimitSubject)>,
}

impl CallerSeat {
    pub(super) const fn family(&self) -> FamilyId {
        self.family.key
    }
}

impl CallerSeats {
    pub(super) fn new(total: usize, family: usize, caller: usize) -> Self {
        Self { total: Seats::new(total), families: Seats::new(family), callers: Seats::new(caller) }
    }

    /// Takes a seat for a caller.
    ///
    /// # Errors
    /// The limit that is reached.
    pub(crate) fn take(
        &self,
        family: FamilyId,
        scope: WorkspaceScope,
        caller: RateLimitSubject,
    ) -> Result<CallerSeat, Limit> {
        let workspace = scope.workspace_id();
        let seat = || {
            Ok(CallerSeat {
                _caller: self.callers.take((workspace, caller)).ok_or(Limit::Token)?,
                family: self.families.take(family).ok_or(Limit::Workspace)?,
                _total: self.total.take(()).ok_or(Limit::Process)?,
            })
        };
        seat().inspect_err(|limit: &Limit| limit.count_refusal())
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::AgentId;

    use super::*;

    #[test]
    fn one_family_cannot_take_all_seats_and_seats_are_released() {
        let seats = CallerSeats::new(8, 4, 2);
        let take_in = |family: i64, workspace: i64, agent: i64| {
            let family = FamilyId::of_workspace(WorkspaceId::new(family), None);
            let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(workspace));
            seats.take(family, scope, RateLimitSubject::Agent(AgentId::new(agent)))
        };
        let take = |workspace, agent| take_in(workspace, workspace, agent);
        let mut greedy: Vec<CallerSeat> = (0..4).map(|n| take(1, n / 2).unwrap()).collect();
        assert_eq!(take(1, 0).unwrap_err(), Limit::Token);
        assert_eq!(take(1, 9).unwrap_err(), Limit::Workspace);
        assert_eq!(take_in(1, 11, 9).unwrap_err(), Limit::Workspace, "a child of it");
        let others: Vec<CallerSeat> = (4..8).map(|n| take(n, n).unwrap()).collect();
        assert_eq!(take(2, 9).unwrap_err(), Limit::Process);
        greedy.pop();
        let again = take(2, 9).unwrap();
        drop((greedy, others, again));
        assert!(lock(&seats.total.taken).is_empty());
        assert!(lock(&seats.families.taken).is_empty());
        assert!(lock(&seats.callers.taken).is_empty());
    }
}
