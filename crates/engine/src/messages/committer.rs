//! Group commit of sends.
//!
//! One transaction at a time per process. It takes the requests that arrived during the previous commit, without a
//! timer, so that a lone request commits at once and a busy engine commits large batches. Callers get their reply after
//! the commit; publishing follows.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use chrono::DateTime;
use relay_domain::{BatchId, GatewayId, MessageId, snowflake};
use relay_store::{
    Store, StoreError,
    events::RecordedEvents,
    messages::commit::{Batch, BatchError, BatchOutcome, NewSend, SendOutcome},
};
use relay_tasks::spawn_isolated;
use tokio::sync::{mpsc, oneshot};

use crate::{Engine, EngineError, Inner, error::Fault, events::Announcement, messages::publisher::Committed};

/// Target size: a batch closes once it has reached this many deliveries.
const MAX_BATCH_DELIVERIES: usize = 512;
const MAX_BATCH_REQUESTS: usize = 512;
/// Bound of the queue. Beyond it callers are refused at once, with `Retry-After`.
pub(crate) const QUEUE: usize = 8192;
/// Retries of a batch that lost a lock race.
const ABORT_RETRIES: u32 = 5;
/// Time to find out the outcome of an unknown COMMIT. Then callers get no status: clients post again on a 5xx, and the
/// message may exist.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(30);
const RESOLVE_RETRY: Duration = Duration::from_millis(250);

/// Send that waits for its commit.
pub(crate) struct PendingSend {
    pub(crate) send: NewSend,
    /// Names of `send.recipients`, in their order.
    pub(crate) names: Vec<Arc<str>>,
    pub(crate) traceparent: Option<String>,
    pub(crate) reply: oneshot::Sender<Result<CommitReply, EngineError>>,
}

pub(crate) enum CommitReply {
    /// Committed as this send.
    Committed {
        send: Box<NewSend>,
        /// Indexes into `send.recipients` of full mailboxes.
        full: Vec<usize>,
    },
    Replayed {
        response: serde_json::Value,
    },
    KeyReused,
    /// The audience or the sender has changed: resolve again.
    Stale,
}

/// Commits batches until all senders are dropped.
pub(crate) async fn run(engine: std::sync::Weak<Inner>, mut queue: mpsc::Receiver<PendingSend>) {
    let mut deferred: Vec<PendingSend> = Vec::new();
    loop {
        let mut pending = std::mem::take(&mut deferred);
        if pending.is_empty() {
            match queue.recv().await {
                Some(first) => pending.push(first),
                None => return,
            }
        }
        let mut deliveries: usize = pending.iter().map(delivery_count).sum();
        while deliveries < MAX_BATCH_DELIVERIES && pending.len() < MAX_BATCH_REQUESTS {
            let Ok(next) = queue.try_recv() else { break };
            deliveries += delivery_count(&next);
            pending.push(next);
        }
        // One statement inserts all keys, and it cannot insert the same key twice.
        (pending, deferred) = defer_equal_keys(pending);
        let Some(inner) = engine.upgrade() else { return };
        commit_sends(&Engine { inner }, pending).await;
    }
}

fn delivery_count(pending: &PendingSend) -> usize {
    pending.send.recipients.len().max(1)
}

/// Splits off requests whose idempotency key occurs earlier in the batch; they find the first one's response in the
/// next batch.
fn defer_equal_keys(pending: Vec<PendingSend>) -> (Vec<PendingSend>, Vec<PendingSend>) {
    let mut seen = HashSet::new();
    pending
        .into_iter()
        .partition(|p| p.send.key.as_ref().is_none_or(|key| seen.insert((p.send.scope, key.hash.clone()))))
}

