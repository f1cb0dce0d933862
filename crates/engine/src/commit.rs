//! The committer: group commit of sends.
//!
//! One transaction at a time per process. It takes whatever arrived while the previous commit was in
//! flight, with no timer, so a lone request commits at once and a busy engine commits large batches.
//! Callers hear after the commit; publishing follows.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use chrono::DateTime;
use relay_domain::{BatchId, GatewayId, snowflake};
use relay_store::{
    Store, StoreError,
    commit::{Batch, BatchError, BatchOutcome, NewSend, SendOutcome},
    events::Recorded,
};
use tokio::sync::{mpsc, oneshot};

use crate::{Engine, EngineError, Inner, publish::Committed, trace};

/// Deliveries per batch, about: a batch closes once it has reached this many.
const BATCH_DELIVERIES: usize = 512;
/// Requests per batch at most.
const BATCH_REQUESTS: usize = 512;
/// Requests that may wait. Beyond it callers are refused at once, with `Retry-After`.
const QUEUE: usize = 8192;
/// How often a batch that lost a lock race is tried again.
const ABORT_RETRIES: u32 = 5;
/// How long the verdict over an unknown COMMIT is sought. Then callers are left without a status:
/// clients re-post on a 5xx, and the message may be there.
const VERDICT_WAIT: Duration = Duration::from_secs(30);
const VERDICT_RETRY: Duration = Duration::from_millis(250);

/// One send, waiting for its commit.
pub(crate) struct Pending {
    pub(crate) send: NewSend,
    /// Recipients' names, as `send.recipients`.
    pub(crate) names: Vec<Arc<str>>,
    pub(crate) traceparent: Option<String>,
    pub(crate) reply: oneshot::Sender<Result<Reply, EngineError>>,
}

/// What the committer answers.
pub(crate) enum Reply {
    /// Committed, as this send.
    Committed {
        send: Box<NewSend>,
        /// Positions in `send.recipients` whose mailbox was full.
        full: Vec<usize>,
    },
    Replayed {
        response: serde_json::Value,
    },
    KeyReused,
    /// Resolve again: the facts have moved.
    Moved,
}

/// The way into the committer.
#[derive(Debug, Clone)]
pub(crate) struct CommitQueue {
    sender: mpsc::Sender<Pending>,
}

impl CommitQueue {
    pub(crate) fn new() -> (Self, mpsc::Receiver<Pending>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        (Self { sender }, receiver)
    }

    /// Queues a send; refuses at once when the queue is full.
    pub(crate) fn push(&self, pending: Pending) -> Result<(), EngineError> {
        self.sender.try_send(pending).map_err(|_| EngineError::Overloaded)
    }
}

/// Commits until all ways into the queue are gone.
pub(crate) async fn run(engine: std::sync::Weak<Inner>, mut queue: mpsc::Receiver<Pending>) {
    let mut held: Vec<Pending> = Vec::new();
    loop {
        let mut pending = std::mem::take(&mut held);
        if pending.is_empty() {
            match queue.recv().await {
                Some(first) => pending.push(first),
                None => return,
            }
        }
        let mut deliveries: usize = pending.iter().map(weight).sum();
        while deliveries < BATCH_DELIVERIES && pending.len() < BATCH_REQUESTS {
            let Ok(next) = queue.try_recv() else { break };
            deliveries += weight(&next);
            pending.push(next);
        }
        (pending, held) = fold_equal_keys(pending);
        let Some(inner) = engine.upgrade() else { return };
        commit(&Engine { inner }, pending).await;
    }
}

fn weight(pending: &Pending) -> usize {
    pending.send.recipients.len().max(1)
}

/// Of requests with one idempotency key, the first goes on; the others find its answer afterwards.
fn fold_equal_keys(pending: Vec<Pending>) -> (Vec<Pending>, Vec<Pending>) {
    let mut seen = HashSet::new();
    pending
        .into_iter()
        .partition(|p| p.send.key.as_ref().is_none_or(|key| seen.insert((p.send.scope, key.hash.clone()))))
}

async fn commit(engine: &Engine, mut pending: Vec<Pending>) {
    let spans = begin_commit(&mut pending);
    let batch = assemble(engine, &pending);
    metrics::histogram!(relay_domain::metric_names::COMMIT_BATCH_SIZE)
        .record(u32::try_from(pending.len()).unwrap_or(u32::MAX));
    let started = std::time::Instant::now();
    let outcome = submit(engine.store(), &batch).await;
    metrics::histogram!(relay_domain::metric_names::COMMIT_SECONDS).record(started.elapsed().as_secs_f64());
    drop(spans);
    match outcome {
        Ok(outcomes) => settle(engine, batch, pending, outcomes),
        Err(BatchError::Unknown(error)) => {
            tracing::warn!(error = &error as &dyn std::error::Error, batch.id = %batch.id, "the outcome of a commit is unknown");
            tokio::spawn(seek_verdict(engine.clone(), batch, pending));
        }
        // Something in it is not for Postgres: one at a time tells which.
        Err(BatchError::NotCommitted(StoreError::Refused { .. })) if pending.len() > 1 => {
            for one in pending {
                let batch = assemble(engine, std::slice::from_ref(&one));
                match submit(engine.store(), &batch).await {
                    Ok(outcomes) => settle(engine, batch, vec![one], outcomes),
                    Err(BatchError::NotCommitted(error)) => refuse(vec![one], error),
                    Err(BatchError::Unknown(_)) => {
                        tokio::spawn(seek_verdict(engine.clone(), batch, vec![one]));
                    }
                }
            }
        }
        Err(BatchError::NotCommitted(error)) => refuse(pending, error),
    }
}

