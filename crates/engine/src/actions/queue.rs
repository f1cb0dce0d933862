//! Group commit of invocations and of their outcomes. Each has one transaction at a time, which takes the requests that
//! arrived during the previous one. Workspaces take turns, so that one with thousands of requests does not delay the
//! first request of another. A workspace in which another process is placing is requeued, so that the others need not
//! wait for its lock, and after a second it gets a transaction of its own that waits.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Weak,
    time::{Duration, Instant},
};

use relay_domain::WorkspaceId;
use relay_store::{
    StoreError, StoreResult,
    actions::{
        invoke::InvokeOutcome,
        new_invocation::NewInvocation,
        outcomes::{InvocationOutcome, OutcomeBatch, OutcomeRecording},
    },
};
use tokio::sync::{mpsc, oneshot};

use crate::{Engine, EngineError, EngineResult, Inner};

/// Bound of the queue. Beyond it callers are refused at once, with `Retry-After`.
const QUEUE: usize = 8192;
const BATCH: usize = 256;
/// Pause when all requests are of workspaces that other processes hold locked.
const BUSY_PAUSE: Duration = Duration::from_millis(5);
/// A workspace that was requeued for this long gets a batch of its own, which waits for the lock.
const STARVATION_LIMIT: Duration = Duration::from_secs(1);
/// Retries of a batch that lost a lock race.
const ABORT_RETRIES: u32 = 5;
/// Time to find out the outcome of an unknown COMMIT. Then callers get no status: clients send a request again after a
/// 5xx.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(30);
const RESOLVE_RETRY: Duration = Duration::from_millis(250);

type QueuedItem<T, A> = (T, oneshot::Sender<EngineResult<A>>);

/// Senders of the two queues.
#[derive(Debug)]
pub(crate) struct CallQueues {
    calls: mpsc::Sender<QueuedItem<NewInvocation, InvokeOutcome>>,
    outcomes: mpsc::Sender<QueuedItem<InvocationOutcome, OutcomeRecording>>,
}

/// New invocations that wait for their transaction.
pub(crate) type CallReceiver = mpsc::Receiver<QueuedItem<NewInvocation, InvokeOutcome>>;
/// Outcomes that wait for theirs.
pub(crate) type OutcomeReceiver = mpsc::Receiver<QueuedItem<InvocationOutcome, OutcomeRecording>>;

impl CallQueues {
    pub(crate) fn new() -> (Self, CallReceiver, OutcomeReceiver) {
        let (calls, new) = mpsc::channel(QUEUE);
        let (outcomes, ended) = mpsc::channel(QUEUE);
        (Self { calls, outcomes }, new, ended)
    }

    pub(super) async fn create(&self, new: NewInvocation) -> EngineResult<InvokeOutcome> {
        submit(&self.calls, new).await
    }

    pub(super) async fn record_outcome(&self, outcome: InvocationOutcome) -> EngineResult<OutcomeRecording> {
        submit(&self.outcomes, outcome).await
    }
}

async fn submit<T, A>(queue: &mpsc::Sender<QueuedItem<T, A>>, item: T) -> EngineResult<A> {
    let (reply, answer) = oneshot::channel();
    queue.try_send((item, reply)).map_err(|_| EngineError::Overloaded)?;
    answer.await.unwrap_or(Err(EngineError::OutcomeUnknown))
}

/// FIFO per workspace; workspaces take turns.
struct FairQueue<T> {
    workspaces: VecDeque<(WorkspaceId, VecDeque<T>)>,
    waiting: usize,
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        Self { workspaces: VecDeque::new(), waiting: 0 }
    }
}

impl<T> FairQueue<T> {
    fn push(&mut self, workspace: WorkspaceId, item: T) {
        self.waiting += 1;
        match self.workspaces.iter_mut().find(|(known, _)| *known == workspace) {
            Some((_, items)) => items.push_back(item),
            None => self.workspaces.push_back((workspace, VecDeque::from([item]))),
        }
    }

    /// Returns an item to the front of its workspace.
    fn push_front(&mut self, workspace: WorkspaceId, item: T) {
        self.waiting += 1;
        match self.workspaces.iter_mut().find(|(known, _)| *known == workspace) {
            Some((_, items)) => items.push_front(item),
            None => self.workspaces.push_back((workspace, VecDeque::from([item]))),
        }
    }

    /// Takes up to `most` items, one of each workspace in turn.
    fn take(&mut self, most: usize) -> Vec<T> {
        let mut taken = Vec::with_capacity(most.min(self.waiting));
        while taken.len() < most {
            let Some((workspace, mut items)) = self.workspaces.pop_front() else { break };
            taken.extend(items.pop_front());
            if !items.is_empty() {
                self.workspaces.push_back((workspace, items));
            }
        }
        self.waiting -= taken.len();
        taken
    }

