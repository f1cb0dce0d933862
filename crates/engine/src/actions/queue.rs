//! Group commit of invocations and of their outcomes: one transaction of each under way at a time, which takes
//! whatever has arrived meanwhile. Workspaces take turns, so that one with thousands waiting delays nobody's first; one
//! in which another process is placing comes back, so that nobody else waits for it, and after a second has a
//! transaction of its own that waits.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Weak,
    time::{Duration, Instant},
};

use relay_domain::{WorkspaceId, action::Status};
use relay_store::{
    StoreError, StoreResult,
    finish::{Finished, FinishedAll, Outcome},
    invoke::{Invoked, NewInvocation},
};
use tokio::sync::{mpsc, oneshot};

use crate::{Engine, EngineError, EngineResult, Inner};

/// Requests that may wait. Beyond it callers are refused at once, with `Retry-After`.
const QUEUE: usize = 8192;
/// Requests that one transaction takes.
const BATCH: usize = 256;
/// How long everything waits when all of it is of workspaces in which others are placing.
const BUSY_PAUSE: Duration = Duration::from_millis(5);
/// A workspace that was passed over for this long gets a batch of its own, which waits for its turn.
const PASSED_OVER: Duration = Duration::from_secs(1);
/// How often a batch that lost a lock race is tried again.
const ABORT_RETRIES: u32 = 5;
/// How long it is asked whether a batch was committed whose COMMIT nobody heard of. Then callers are left without a
/// status: clients send a request again after a 5xx.
const VERDICT_WAIT: Duration = Duration::from_secs(30);
const VERDICT_RETRY: Duration = Duration::from_millis(250);

type Waiting<T, A> = (T, oneshot::Sender<EngineResult<A>>);

/// The ways into the two queues.
#[derive(Debug)]
pub(crate) struct CallQueues {
    calls: mpsc::Sender<Waiting<NewInvocation, Invoked>>,
    outcomes: mpsc::Sender<Waiting<Outcome, Finished>>,
}

/// New invocations that wait for their transaction.
pub(crate) type Calls = mpsc::Receiver<Waiting<NewInvocation, Invoked>>;
/// Outcomes that wait for theirs.
pub(crate) type Outcomes = mpsc::Receiver<Waiting<Outcome, Finished>>;

impl CallQueues {
    pub(crate) fn new() -> (Self, Calls, Outcomes) {
        let (calls, new) = mpsc::channel(QUEUE);
        let (outcomes, ended) = mpsc::channel(QUEUE);
        (Self { calls, outcomes }, new, ended)
    }

    /// Makes an invocation.
    pub(super) async fn make(&self, new: NewInvocation) -> EngineResult<Invoked> {
        ask(&self.calls, new).await
    }

    /// Records an outcome.
    pub(super) async fn finish(&self, outcome: Outcome) -> EngineResult<Finished> {
        ask(&self.outcomes, outcome).await
    }
}

async fn ask<T, A>(queue: &mpsc::Sender<Waiting<T, A>>, item: T) -> EngineResult<A> {
    let (reply, answer) = oneshot::channel();
    queue.try_send((item, reply)).map_err(|_| EngineError::Overloaded)?;
    answer.await.unwrap_or(Err(EngineError::OutcomeUnknown))
}

/// What waits, in the order of arrival per workspace, workspaces in turns.
struct Turns<T> {
    workspaces: VecDeque<(WorkspaceId, VecDeque<T>)>,
    waiting: usize,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self { workspaces: VecDeque::new(), waiting: 0 }
    }
}

impl<T> Turns<T> {
    fn push(&mut self, workspace: WorkspaceId, item: T) {
        self.waiting += 1;
        match self.workspaces.iter_mut().find(|(known, _)| *known == workspace) {
            Some((_, items)) => items.push_back(item),
            None => self.workspaces.push_back((workspace, VecDeque::from([item]))),
        }
    }

    /// Has an item back that was taken, as its workspace's next.
    fn put_back(&mut self, workspace: WorkspaceId, item: T) {
        self.waiting += 1;
        match self.workspaces.iter_mut().find(|(known, _)| *known == workspace) {
            Some((_, items)) => items.push_front(item),
            None => self.workspaces.push_back((workspace, VecDeque::from([item]))),
        }
    }

