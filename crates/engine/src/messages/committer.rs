//! Group commit of sends.
//!
//! A transaction takes the requests that arrived during the previous one, so that a lone request commits at once and a
//! busy engine commits large batches. A busy lane also waits a moment for further requests ([`LINGER`]). Families of
//! workspaces take turns by the number of recipients. Callers get their reply after the commit; publishing follows.
//!
//! A process has two such lanes, each with one transaction at a time: requests with many recipients have one of their
//! own, since their deliveries take a second and requests of other workspaces must not wait for them. Those of the
//! largest are written in chunks ([`fanouts`](super::fanouts)) before the lane goes on.
//!
//! The requests of a [`Sequence`] are committed in their order. After one that was not committed for a reason that may
//! pass, the later ones are answered [`CommitReply::Preceded`], and their caller submits all of them again.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use chrono::DateTime;
use relay_domain::{
    BatchId, GatewayId, MessageId, WorkspaceId, messages::Message, metric_names, snowflake,
    workspaces::family::FamilyId,
};
use relay_store::{
    Store, StoreError,
    events::RecordedEvents,
    messages::batch::{Batch, BatchError, BatchOutcome, CommitPath, NewSend, SendOutcome},
};
use relay_tasks::{
    batches::{BatchSender, Batches, Linger, QueueConfig, QueueFull, queue},
    spawn_isolated,
};
use tokio::{sync::oneshot, time::Instant};

use crate::{
    Engine, EngineError, Inner,
    error::Fault,
    events::announcement::Announcement,
    messages::{fanouts::OpenedFanout, publisher::CommittedBatch},
};

/// Recipients of a batch: it is complete once it has that many.
const BATCH_RECIPIENTS: u64 = 512;
const BATCH_REQUESTS: usize = 512;
/// Bytes of messages in one transaction: nine of the largest.
const BATCH_BYTES: usize = 8 * 1024 * 1024;
/// A transaction costs as much as 20 sends of one recipient, so a busy lane waits for more of them. 8 ms gain no more
/// than 4 (loadtest/RESULTS.md).
const LINGER: Linger = Linger { after_items: 16, time: Duration::from_millis(4) };
/// Bound of each lane's queue. Beyond it callers are refused at once, with `Retry-After`.
const QUEUE: usize = 8192;
/// Bytes of messages that wait in a lane at most.
const QUEUE_BYTES: u32 = 64 * 1024 * 1024;
/// A family holds at most a quarter of a queue, so that one that floods it leaves room for the others.
const KEY_SHARE: u32 = 4;
/// Retries of a batch that lost a lock race.
const ABORT_RETRIES: u32 = 5;
/// Time to find out the outcome of an unknown COMMIT. Then callers get no status: clients post again on a 5xx, and the
/// message may exist.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(30);
const RESOLVE_RETRY: Duration = Duration::from_millis(250);

/// Send that waits for its commit.
pub(crate) struct PendingSend {
    pub(crate) send: NewSend,
    /// Family whose turn and share it takes.
    pub(crate) family: FamilyId,
    /// Names of `send.recipients`, in their order.
    pub(crate) names: Vec<Arc<str>>,
    pub(crate) traceparent: Option<String>,
    pub(crate) reply: oneshot::Sender<Result<CommitReply, EngineError>>,
    /// Requests that are committed in their order.
    pub(crate) sequence: Option<Arc<Sequence>>,
}

/// Requests of one caller in one lane that keep their order.
#[derive(Debug, Default)]
pub(crate) struct Sequence {
    /// A request has to be submitted again, or its outcome is not known yet. No later one may be committed.
    is_broken: AtomicBool,
}

impl PendingSend {
    fn break_sequence(&self) {
        if let Some(sequence) = &self.sequence {
            sequence.is_broken.store(true, Ordering::Relaxed);
        }
    }

    fn follows_a_break(&self) -> bool {
        self.sequence.as_ref().is_some_and(|sequence| sequence.is_broken.load(Ordering::Relaxed))
    }
}