async fn commit_sends(engine: &Engine, mut pending: Vec<PendingSend>) {
    let spans = start_commit_spans(&mut pending);
    let batch = build_batch(engine, &pending);
    metrics::histogram!(relay_domain::metric_names::COMMIT_BATCH_SIZE)
        .record(u32::try_from(pending.len()).unwrap_or(u32::MAX));
    let started = tokio::time::Instant::now();
    let outcome = submit_batch(engine.store(), &batch).await;
    metrics::histogram!(relay_domain::metric_names::COMMIT_SECONDS).record(started.elapsed().as_secs_f64());
    drop(spans);
    match outcome {
        Ok(outcomes) => finish_batch(engine, batch, pending, outcomes),
        Err(BatchError::Unknown(error)) => {
            tracing::warn!(error = &error as &dyn std::error::Error, batch.id = %batch.id, "commit outcome unknown, submitting the batch again");
            // Apart from the loop, which must go on committing when Postgres is back.
            spawn_isolated("commit", resolve_commit_outcome(engine.clone(), batch, pending));
        }
        // Storage refuses at least one of them: one at a time shows which.
        Err(BatchError::NotCommitted(StoreError::Refused { .. })) if pending.len() > 1 => {
            for one in pending {
                let batch = build_batch(engine, std::slice::from_ref(&one));
                match submit_batch(engine.store(), &batch).await {
                    Ok(outcomes) => finish_batch(engine, batch, vec![one], outcomes),
                    Err(BatchError::NotCommitted(error)) => refuse_sends(vec![one], error),
                    Err(BatchError::Unknown(_)) => {
                        spawn_isolated("commit", resolve_commit_outcome(engine.clone(), batch, vec![one]));
                    }
                }
            }
        }
        Err(BatchError::NotCommitted(error)) => refuse_sends(pending, error),
    }
}

/// Starts a span for each traced request of a batch; later steps become its children.
fn start_commit_spans(pending: &mut [PendingSend]) -> Vec<tracing::Span> {
    let requests = pending.len();
    let traced = pending.iter_mut().filter_map(|one| {
        let span =
            relay_trace::child_span(one.traceparent.as_deref(), || tracing::info_span!("engine.commit", requests))?;
        one.traceparent = relay_trace::traceparent_of(&span);
        Some(span)
    });
    traced.collect()
}

/// Builds the batch: assigns ids to the messages, in order, and to the batch.
fn build_batch(engine: &Engine, pending: &[PendingSend]) -> Batch {
    let sends = pending
        .iter()
        .map(|p| {
            let mut send = p.send.clone();
            send.traceparent.clone_from(&p.traceparent);
            let id = engine.next_id();
            send.message.id = MessageId::new(id);
            // Every id lies within the range of dates.
            send.message.created_at = DateTime::from_timestamp_millis(snowflake::created_at_ms(id)).unwrap_or_default();
            send
        })
        .collect();
    Batch {
        id: BatchId::new(engine.next_id()),
        // Only gateways have an id. A batch of another process has no lease behind it, so that the outbox relay may
        // publish it at once.
        gateway_id: engine.core().gateway_id().unwrap_or(GatewayId::new(0)),
        traceparent: pending.iter().find_map(|p| p.traceparent.clone()),
        sends,
    }
}

/// Submits a batch; retries one that lost against other transactions.
async fn submit_batch(store: &Store, batch: &Batch) -> Result<BatchOutcome, BatchError> {
    let mut retries = 0;
    loop {
        match store.commit_batch(batch).await {
            Err(BatchError::NotCommitted(StoreError::Aborted { .. })) if retries < ABORT_RETRIES => {
                retries += 1;
                // Random, so that two processes that lost against each other do not meet again.
                let pause = fastrand::u64(1..=10 << retries);
                tokio::time::sleep(Duration::from_millis(pause)).await;
            }
            done => return done,
        }
    }
}

/// Submits a batch with an unknown commit outcome again, until Postgres tells whether it was committed. The batch id
/// makes this idempotent.
async fn resolve_commit_outcome(engine: Engine, batch: Batch, pending: Vec<PendingSend>) {
    let until = tokio::time::Instant::now() + RESOLVE_TIMEOUT;
    while tokio::time::Instant::now() < until {
        tokio::time::sleep(RESOLVE_RETRY).await;
        match submit_batch(engine.store(), &batch).await {
            Ok(outcomes) => {
                finish_batch(&engine, batch, pending, outcomes);
                return;
            }
            // Unavailable, or lost a race: the outcome is still unknown.
            Err(BatchError::Unknown(_) | BatchError::NotCommitted(_)) => {}
        }
    }
    tracing::error!(batch.id = %batch.id, "commit outcome still unknown, callers get no status");
    for one in pending {
        let _ = one.reply.send(Err(EngineError::OutcomeUnknown));
    }
}