/// A span for each traced request of a batch; what comes after the commit goes below it.
fn begin_commit(pending: &mut [Pending]) -> Vec<tracing::Span> {
    let requests = pending.len();
    let traced = pending.iter_mut().filter_map(|one| {
        let span = trace::below(one.traceparent.as_deref(), || tracing::info_span!("engine.commit", requests))?;
        one.traceparent = trace::of(&span);
        Some(span)
    });
    traced.collect()
}

/// Takes the ids: of the messages, in order, and of the batch.
fn assemble(engine: &Engine, pending: &[Pending]) -> Batch {
    let sends = pending
        .iter()
        .map(|p| {
            let mut send = p.send.clone();
            send.traceparent.clone_from(&p.traceparent);
            send.message.message_id = engine.next_id();
            send.message.created_at =
                DateTime::from_timestamp_millis(snowflake::made_at_ms(send.message.message_id)).unwrap_or_default();
            send
        })
        .collect();
    Batch {
        id: BatchId::new(engine.next_id()),
        gateway_id: engine.gateway_id().unwrap_or(GatewayId::new(0)),
        traceparent: pending.iter().find_map(|p| p.traceparent.clone()),
        sends,
    }
}

/// Submits a batch; one that lost against other transactions is tried again.
async fn submit(store: &Store, batch: &Batch) -> Result<BatchOutcome, BatchError> {
    let mut tries = 0;
    loop {
        match store.commit_batch(batch).await {
            Err(BatchError::NotCommitted(StoreError::Aborted { .. })) if tries < ABORT_RETRIES => {
                tries += 1;
                let pause = fastrand::u64(1..=10 << tries);
                tokio::time::sleep(Duration::from_millis(pause)).await;
            }
            done => return done,
        }
    }
}

/// Submits a batch whose COMMIT got no answer until Postgres tells whether it was committed.
async fn seek_verdict(engine: Engine, batch: Batch, pending: Vec<Pending>) {
    let until = tokio::time::Instant::now() + VERDICT_WAIT;
    while tokio::time::Instant::now() < until {
        tokio::time::sleep(VERDICT_RETRY).await;
        match submit(engine.store(), &batch).await {
            Ok(outcomes) => {
                settle(&engine, batch, pending, outcomes);
                return;
            }
            // Away, or lost a race: the verdict is still out.
            Err(BatchError::Unknown(_) | BatchError::NotCommitted(_)) => {}
        }
    }
    tracing::error!(batch.id = %batch.id, "no verdict over a commit: its callers get no status");
    for one in pending {
        let _ = one.reply.send(Err(EngineError::OutcomeUnknown));
    }
}

fn refuse(pending: Vec<Pending>, error: StoreError) {
    tracing::warn!(error = &error as &dyn std::error::Error, requests = pending.len(), "a batch was not committed");
    for one in pending {
        let _ = one.reply.send(Err(match error {
            StoreError::Unavailable { .. } => EngineError::CommitUnavailable,
            StoreError::OutcomeUnknown { .. } => EngineError::OutcomeUnknown,
            StoreError::Aborted { .. } => EngineError::Overloaded,
            StoreError::Refused { .. } => EngineError::CommitRefused,
        }));
    }
}

/// Answers the callers and hands what was committed to the publisher.
fn settle(engine: &Engine, batch: Batch, pending: Vec<Pending>, outcome: BatchOutcome) {
    let mut committed = Committed { batch: batch.id, sends: Vec::with_capacity(pending.len()) };
    for ((one, send), outcome) in pending.into_iter().zip(batch.sends).zip(outcome.sends) {
        let reply = match outcome {
            SendOutcome::Committed(rows) => {
                let full = rows.iter().enumerate().filter(|(_, row)| row.is_none()).map(|(i, _)| i).collect();
                metrics::counter!(relay_domain::metric_names::MESSAGES_ACCEPTED).increment(1);
                let written = u64::try_from(rows.iter().flatten().count()).unwrap_or(0);
                metrics::counter!(relay_domain::metric_names::DELIVERIES_WRITTEN).increment(written);
                committed.push(send.clone(), one.names, rows, one.traceparent);
                Reply::Committed { send: Box::new(send), full }
            }
            SendOutcome::Replayed { response } => Reply::Replayed { response },
            SendOutcome::KeyReused => Reply::KeyReused,
            SendOutcome::Moved => Reply::Moved,
        };
        // A caller that went away changes nothing: the message is there.
        let _ = one.reply.send(Ok(reply));
    }
    announce(engine, &committed, outcome.events);
    engine.hint_at_due(committed.places());
    if let Err(committed) = engine.inner.publisher.push(committed) {
        // The outbox relay will publish it; recipients need not wait for that.
        engine.hints().mailboxes_changed(committed.mailboxes());
    }
}

/// Tells those who watch; the messages are at hand.
fn announce(engine: &Engine, committed: &Committed, events: Vec<Recorded>) {
    for recorded in events {
        let messages = if recorded.watched { committed.messages(recorded.scope) } else { HashMap::new() };
        engine.announce_with(recorded, messages);
    }
}
