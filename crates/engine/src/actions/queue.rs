//! Group commit of invocations and of their outcomes. Each has one transaction at a time, which takes the requests that
//! arrived during the previous one, the families of workspaces in turn. A workspace in which another process is placing
//! is requeued, so that the others need not wait for its lock, and after a second it gets a transaction of its own that
//! waits.

use std::{collections::BTreeMap, sync::Weak, time::Duration};

use relay_domain::{WorkspaceScope, encoded_length, workspaces::family::FamilyId};
use relay_store::{
    StoreError, StoreResult,
    actions::{
        invoke::InvokeOutcome,
        new_invocation::NewInvocation,
        outcomes::{InvocationOutcome, OutcomeBatch, OutcomeRecording},
    },
};
use relay_tasks::batches::{BatchSender, Batches, Linger, QueueConfig, QueueFull, Request, queue};
use tokio::time::Instant;

use super::Actions;
use crate::{Engine, EngineError, EngineResult, Inner};

/// Bound of the queue. Beyond it callers are refused at once, with `Retry-After`.
const QUEUE: usize = 8192;
/// Bytes of inputs, or of outputs, that wait at most: 85 of the largest, which have 768 KiB. Usual ones have a few KiB,
/// so that their number is bounded first.
const QUEUE_BYTES: u32 = 64 * 1024 * 1024;
/// A family holds at most a quarter of the queue, so that one that floods it leaves room for the others.
const KEY_SHARE: u32 = 4;
const BATCH: usize = 256;
/// Bytes of inputs, or of outputs, in one transaction: five of the largest, so that it stays short.
const BATCH_BYTES: usize = 4 * 1024 * 1024;
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

/// Item of a queue, and the family whose turn and share it takes.
#[derive(Debug)]
pub(crate) struct QueuedRequest<T> {
    family: FamilyId,
    item: T,
}

/// New invocation that waits for its transaction.
pub(crate) type QueuedCall = Request<QueuedRequest<NewInvocation>, EngineResult<InvokeOutcome>>;
/// Outcome that waits for its transaction.
pub(crate) type QueuedOutcome = Request<QueuedRequest<InvocationOutcome>, EngineResult<OutcomeRecording>>;

/// Senders of the two queues.
#[derive(Debug)]
pub(crate) struct CallQueues {
    calls: BatchSender<QueuedCall, FamilyId>,
    outcomes: BatchSender<QueuedOutcome, FamilyId>,
}

impl CallQueues {
    pub(crate) fn new() -> (Self, Batches<QueuedCall, FamilyId>, Batches<QueuedOutcome, FamilyId>) {
        let (calls, new) =
            queue(config::<QueuedCall>("calls", |call| call.item.family, |call| encoded_length(&call.item.item.input)));
        let (outcomes, ended) = queue(config::<QueuedOutcome>(
            "outcomes",
            |outcome| outcome.item.family,
            |outcome| outcome.item.item.result.as_ref().map_or_else(String::len, encoded_length),
        ));
        (Self { calls, outcomes }, new, ended)
    }

    pub(super) async fn create(&self, family: FamilyId, new: NewInvocation) -> EngineResult<InvokeOutcome> {
        submit(&self.calls, QueuedRequest { family, item: new }).await
    }

    pub(super) async fn record_outcome(
        &self,
        family: FamilyId,
        outcome: InvocationOutcome,
    ) -> EngineResult<OutcomeRecording> {
        submit(&self.outcomes, QueuedRequest { family, item: outcome }).await
    }
}

/// Bounds of a queue whose families take turns.
fn config<T>(name: &'static str, key: fn(&T) -> FamilyId, bytes: fn(&T) -> usize) -> QueueConfig<T, FamilyId> {
    QueueConfig {
        name,
        max_items: QUEUE,
        key_share: KEY_SHARE,
        max_bytes: QUEUE_BYTES,
        batch_items: BATCH,
        batch_bytes: BATCH_BYTES,
        batch_weight: u64::MAX,
        interval: Duration::ZERO,
        linger: Linger::NONE,
        key,
        bytes,
        weight: |_| 1,
    }
}

async fn submit<T, R>(queue: &BatchSender<Request<T, EngineResult<R>>, FamilyId>, item: T) -> EngineResult<R> {
    let answer = queue.try_request(item).map_err(|QueueFull| EngineError::Overloaded)?;
    // No reply: the task has ended, perhaps after the commit.
    answer.await.unwrap_or(Err(EngineError::OutcomeUnknown))
}