fn refuse_sends(pending: Vec<PendingSend>, error: StoreError) {
    tracing::warn!(error = &error as &dyn std::error::Error, requests = pending.len(), "batch not committed");
    for one in pending {
        let _ = one.reply.send(Err(match error {
            StoreError::Unavailable { .. } => EngineError::CommitUnavailable,
            StoreError::OutcomeUnknown { .. } => EngineError::OutcomeUnknown,
            StoreError::Aborted { .. } => EngineError::Overloaded,
            StoreError::Refused { .. } | StoreError::Corrupt { .. } => EngineError::Internal(Fault::CommitRefused),
        }));
    }
}

/// Replies to the callers and passes the committed sends to the publisher.
fn finish_batch(engine: &Engine, batch: Batch, pending: Vec<PendingSend>, outcome: BatchOutcome) {
    let mut committed = Committed { batch: batch.id, sends: Vec::with_capacity(pending.len()) };
    for ((one, send), outcome) in pending.into_iter().zip(batch.sends).zip(outcome.sends) {
        let reply = match outcome {
            SendOutcome::Committed(rows) => {
                let full = rows.iter().enumerate().filter(|(_, row)| row.is_none()).map(|(i, _)| i).collect();
                metrics::counter!(relay_domain::metric_names::MESSAGES_ACCEPTED).increment(1);
                let written = u64::try_from(rows.iter().flatten().count()).unwrap_or(0);
                metrics::counter!(relay_domain::metric_names::DELIVERIES_WRITTEN).increment(written);
                committed.push(send.clone(), one.names, rows, one.traceparent);
                CommitReply::Committed { send: Box::new(send), full }
            }
            SendOutcome::Replayed { response } => CommitReply::Replayed { response },
            SendOutcome::KeyReused => CommitReply::KeyReused,
            SendOutcome::Stale => CommitReply::Stale,
        };
        // A dropped receiver changes nothing: the message is committed.
        let _ = one.reply.send(Ok(reply));
    }
    // After the replies: callers wait for the commit only.
    announce(engine, &committed, outcome.events);
    engine.node_kinds().hint_due_deliveries(committed.locations());
    if let Err(committed) = engine.inner.publisher.push(committed) {
        // The outbox relay will publish it; recipients need not wait for that.
        engine.hints().mailboxes_changed(committed.mailboxes());
    }
}

/// Announces the events with their messages, which are in memory.
fn announce(engine: &Engine, committed: &Committed, events: Vec<RecordedEvents>) {
    for recorded in events {
        let messages = if recorded.watched { committed.messages(recorded.scope) } else { HashMap::new() };
        engine.core().announce(Announcement::with_messages(recorded, messages));
    }
}

#[cfg(test)]
mod tests {
    use relay_store::IdempotencyKey;

    use super::*;
    use crate::messages::fixture::{message, send};

    fn pending(id: i64, key: Option<u8>) -> PendingSend {
        let key = key.map(|byte| IdempotencyKey { hash: [byte; 32], fingerprint: [0; 32] });
        let send = NewSend { key, ..send(message(id, "text"), &[]) };
        PendingSend { send, names: Vec::new(), traceparent: None, reply: oneshot::channel().0 }
    }

    #[test]
    fn a_batch_has_each_key_once_and_the_others_wait_in_order() {
        let all = vec![
            pending(1, Some(1)),
            pending(2, None),
            pending(3, Some(1)),
            pending(4, None),
            pending(5, Some(2)),
            pending(6, Some(1)),
        ];
        let (now, later) = defer_equal_keys(all);
        let ids = |sends: &[PendingSend]| sends.iter().map(|one| one.send.message.id.get()).collect::<Vec<_>>();
        assert_eq!((ids(&now), ids(&later)), (vec![1, 2, 4, 5], vec![3, 6]));
        let (now, later) = defer_equal_keys(later);
        assert_eq!((ids(&now), ids(&later)), (vec![3], vec![6]));
    }

    #[test]
    fn a_send_without_recipients_counts_too() {
        assert_eq!(delivery_count(&pending(1, None)), 1);
        let three = PendingSend { send: send(message(1, "text"), &[2, 3, 4]), ..pending(1, None) };
        assert_eq!(delivery_count(&three), 3);
    }
}