/// Batches of one lane.
pub(crate) type CommitLane = Batches<PendingSend, FamilyId>;

/// Reply of the committer.
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
    /// Another request of the same batch had its key and was committed as this message.
    Repeated {
        message: Box<Message>,
    },
    KeyReused,
    /// The audience or the sender has changed: resolve again.
    Stale,
    /// An earlier request of the same sequence was not committed: submit this one again behind it.
    Preceded,
    /// An earlier fan-out of the author is open: wait for it.
    SenderBusy,
}

/// Sending ends of the two lanes.
pub(crate) struct CommitQueue {
    usual: BatchSender<PendingSend, FamilyId>,
    wide: BatchSender<PendingSend, FamilyId>,
}

impl CommitQueue {
    /// Creates the lanes: the usual one, and the one of requests that fill a batch alone.
    pub(crate) fn new() -> (Self, [CommitLane; 2]) {
        let (usual, usual_lane) = queue(lane("sends"));
        let (wide, wide_lane) = queue(lane("wide_sends"));
        (Self { usual, wide }, [usual_lane, wide_lane])
    }

    /// Queues a send; fails at once when the queue is full, or the family has its share of it.
    pub(crate) fn push(&self, pending: PendingSend) -> Result<(), EngineError> {
        let lane = if is_wide(&pending.send) { &self.wide } else { &self.usual };
        lane.try_send(pending).map_err(|QueueFull| EngineError::Overloaded)
    }
}

fn lane(name: &'static str) -> QueueConfig<PendingSend, FamilyId> {
    QueueConfig {
        name,
        max_items: QUEUE,
        key_share: KEY_SHARE,
        max_bytes: QUEUE_BYTES,
        batch_items: BATCH_REQUESTS,
        batch_bytes: BATCH_BYTES,
        batch_weight: BATCH_RECIPIENTS,
        interval: Duration::ZERO,
        linger: LINGER,
        key: |pending| pending.family,
        bytes: |pending| pending.send.message.held_bytes(),
        weight: recipient_count,
    }
}

/// Returns whether a send takes the lane of requests that fill a batch alone.
pub(crate) fn is_wide(send: &NewSend) -> bool {
    send.recipients.len() as u64 >= BATCH_RECIPIENTS
}

fn recipient_count(pending: &PendingSend) -> u64 {
    // A message that reaches no agent is written all the same.
    pending.send.recipients.len().max(1) as u64
}

/// Commits the batches of a lane until all senders are dropped.
pub(crate) async fn run(engine: Weak<Inner>, mut lane: CommitLane) {
    while let Some(pending) = lane.next().await {
        let Some(inner) = engine.upgrade() else { return };
        // Judged here and not when a request is queued: its sequence may have been broken since.
        let pending = fold_equal_keys(refuse_after_break(pending));
        if !pending.is_empty() {
            commit_sends(&Engine { inner }, pending).await;
        }
    }
}

/// Returns the requests that may be committed; replies to those that follow one of their sequence that was not.
fn refuse_after_break(pending: Vec<PendingSend>) -> Vec<PendingSend> {
    let (refused, kept): (Vec<_>, Vec<_>) = pending.into_iter().partition(PendingSend::follows_a_break);
    for one in refused {
        let _ = one.reply.send(Ok(CommitReply::Preceded));
    }
    kept
}

/// Request of a batch, and later ones with its idempotency key. One statement inserts all keys and cannot insert a key
/// twice, and the outcome of the first request is that of the others.
struct FoldedSend {
    first: PendingSend,
    repeats: Vec<PendingSend>,
}

impl FoldedSend {
    fn into_requests(self) -> impl Iterator<Item = PendingSend> {
        std::iter::once(self.first).chain(self.repeats)
    }
}