    /// Up to `most`, one of each workspace after the other.
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

    /// Up to `most` of one workspace.
    fn take_of(&mut self, workspace: WorkspaceId, most: usize) -> Vec<T> {
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

/// The next batch; `None` when all ways into the queue are gone.
async fn next<T>(
    queue: &mut mpsc::Receiver<T>,
    turns: &mut Turns<T>,
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

/// Makes invocations until the engine is gone.
pub(crate) async fn run_calls(engine: Weak<Inner>, mut queue: Calls) {
    let mut turns = Turns::default();
    // Since when: workspaces with something waiting in which others were placing each time.
    let mut passed_over: BTreeMap<WorkspaceId, Instant> = BTreeMap::new();
    loop {
        let starved =
            passed_over.iter().find(|(_, since)| since.elapsed() > PASSED_OVER).map(|(workspace, _)| *workspace);
        let batch = match starved {
            Some(workspace) => {
                passed_over.remove(&workspace);
                turns.take_of(workspace, BATCH)
            }
            None => match next(&mut queue, &mut turns, |(new, _)| new.scope.workspace_id()).await {
                Some(batch) => batch,
                None => return,
            },
        };
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        let (new, replies): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
        let outcomes = engine.make_all(&new).await;
        let taken = new.len();
        let mut busy = Vec::new();
        for ((one, reply), outcome) in new.into_iter().zip(replies).zip(outcomes) {
            match &outcome {
                Ok(Invoked::Busy) => {
                    passed_over.entry(one.scope.workspace_id()).or_insert_with(Instant::now);
                    busy.push((one, reply));
                    continue;
                }
                Ok(Invoked::Made(_, Some(dispatch))) => engine.hint_dispatch(&one, dispatch),
                _ => {}
            }
            passed_over.remove(&one.scope.workspace_id());
            let _ = reply.send(outcome);
        }
        drop(engine);
        let none_was_made = busy.len() == taken;
        busy.into_iter().rev().for_each(|item| turns.put_back(item.0.scope.workspace_id(), item));
        if none_was_made {
            tokio::time::sleep(BUSY_PAUSE).await;
        }
    }
}

/// Records outcomes until the engine is gone.
pub(crate) async fn run_outcomes(engine: Weak<Inner>, mut queue: Outcomes) {
    let mut turns = Turns::default();
    while let Some(batch) = next(&mut queue, &mut turns, |(outcome, _)| outcome.scope.workspace_id()).await {
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        let (outcomes, replies): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
        for (reply, finished) in replies.into_iter().zip(engine.finish_all(&outcomes).await) {
            let _ = reply.send(finished);
        }
    }
}

impl Engine {
    async fn make_all(&self, new: &[NewInvocation]) -> Vec<EngineResult<Invoked>> {
        match patiently(|| self.store().invoke(new)).await {
            Ok((outcomes, recorded)) => {
                recorded.into_iter().for_each(|recorded| self.announce(recorded));
                outcomes.into_iter().map(Ok).collect()
            }
            Err(StoreError::Unavailable { .. }) => self.verdict(new).await,
            Err(error) if new.len() == 1 => vec![Err(error.into())],
            // Whose fault it is shows when each is alone.
            Err(_) => {
                let mut outcomes = Vec::with_capacity(new.len());
                for one in new {
                    outcomes.extend(Box::pin(self.make_all(std::slice::from_ref(one))).await);
                }
                outcomes
            }
        }
    }

    /// What became of a batch whose COMMIT nobody heard of.
    async fn verdict(&self, new: &[NewInvocation]) -> Vec<EngineResult<Invoked>> {
        let until = tokio::time::Instant::now() + VERDICT_WAIT;
        loop {
            match self.store().invocations_made(new).await {
                Ok(made) => {
                    let outcome = |one: &NewInvocation| {
                        let row = made.iter().find(|row| row.invocation_id == one.id && row.scope == one.scope);
                        // Where it goes, the gateways find out by themselves.
                        row.map(|row| Invoked::Made(Status::parse(&row.status).unwrap_or(Status::Pending), None))
                            .ok_or(EngineError::CommitUnavailable)
                    };
                    return new.iter().map(outcome).collect();
                }
                Err(error) if tokio::time::Instant::now() >= until => {
                    tracing::error!(error = &error as &dyn std::error::Error, "invocations without a verdict");
                    return new.iter().map(|_| Err(EngineError::OutcomeUnknown)).collect();
                }
                Err(_) => tokio::time::sleep(VERDICT_RETRY).await,
            }
        }
    }

    /// Outcomes are recorded once however often they are submitted, so that a lost COMMIT needs no verdict.
    async fn finish_all(&self, outcomes: &[Outcome]) -> Vec<EngineResult<Finished>> {
        match patiently(|| self.store().finish(outcomes, self.now())).await {
            Ok(mut done) => {
                self.tell_outcomes(&mut done);
                let FinishedAll { outcomes, .. } = done;
                outcomes.into_iter().map(Ok).collect()
            }
            // Storage does not take this one: whoever tries again must not do so for ever.
            Err(error @ StoreError::Refused { .. }) if outcomes.len() == 1 => {
                tracing::error!(error = &error as &dyn std::error::Error, "an outcome was not recorded");
                vec![Err(error.into())]
            }
            Err(error) if outcomes.len() == 1 || error.is_unavailable() => {
                tracing::warn!(error = &error as &dyn std::error::Error, "outcomes were not recorded");
                outcomes.iter().map(|_| Err(EngineError::CommitUnavailable)).collect()
            }
            Err(_) => {
                let mut finished = Vec::with_capacity(outcomes.len());
                for one in outcomes {
                    finished.extend(Box::pin(self.finish_all(std::slice::from_ref(one))).await);
                }
                finished
            }
        }
    }
}

/// Tries again what lost against other transactions.
async fn patiently<T, F: Future<Output = StoreResult<T>>>(work: impl Fn() -> F) -> StoreResult<T> {
    let mut tries = 0;
    loop {
        match work().await {
            Err(StoreError::Aborted { .. }) if tries < ABORT_RETRIES => tries += 1,
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_waits_for_the_first_time_is_among_the_next() {
        let mut turns = Turns::default();
        (0..10_000).for_each(|n| turns.push(WorkspaceId::new(1), (1, n)));
        assert_eq!(turns.take(3), [(1, 0), (1, 1), (1, 2)]);
        turns.push(WorkspaceId::new(2), (2, 0));
        assert_eq!(turns.take(4), [(1, 3), (2, 0), (1, 4), (1, 5)]);
        assert_eq!((turns.waiting, turns.take(10_000).len(), turns.waiting), (9_994, 9_994, 0));
    }

    #[test]
    fn what_comes_back_is_its_workspaces_next_in_the_same_order() {
        let mut turns = Turns::default();
        (0..4).for_each(|n| turns.push(WorkspaceId::new(1), (1, n)));
        turns.push(WorkspaceId::new(2), (2, 0));
        assert_eq!(turns.take(3), [(1, 0), (2, 0), (1, 1)]);
        [(1, 1), (2, 0), (1, 0)].into_iter().for_each(|item| turns.put_back(WorkspaceId::new(item.0), item));
        assert_eq!(turns.take(3), [(1, 0), (2, 0), (1, 1)]);
        assert_eq!((turns.take(9), turns.waiting), (vec![(1, 2), (1, 3)], 0));
    }

    #[test]
    fn one_workspace_can_be_served_alone() {
        let mut turns = Turns::default();
        (0..3).for_each(|n| turns.push(WorkspaceId::new(1), (1, n)));
        turns.push(WorkspaceId::new(2), (2, 0));
        assert_eq!(turns.take_of(WorkspaceId::new(1), 2), [(1, 0), (1, 1)]);
        assert_eq!(turns.take_of(WorkspaceId::new(1), 2), [(1, 2)]);
        assert_eq!((turns.take_of(WorkspaceId::new(1), 2).len(), turns.waiting), (0, 1));
        assert_eq!(turns.take(9), [(2, 0)]);
    }
}