    /// Takes up to `most` items of one workspace.
    fn take_from(&mut self, workspace: WorkspaceId, most: usize) -> Vec<T> {
        let Some(at) = self.workspaces.iter().position(|(known, _)| *known == workspace) else { return Vec::new() };
        let items = &mut self.workspaces[at].1;
        let taken: Vec<T> = items.drain(..items.len().min(most)).collect();
        if items.is_empty() {
            self.workspaces.remove(at);
        }
        self.waiting -= taken.len();
        taken
    }
}

/// Returns the next batch; `None` when all senders are dropped.
async fn next_batch<T>(
    queue: &mut mpsc::Receiver<T>,
    turns: &mut FairQueue<T>,
    of: impl Fn(&T) -> WorkspaceId,
) -> Option<Vec<T>> {
    if turns.waiting == 0 {
        let first = queue.recv().await?;
        turns.push(of(&first), first);
    }
    while turns.waiting < QUEUE
        && let Ok(item) = queue.try_recv()
    {
        turns.push(of(&item), item);
    }
    Some(turns.take(BATCH))
}

/// Creates invocations until the engine is dropped.
pub(crate) async fn run_calls(engine: Weak<Inner>, mut queue: CallReceiver) {
    let mut turns = FairQueue::default();
    // Workspaces with requeued requests, and the time of the first requeue.
    let mut starving_since: BTreeMap<WorkspaceId, Instant> = BTreeMap::new();
    loop {
        let starved = starving_since
            .iter()
            .find(|(_, since)| since.elapsed() > STARVATION_LIMIT)
            .map(|(workspace, _)| *workspace);
        let batch = match starved {
            Some(workspace) => {
                starving_since.remove(&workspace);
                turns.take_from(workspace, BATCH)
            }
            None => match next_batch(&mut queue, &mut turns, |(new, _)| new.scope.workspace_id()).await {
                Some(batch) => batch,
                None => return,
            },
        };
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        let (new, replies): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
        let outcomes = engine.create_all(&new).await;
        let taken = new.len();
        let mut busy = Vec::new();
        for ((one, reply), outcome) in new.into_iter().zip(replies).zip(outcomes) {
            match &outcome {
                Ok(InvokeOutcome::Busy) => {
                    starving_since.entry(one.scope.workspace_id()).or_insert_with(Instant::now);
                    busy.push((one, reply));
                    continue;
                }
                Ok(InvokeOutcome::Created(_, Some(dispatch))) => engine.hint_dispatch(&one, dispatch),
                _ => {}
            }
            starving_since.remove(&one.scope.workspace_id());
            let _ = reply.send(outcome);
        }
        drop(engine);
        let none_was_made = busy.len() == taken;
        busy.into_iter().rev().for_each(|item| turns.push_front(item.0.scope.workspace_id(), item));
        if none_was_made {
            tokio::time::sleep(BUSY_PAUSE).await;
        }
    }
}

/// Records outcomes until the engine is dropped.
pub(crate) async fn run_outcomes(engine: Weak<Inner>, mut queue: OutcomeReceiver) {
    let mut turns = FairQueue::default();
    while let Some(batch) = next_batch(&mut queue, &mut turns, |(outcome, _)| outcome.scope.workspace_id()).await {
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        let (outcomes, replies): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
        for (reply, finished) in replies.into_iter().zip(engine.record_all(&outcomes).await) {
            let _ = reply.send(finished);
        }
    }
}

impl Engine {
    async fn create_all(&self, new: &[NewInvocation]) -> Vec<EngineResult<InvokeOutcome>> {
        match with_abort_retries(|| self.store().invoke(new)).await {
            Ok((outcomes, recorded)) => {
                recorded.into_iter().for_each(|recorded| self.announce(recorded));
                outcomes.into_iter().map(Ok).collect()
            }
            Err(StoreError::Unavailable { .. }) => self.resolve_commit_outcome(new).await,
            Err(error) if new.len() == 1 => vec![Err(error.into())],
            // One at a time shows which request is at fault.
            Err(_) => {
                let mut outcomes = Vec::with_capacity(new.len());
                for one in new {
                    outcomes.extend(Box::pin(self.create_all(std::slice::from_ref(one))).await);
                }
                outcomes
            }
        }
    }