fn fold_equal_keys(pending: Vec<PendingSend>) -> Vec<FoldedSend> {
    let mut folded: Vec<FoldedSend> = Vec::with_capacity(pending.len());
    let mut by_key = HashMap::new();
    for one in pending {
        // A key that is new here gets the index of the entry that is about to be added.
        let key = one.send.key.as_ref().map(|key| (one.send.scope, key.hash));
        match key.map(|key| *by_key.entry(key).or_insert(folded.len())) {
            Some(index) if index < folded.len() => folded[index].repeats.push(one),
            _ => folded.push(FoldedSend { first: one, repeats: Vec::new() }),
        }
    }
    folded
}

/// Splits a batch by workspace.
fn split_by_workspace(pending: Vec<FoldedSend>) -> impl Iterator<Item = Vec<FoldedSend>> {
    let mut split: BTreeMap<WorkspaceId, Vec<FoldedSend>> = BTreeMap::new();
    for one in pending {
        split.entry(one.first.send.scope.workspace_id()).or_default().push(one);
    }
    split.into_values()
}

async fn commit_sends(engine: &Engine, mut pending: Vec<FoldedSend>) {
    let spans = start_commit_spans(&mut pending);
    let batch = build_batch(engine, &pending);
    metrics::histogram!(metric_names::COMMIT_BATCH_SIZE).record(u32::try_from(pending.len()).unwrap_or(u32::MAX));
    let started = Instant::now();
    let outcome = engine.store().commit_batch(&batch).await;
    metrics::histogram!(metric_names::COMMIT_SECONDS).record(started.elapsed().as_secs_f64());
    // They measure the commit, not the replies and the fan-outs after it.
    drop(spans);
    match outcome {
        // Storage refuses at least one of them: one at a time shows which.
        Err(BatchError::NotCommitted(StoreError::Refused { .. })) if pending.len() > 1 => {
            for one in pending {
                // The commit before may have broken the sequence of this one.
                let kept = fold_equal_keys(refuse_after_break(one.into_requests().collect()));
                if !kept.is_empty() {
                    commit_again(engine, kept).await;
                }
            }
        }
        // One workspace waits for a lock. The others go on without it, and the lane without any of them.
        Err(BatchError::NotCommitted(StoreError::Aborted { .. })) => {
            // Before the lane goes on, which would commit later requests of the same sequences first.
            break_sequences(&pending);
            for of_workspace in split_by_workspace(pending) {
                let engine = engine.clone();
                spawn_isolated("commit", async move { commit_again(&engine, of_workspace).await });
            }
        }
        outcome => finish_outcome(engine, batch, pending, outcome).await,
    }
}

/// Commits a part of a batch that was not committed, with retries of its own.
async fn commit_again(engine: &Engine, pending: Vec<FoldedSend>) {
    let batch = build_batch(engine, &pending);
    let outcome = submit_batch(engine.store(), &batch).await;
    finish_outcome(engine, batch, pending, outcome).await;
}

/// Replies to the callers. Ends after the last chunk of the fan-outs among them.
async fn finish_outcome(
    engine: &Engine,
    batch: Batch,
    pending: Vec<FoldedSend>,
    outcome: Result<BatchOutcome, BatchError>,
) {
    match outcome {
        Ok(outcomes) => write_fanouts(engine, finish_batch(engine, batch, pending, outcomes)).await,
        Err(BatchError::Unknown(error)) => {
            tracing::warn!(error = &error as &dyn std::error::Error, batch.id = %batch.id, "commit outcome unknown, submitting the batch again");
            break_sequences(&pending);
            // Apart from the lane, which must go on committing when Postgres is back.
            spawn_isolated("commit", resolve_commit_outcome(engine.clone(), batch, pending));
        }
        Err(BatchError::NotCommitted(error)) => refuse_sends(pending, &error),
    }
}

/// Keeps later requests of the same sequences from being committed before these.
fn break_sequences(pending: &[FoldedSend]) {
    for one in pending {
        one.first.break_sequence();
        one.repeats.iter().for_each(PendingSend::break_sequence);
    }
}

