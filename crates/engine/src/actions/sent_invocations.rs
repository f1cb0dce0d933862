//! [`SentInvocations`]: invocations that were written to their handlers' sockets, until that is recorded. Most have
//! their outcome before, which records it with itself.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use relay_domain::{InvocationId, NodeId, ProviderName, WorkspaceScope};
use relay_store::SentInvocation;
use relay_tasks::metric_names::{BATCH_ITEMS, QUEUE_REFUSED};
use tokio::sync::Notify;

/// Label of the metrics.
const QUEUE: &str = "dispatch_notes";
/// Bound of the invocations that wait for their record. One that finds no room is found by its gateway's poll, which
/// adds it again.
const MAX_WAITING: usize = 8192;
/// Invocations recorded by one statement.
const BATCH: usize = 1000;
/// Time in which invocations gather. Most are answered within it, and need no record. After the end of the gateway, or
/// with a connection that is replaced in this time, frames of this time are sent again.
const GATHER_FOR: Duration = Duration::from_millis(20);

#[derive(Debug, Default)]
pub(crate) struct SentInvocations {
    waiting: Mutex<HashMap<(WorkspaceScope, InvocationId), SentInvocation>>,
    added: Notify,
}

impl SentInvocations {
    /// Adds an invocation, in place of an earlier attempt, or of an earlier connection of its provider. Connections
    /// note what they have sent in no order.
    pub(super) fn add(&self, sent: SentInvocation) {
        let mut waiting = self.lock();
        let has_room = waiting.len() < MAX_WAITING;
        match waiting.entry((sent.scope, sent.invocation_id)) {
            Entry::Occupied(mut other) => {
                if (other.get().attempt, other.get().epoch) < (sent.attempt, sent.epoch) {
                    other.insert(sent);
                }
            }
            Entry::Vacant(place) if has_room => _ = place.insert(sent),
            Entry::Vacant(_) => metrics::counter!(QUEUE_REFUSED, "queue" => QUEUE).increment(1),
        }
        drop(waiting);
        self.added.notify_one();
    }

    /// Returns the node and the provider whose socket an invocation was written to, until that is recorded.
    pub(super) fn location(&self, scope: WorkspaceScope, invocation: InvocationId) -> Option<(NodeId, ProviderName)> {
        self.lock().get(&(scope, invocation)).map(|sent| (sent.node_id.clone(), sent.provider.clone()))
    }

    /// Removes an invocation that has its outcome.
    pub(super) fn remove(&self, scope: WorkspaceScope, invocation: InvocationId) {
        self.lock().remove(&(scope, invocation));
    }

    /// Waits for invocations to record, for a second at most. They stay until [`Self::remove_recorded`]: an outcome
    /// that comes meanwhile must find them.
    pub(super) async fn next_batch(&self) -> Vec<SentInvocation> {
        let _ = tokio::time::timeout(Duration::from_secs(1), self.added.notified()).await;
        tokio::time::sleep(GATHER_FOR).await;
        let batch = self.oldest();
        if !batch.is_empty() {
            metrics::histogram!(BATCH_ITEMS, "queue" => QUEUE).record(batch.len() as f64);
        }
        batch
    }

    fn oldest(&self) -> Vec<SentInvocation> {
        let waiting = self.lock();
        let mut oldest: Vec<&SentInvocation> = waiting.values().collect();
        if oldest.len() > BATCH {
            oldest.sort_unstable_by_key(|one| one.written_at);
            oldest.truncate(BATCH);
        }
        oldest.into_iter().cloned().collect()
    }

    /// Removes recorded invocations, unless a later attempt took the place of the recorded one.
    pub(super) fn remove_recorded(&self, recorded: &[SentInvocation]) {
        let mut waiting = self.lock();
        for one in recorded {
            let key = (one.scope, one.invocation_id);
            if waiting.get(&key).is_some_and(|other| (other.attempt, other.epoch) == (one.attempt, one.epoch)) {
                waiting.remove(&key);
            }
        }
        let is_empty = waiting.is_empty();
        drop(waiting);
        if !is_empty {
            self.added.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(WorkspaceScope, InvocationId), SentInvocation>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::WorkspaceId;
    use tokio::time::Instant;

    use super::*;

    fn scope(workspace: i64) -> WorkspaceScope {
        WorkspaceScope::from_engine_row(WorkspaceId::new(workspace))
    }

    fn sent(workspace: i64, invocation: i64, attempt: i32) -> SentInvocation {
        SentInvocation {
            scope: scope(workspace),
            invocation_id: InvocationId::new(invocation),
            attempt,
            node_id: NodeId::new(format!("n{attempt}")),
            provider: ProviderName::new("a"),
            epoch: 1,
            written_at: Instant::now(),
        }
    }

    async fn batch_of(waiting: &SentInvocations) -> Vec<(i64, i64)> {
        let batch = waiting.next_batch().await;
        let mut keys: Vec<_> =
            batch.iter().map(|one| (one.scope.workspace_id().get(), one.invocation_id.get())).collect();
        keys.sort_unstable();
        keys
    }

    #[tokio::test(start_paused = true)]
    async fn only_invocations_without_an_outcome_are_recorded_as_sent() {
        let waiting = SentInvocations::default();
        [sent(1, 7, 1), sent(1, 8, 1), sent(2, 7, 1)].into_iter().for_each(|one| waiting.add(one));
        waiting.remove(scope(1), InvocationId::new(7));
        assert_eq!(batch_of(&waiting).await, [(1, 8), (2, 7)]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_invocation_is_found_until_its_record_is_written() {
        let waiting = SentInvocations::default();
        waiting.add(sent(1, 7, 1));
        let batch = waiting.next_batch().await;
        let node = || waiting.location(scope(1), InvocationId::new(7)).map(|(node, _)| node);
        assert_eq!(node(), Some(NodeId::new("n1")), "while it is being written");
        waiting.add(sent(1, 7, 2));
        waiting.add(sent(1, 7, 1));
        waiting.remove_recorded(&batch);
        assert_eq!(node(), Some(NodeId::new("n2")), "a later attempt stays");
        let batch = waiting.next_batch().await;
        waiting.remove_recorded(&batch);
        assert_eq!(node(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn those_beyond_the_bound_of_a_statement_follow_without_another_one() {
        let waiting = SentInvocations::default();
        (0..1500).for_each(|invocation| waiting.add(sent(1, invocation, 1)));
        let first = waiting.next_batch().await;
        waiting.remove_recorded(&first);
        let began = Instant::now();
        assert_eq!((first.len(), waiting.next_batch().await.len()), (1000, 500));
        assert!(began.elapsed() < Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_that_waits_is_bounded() {
        let waiting = SentInvocations::default();
        (0..9000).for_each(|invocation| waiting.add(sent(1, invocation, 1)));
        assert!(waiting.location(scope(1), InvocationId::new(8191)).is_some());
        assert!(waiting.location(scope(1), InvocationId::new(8192)).is_none());
    }
}