/// Creates invocations until the engine is dropped.
pub(crate) async fn run_calls(engine: Weak<Inner>, mut queue: Batches<QueuedCall, FamilyId>) {
    // Workspaces with requeued requests, and the time of the first requeue.
    let mut starving_since: BTreeMap<(FamilyId, WorkspaceScope), Instant> = BTreeMap::new();
    loop {
        let starved =
            starving_since.iter().find(|(_, since)| since.elapsed() > STARVATION_LIMIT).map(|(starved, _)| *starved);
        let batch = match starved {
            Some(starved) => {
                starving_since.remove(&starved);
                take_of_workspace(&mut queue, starved)
            }
            None => match queue.next().await {
                Some(batch) => batch,
                None => return,
            },
        };
        if batch.is_empty() {
            // Behind a whole batch of another starved workspace of its family, which is next.
            continue;
        }
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        let (queued, replies) = Request::split(batch);
        let (families, new): (Vec<_>, Vec<_>) = queued.into_iter().map(|one| (one.family, one.item)).unzip();
        let outcomes = engine.actions().create_all(&new).await;
        let taken = new.len();
        let mut busy = Vec::new();
        for (((item, family), reply), outcome) in new.into_iter().zip(families).zip(replies).zip(outcomes) {
            let workspace = (family, item.scope);
            match &outcome {
                Ok(InvokeOutcome::Busy) => {
                    // The first time counts, or a workspace that is requeued again and again would never get its own
                    // batch.
                    starving_since.entry(workspace).or_insert_with(Instant::now);
                    busy.push(Request { item: QueuedRequest { family, item }, reply });
                    continue;
                }
                Ok(InvokeOutcome::Created(_, Some(dispatch))) => engine.actions().hint_dispatch(&item, dispatch),
                _ => {}
            }
            starving_since.remove(&workspace);
            let _ = reply.send(outcome);
        }
        // Before the pause and the wait for the next batch, which must not keep the engine from ending.
        drop(engine);
        let none_was_made = busy.len() == taken;
        queue.put_back(busy);
        if none_was_made {
            tokio::time::sleep(BUSY_PAUSE).await;
        }
    }
}

/// Takes a batch of one workspace. The requests of others in its family keep their places.
fn take_of_workspace(
    queue: &mut Batches<QueuedCall, FamilyId>,
    (family, scope): (FamilyId, WorkspaceScope),
) -> Vec<QueuedCall> {
    let is_of_workspace = |call: &QueuedCall| call.item.item.scope == scope;
    let (taken, others) = queue.take_key(family).into_iter().partition(is_of_workspace);
    queue.put_back(others);
    taken
}

/// Records outcomes until the engine is dropped.
pub(crate) async fn run_outcomes(engine: Weak<Inner>, mut queue: Batches<QueuedOutcome, FamilyId>) {
    while let Some(batch) = queue.next().await {
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        let (queued, replies) = Request::split(batch);
        let outcomes: Vec<InvocationOutcome> = queued.into_iter().map(|one| one.item).collect();
        for (reply, finished) in replies.into_iter().zip(engine.actions().record_all(&outcomes).await) {
            let _ = reply.send(finished);
        }
    }
}

impl Actions {
    async fn create_all(&self, new: &[NewInvocation]) -> Vec<EngineResult<InvokeOutcome>> {
        match with_abort_retries(|| self.core.store.invoke(new)).await {
            Ok((outcomes, recorded)) => {
                recorded.into_iter().for_each(|recorded| self.core.announce(recorded));
                outcomes.into_iter().map(Ok).collect()
            }
            // The connection may have failed after COMMIT was sent.
            Err(StoreError::Unavailable { .. }) => self.resolve_commit_outcome(new).await,
            // Nothing was created: the process does not know the database any more.
            Err(StoreError::OtherEpoch { .. }) => new.iter().map(|_| Err(EngineError::CommitUnavailable)).collect(),
            Err(error) if new.len() == 1 => vec![Err(error.into())],
            // One at a time shows which request is at fault.
            Err(_) => {
                let mut outcomes = Vec::with_capacity(new.len());
                for one in new {
                    // Boxed because it calls itself, once: a batch of one does not get here.
                    outcomes.extend(Box::pin(self.create_all(std::slice::from_ref(one))).await);
                }
                outcomes
            }
        }
    }

    /// Finds out the outcome of a batch whose COMMIT got no answer.
    async fn resolve_commit_outcome(&self, new: &[NewInvocation]) -> Vec<EngineResult<InvokeOutcome>> {
        let until = Instant::now() + RESOLVE_TIMEOUT;
        loop {
            match self.core.store.find_invocations(new).await {
                Ok(made) => {
                    let outcome = |one: &NewInvocation| {
                        let row = made.iter().find(|row| row.invocation_id == one.id && row.scope == one.scope);
                        // The gateways find the dispatched ones by polling.
                        // A refused invocation has no row either: its repetition is refused again.
                        row.map(|row| InvokeOutcome::Created(row.status, None)).ok_or(EngineError::CommitUnavailable)
                    };
                    return new.iter().map(outcome).collect();
                }
                Err(error) if Instant::now() >= until => {
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
        match with_abort_retries(|| self.core.store.record_outcomes(outcomes, self.core.now())).await {
            Ok(mut done) => {
                self.announce_outcomes(&mut done);
                let OutcomeBatch { outcomes, .. } = done;
                for outcome in &outcomes {
                    if let OutcomeRecording::Recorded(row) = outcome {
                        self.dispatch_notes.invocations.remove(row.scope, row.invocation_id);
                    }
                }
                outcomes.into_iter().map(Ok).collect()
            }
            // Storage refuses this outcome: it must not be retried for ever.
            Err(error @ (StoreError::Refused { .. } | StoreError::Corrupt { .. })) if outcomes.len() == 1 => {
                tracing::error!(error = &error as &dyn std::error::Error, "storage refused an outcome");
                vec![Err(error.into())]
            }
            // During an outage each of them would fail alone as well, one timeout after the other.
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