    /// Finds out the outcome of a batch whose COMMIT got no answer.
    async fn resolve_commit_outcome(&self, new: &[NewInvocation]) -> Vec<EngineResult<InvokeOutcome>> {
        let until = tokio::time::Instant::now() + RESOLVE_TIMEOUT;
        loop {
            match self.store().find_invocations(new).await {
                Ok(made) => {
                    let outcome = |one: &NewInvocation| {
                        let row = made.iter().find(|row| row.invocation_id == one.id && row.scope == one.scope);
                        // The gateways find the dispatched ones by polling.
                        row.map(|row| InvokeOutcome::Created(row.status, None)).ok_or(EngineError::CommitUnavailable)
                    };
                    return new.iter().map(outcome).collect();
                }
                Err(error) if tokio::time::Instant::now() >= until => {
                    tracing::error!(
                        error = &error as &dyn std::error::Error,
                        "commit outcome of invocations unknown, callers get no status"
                    );
                    return new.iter().map(|_| Err(EngineError::OutcomeUnknown)).collect();
                }
                Err(_) => tokio::time::sleep(RESOLVE_RETRY).await,
            }
        }
    }

    /// Records outcomes. They are recorded once however often they are submitted, so an unknown commit outcome needs no
    /// resolution.
    async fn record_all(&self, outcomes: &[InvocationOutcome]) -> Vec<EngineResult<OutcomeRecording>> {
        match with_abort_retries(|| self.store().record_outcomes(outcomes, self.now())).await {
            Ok(mut done) => {
                self.announce_outcomes(&mut done);
                let OutcomeBatch { outcomes, .. } = done;
                outcomes.into_iter().map(Ok).collect()
            }
            // Storage refuses this outcome: it must not be retried for ever.
            Err(error @ (StoreError::Refused { .. } | StoreError::Corrupt { .. })) if outcomes.len() == 1 => {
                tracing::error!(error = &error as &dyn std::error::Error, "storage refused an outcome");
                vec![Err(error.into())]
            }
            Err(error) if outcomes.len() == 1 || error.is_unavailable() => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "failed to record outcomes, callers may retry"
                );
                outcomes.iter().map(|_| Err(EngineError::CommitUnavailable)).collect()
            }
            Err(_) => {
                let mut finished = Vec::with_capacity(outcomes.len());
                for one in outcomes {
                    finished.extend(Box::pin(self.record_all(std::slice::from_ref(one))).await);
                }
                finished
            }
        }
    }
}

/// Retries transactions that lost against others.
async fn with_abort_retries<T, F: Future<Output = StoreResult<T>>>(work: impl Fn() -> F) -> StoreResult<T> {
    let mut retries = 0;
    loop {
        match work().await {
            Err(StoreError::Aborted { .. }) if retries < ABORT_RETRIES => retries += 1,
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workspaces_take_turns() {
        let mut turns = FairQueue::default();
        (0..10_000).for_each(|n| turns.push(WorkspaceId::new(1), (1, n)));
        assert_eq!(turns.take(3), [(1, 0), (1, 1), (1, 2)]);
        turns.push(WorkspaceId::new(2), (2, 0));
        assert_eq!(turns.take(4), [(1, 3), (2, 0), (1, 4), (1, 5)]);
        assert_eq!((turns.waiting, turns.take(10_000).len(), turns.waiting), (9_994, 9_994, 0));
    }

    #[test]
    fn returned_items_keep_their_order() {
        let mut turns = FairQueue::default();
        (0..4).for_each(|n| turns.push(WorkspaceId::new(1), (1, n)));
        turns.push(WorkspaceId::new(2), (2, 0));
        assert_eq!(turns.take(3), [(1, 0), (2, 0), (1, 1)]);
        [(1, 1), (2, 0), (1, 0)].into_iter().for_each(|item| turns.push_front(WorkspaceId::new(item.0), item));
        assert_eq!(turns.take(3), [(1, 0), (2, 0), (1, 1)]);
        assert_eq!((turns.take(9), turns.waiting), (vec![(1, 2), (1, 3)], 0));
    }

    #[test]
    fn items_of_one_workspace_can_be_taken_separately() {
        let mut turns = FairQueue::default();
        (0..3).for_each(|n| turns.push(WorkspaceId::new(1), (1, n)));
        turns.push(WorkspaceId::new(2), (2, 0));
        assert_eq!(turns.take_from(WorkspaceId::new(1), 2), [(1, 0), (1, 1)]);
        assert_eq!(turns.take_from(WorkspaceId::new(1), 2), [(1, 2)]);
        assert_eq!((turns.take_from(WorkspaceId::new(1), 2).len(), turns.waiting), (0, 1));
        assert_eq!(turns.take(9), [(2, 0)]);
    }
}