/// Starts a span for each traced request of a batch; later steps become its children.
fn start_commit_spans(pending: &mut [FoldedSend]) -> Vec<tracing::Span> {
    let requests = pending.len();
    let traced = pending.iter_mut().filter_map(|folded| {
        let one = &mut folded.first;
        let span =
            relay_trace::child_span(one.traceparent.as_deref(), || tracing::info_span!("engine.commit", requests))?;
        one.traceparent = relay_trace::traceparent_of(&span);
        Some(span)
    });
    traced.collect()
}

/// Builds the batch: assigns ids to the messages, in order, and to the batch.
fn build_batch(engine: &Engine, pending: &[FoldedSend]) -> Batch {
    // Before the ids.
    let epoch = engine.store().known_epoch();
    let sends = pending
        .iter()
        .map(|FoldedSend { first, .. }| {
            // Cloned: a batch that loses a race is built again from the requests, with new ids.
            let mut send = first.send.clone();
            send.traceparent.clone_from(&first.traceparent);
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
        epoch,
        traceparent: pending.iter().find_map(|folded| folded.first.traceparent.clone()),
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
async fn resolve_commit_outcome(engine: Engine, batch: Batch, pending: Vec<FoldedSend>) {
    let until = Instant::now() + RESOLVE_TIMEOUT;
    while Instant::now() < until {
        tokio::time::sleep(RESOLVE_RETRY).await;
        match submit_batch(engine.store(), &batch).await {
            Ok(outcomes) => {
                return write_fanouts(&engine, finish_batch(&engine, batch, pending, outcomes)).await;
            }
            // Unavailable, or lost a race: the outcome is still unknown.
            Err(BatchError::Unknown(_) | BatchError::NotCommitted(_)) => {}
        }
    }
    tracing::error!(batch.id = %batch.id, "commit outcome still unknown, callers get no status");
    for one in pending.into_iter().flat_map(FoldedSend::into_requests) {
        let _ = one.reply.send(Err(EngineError::OutcomeUnknown));
    }
}

fn refuse_sends(pending: Vec<FoldedSend>, error: &StoreError) {
    tracing::warn!(error = error as &dyn std::error::Error, requests = pending.len(), "batch not committed");
    for one in pending.into_iter().flat_map(FoldedSend::into_requests) {
        let _ = one.reply.send(Err(match error {
            StoreError::Unavailable { .. } | StoreError::OtherEpoch { .. } => EngineError::CommitUnavailable,
            StoreError::OutcomeUnknown { .. } => EngineError::OutcomeUnknown,
            StoreError::Aborted { .. } => EngineError::Overloaded,
            StoreError::Refused { .. } | StoreError::Corrupt { .. } => EngineError::Internal(Fault::CommitRefused),
        }));
    }
}

async fn write_fanouts(engine: &Engine, opened: Vec<OpenedFanout>) {
    for fanout in opened {
        fanout.write_chunks(engine).await;
    }
}

/// Replies to the callers and passes the committed sends to the publisher. Returns the fan-outs, whose deliveries are
/// to be written, and whose callers wait for that.
fn finish_batch(engine: &Engine, batch: Batch, pending: Vec<FoldedSend>, outcome: BatchOutcome) -> Vec<OpenedFanout> {
    if outcome.path == CommitPath::InSteps {
        metrics::counter!(metric_names::COMMITS_IN_STEPS).increment(1);
    }
    let mut committed =
        CommittedBatch { batch: batch.id, epoch: batch.epoch, sends: Vec::with_capacity(pending.len()), _ended: None };
    let mut opened = Vec::new();
    for ((folded, send), outcome) in pending.into_iter().zip(batch.sends).zip(outcome.sends) {
        if matches!(outcome, SendOutcome::Stale | SendOutcome::Preceded | SendOutcome::SenderBusy) {
            break_sequences(std::slice::from_ref(&folded));
        }
        let FoldedSend { first, repeats } = folded;
        reply_to_repeats(repeats, &send, &outcome);
        let reply = match outcome {
            SendOutcome::Committed(rows) => {
                let full = rows.iter().enumerate().filter(|(_, row)| row.is_none()).map(|(i, _)| i).collect();
                metrics::counter!(metric_names::MESSAGES_ACCEPTED).increment(1);
                let written = u64::try_from(rows.iter().flatten().count()).unwrap_or(0);
                metrics::counter!(metric_names::DELIVERIES_WRITTEN).increment(written);
                committed.push(send.clone(), first.names, rows, first.traceparent);
                CommitReply::Committed { send: Box::new(send), full }
            }
            SendOutcome::FanoutOpened { full } => {
                metrics::counter!(metric_names::MESSAGES_ACCEPTED).increment(1);
                // For the announcement; the batch itself has no deliveries of it.
                committed.push(send.clone(), Vec::new(), Vec::new(), first.traceparent.clone());
                let reply = CommitReply::Committed { send: Box::new(send.clone()), full };
                let answer = move || drop(first.reply.send(Ok(reply)));
                opened.push(OpenedFanout::new(send, first.names, first.traceparent, answer));
                continue;
            }
            SendOutcome::Replayed { response } => CommitReply::Replayed { response },
            SendOutcome::KeyReused => CommitReply::KeyReused,
            SendOutcome::Stale => CommitReply::Stale,
            SendOutcome::Preceded => CommitReply::Preceded,
            SendOutcome::SenderBusy => CommitReply::SenderBusy,
        };
        // A dropped receiver changes nothing: the message is committed.
        let _ = first.reply.send(Ok(reply));
    }
    // After the replies: callers wait for the commit only.
    announce(engine, &committed, outcome.events);
    // Consumers without a socket read Postgres, so they need not wait for the publisher.
    engine.node_kinds().hint_due_deliveries(committed.locations());
    // After the announcement, which shows the contents, and before the batch waits in the publisher's queue.
    committed.drop_unpublished_contents();
    if let Err(committed) = engine.inner.publisher.push(committed) {
        // The outbox relay will publish it; recipients need not wait for that.
        engine.hints().mailboxes_changed(committed.mailboxes());
    }
    opened
}

/// Replies to requests that had the idempotency key of `send`, as they would be answered by a transaction of their own.
fn reply_to_repeats(repeats: Vec<PendingSend>, send: &NewSend, outcome: &SendOutcome) {
    for repeat in repeats {
        let is_same =
            repeat.send.key.as_ref().map(|key| &key.fingerprint) == send.key.as_ref().map(|key| &key.fingerprint);
        let reply = match outcome {
            SendOutcome::Committed(_) | SendOutcome::FanoutOpened { .. } if is_same => {
                CommitReply::Repeated { message: Box::new(send.message.clone()) }
            }
            SendOutcome::Replayed { response } if is_same => CommitReply::Replayed { response: response.clone() },
            SendOutcome::Committed(_) | SendOutcome::FanoutOpened { .. } | SendOutcome::Replayed { .. } => {
                CommitReply::KeyReused
            }
            SendOutcome::KeyReused if is_same => CommitReply::KeyReused,
            // Nothing is known of this request's own fingerprint, or of its facts: it is resolved and submitted again.
            SendOutcome::KeyReused | SendOutcome::Stale | SendOutcome::Preceded | SendOutcome::SenderBusy => {
                CommitReply::Stale
            }
        };
        let _ = repeat.reply.send(Ok(reply));
    }
}

/// Announces the events with their messages, which are in memory.
fn announce(engine: &Engine, committed: &CommittedBatch, events: Vec<RecordedEvents>) {
    for recorded in events {
        let messages = if recorded.watched { committed.messages(recorded.scope) } else { HashMap::new() };
        engine.core().announce(Announcement::with_messages(recorded, messages));
    }
}
