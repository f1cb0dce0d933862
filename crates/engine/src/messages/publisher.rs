//! Publishing after the commit: live copies to the gateways with the recipients' sockets, deliveries into the log, and
//! the outbox row marked as published.
//!
//! JetStream decides nothing: copies do not come from it. When it refuses a batch or stores it slowly, the connection
//! to NATS may be broken, and gateways get a hint to read Postgres.

use std::{collections::HashMap, convert::Infallible, sync::Arc, time::Duration};

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{
    AgentId, BatchId, DeliveryId, JsonText, MessageId, NodeId, WorkspaceScope,
    mailboxes::{Content, ContentBudget, StoredDelivery},
    messages::Message,
    metric_names,
};
use relay_store::messages::batch::{NewRecipient, NewSend, WrittenDelivery};
use relay_stream::{INLINE_LIMIT, LogFrame, PendingStore, Stream};
use relay_tasks::{
    batches::{Batches, QueueConfig, queue},
    spawn_isolated,
};
use relay_wire::{
    messages::payload,
    nodes::deliver_frame::{self, SharedPayloads},
};
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::Messages;
use crate::{Engine, EngineResult, Inner, core::Core};

/// Bound of the queue, in batches. Beyond it the outbox relay takes over.
const QUEUE: usize = 256;
/// Bound of the batches that JetStream has not acknowledged.
const IN_FLIGHT: usize = 64;
/// Bound of the copies of one message in the log together. Beyond it the recipients' gateways read it from Postgres.
const COPIES_BYTES: usize = 16 * 1024 * 1024;
/// After a longer wait for NATS gateways get a hint to read Postgres: live copies may be lost. A cluster that elects a
/// leader pauses for seconds.
const STALL_TIMEOUT: Duration = Duration::from_millis(250);
/// The same for one frame of a large batch. A busy JetStream stores some thousand frames a second, and to read a
/// thousand mailboxes that are not behind would make it slower.
const STALL_TIMEOUT_PER_FRAME: Duration = Duration::from_millis(1);
/// Published batches that wait to be marked, all by one update: marking each alone would cost a commit per batch. One
/// that finds no room is published again.
const MARKS: QueueConfig<BatchId> =
    QueueConfig::new("published_batches", 4096, 4096).at_most_every(Duration::from_millis(100));

/// Longest rest of a delivery's life for which its copy says when it ends. A copy reaches its socket long before, and
/// is compared with storage after it has waited there for 2 s.
const SHORT_LIFE: TimeDelta = TimeDelta::minutes(1);

/// Deliveries that are read and published again at a time, and the bytes of their contents.
const REPUBLISH_ROWS: usize = 512;
const REPUBLISH_BYTES: usize = 1024 * 1024;

pub(crate) struct CommittedBatch {
    pub(crate) batch: BatchId,
    /// Recovery epoch in which it was committed.
    pub(crate) epoch: Option<i64>,
    pub(crate) sends: Vec<CommittedSend>,
    /// Dropped when the batch has been published or given up: the next chunk of its fan-out waits for that.
    pub(crate) _ended: Option<oneshot::Sender<Infallible>>,
}

pub(crate) struct CommittedSend {
    send: NewSend,
    names: Vec<Arc<str>>,
    rows: Vec<Option<WrittenDelivery>>,
    traceparent: Option<String>,
    /// Recipients of the message in all batches.
    copies: usize,
    /// Its content was dropped.
    is_reference: bool,
}

impl CommittedSend {
    fn new(
        send: NewSend,
        names: Vec<Arc<str>>,
        rows: Vec<Option<WrittenDelivery>>,
        traceparent: Option<String>,
    ) -> Self {
        Self { copies: rows.len(), send, names, rows, traceparent, is_reference: false }
    }

    /// Returns a fan-out with this many recipients, which get their deliveries in several batches.
    pub(crate) fn without_recipients(send: NewSend, copies: usize, traceparent: Option<String>) -> Self {
        let mut fanout = Self { copies, ..Self::new(send, Vec::new(), Vec::new(), traceparent) };
        fanout.drop_unpublished_content();
        fanout
    }

    /// Returns the part of a fan-out for one batch.
    pub(crate) fn with_recipients(
        &self,
        recipients: Vec<NewRecipient>,
        names: Vec<Arc<str>>,
        rows: Vec<WrittenDelivery>,
    ) -> Self {
        Self {
            send: NewSend { recipients, ..self.send.clone() },
            names,
            rows: rows.into_iter().map(Some).collect(),
            traceparent: self.traceparent.clone(),
            copies: self.copies,
            is_reference: self.is_reference,
        }
    }

    pub(crate) fn scope(&self) -> WorkspaceScope {
        self.send.scope
    }

    pub(crate) fn message(&self) -> &Message {
        &self.send.message
    }

    /// Drops a content that is published as a reference: one too large for the log, or with so many recipients that its
    /// copies would be large together.
    fn drop_unpublished_content(&mut self) {
        let bytes = self.send.message.held_bytes();
        if bytes > INLINE_LIMIT || bytes * self.copies > COPIES_BYTES {
            self.is_reference = true;
            self.send.message.text.clear();
            (self.send.message.blocks, self.send.message.metadata) = (None, JsonText::empty_object());
        }
    }
}

impl CommittedBatch {
    pub(crate) fn push(
        &mut self,
        send: NewSend,
        names: Vec<Arc<str>>,
        rows: Vec<Option<WrittenDelivery>>,
        traceparent: Option<String>,
    ) {
        self.sends.push(CommittedSend::new(send, names, rows, traceparent));
    }

    /// Messages of a workspace, by id, without large ones: those are read from Postgres, so that the announcements that
    /// wait hold none.
    pub(crate) fn messages(&self, scope: WorkspaceScope) -> HashMap<MessageId, Message> {
        let own = self.sends.iter().filter(|s| s.send.scope == scope && s.send.message.held_bytes() <= INLINE_LIMIT);
        own.map(|s| (s.send.message.id, s.send.message.clone())).collect()
    }

    pub(crate) fn mailboxes(&self) -> Vec<(WorkspaceScope, AgentId)> {
        let rows = self.sends.iter().flat_map(|s| {
            s.send
                .recipients
                .iter()
                .zip(&s.rows)
                .filter(|(_, row)| row.is_some())
                .map(|(r, _)| (s.send.scope, r.agent_id))
        });
        rows.collect()
    }

    /// Mailboxes that got rows, with their nodes.
    pub(crate) fn locations(&self) -> impl Iterator<Item = (WorkspaceScope, AgentId, &NodeId)> {
        self.sends.iter().flat_map(|s| {
            let rows = s.send.recipients.iter().zip(&s.rows);
            rows.filter_map(|(r, row)| Some((s.send.scope, r.agent_id, &row.as_ref()?.node_id)))
        })
    }

    /// Drops the contents that are published as references.
    pub(crate) fn drop_unpublished_contents(&mut self) {
        self.sends.iter_mut().for_each(CommittedSend::drop_unpublished_content);
    }

    /// Starts a span for each traced send; its frames become children.
    fn start_publish_spans(&mut self) -> Vec<tracing::Span> {
        let traced = self.sends.iter_mut().filter_map(|send| {
            let span = relay_trace::child_span(send.traceparent.as_deref(), || tracing::info_span!("stream.publish"))?;
            send.traceparent = relay_trace::traceparent_of(&span);
            Some(span)
        });
        traced.collect()
    }

    fn log_frames(&self) -> Vec<LogFrame> {
        let mut frames = Vec::new();
        for s in &self.sends {
            let message = &s.send.message;
            // All but one-to-one conversations share one payload.
            let mut shared = None;
            for ((recipient, name), row) in s.send.recipients.iter().zip(&s.names).zip(&s.rows) {
                let Some(row) = row else { continue };
                let payload = shared.get_or_insert_with(|| payload::payload(message, name));
                let id = DeliveryId { source: message.id.into(), agent: recipient.agent_id, redrive_no: 0 };
                let provider = row.provider.as_ref().map_or("", |p| p.as_str());
                frames.push(LogFrame {
                    scope: s.send.scope,
                    agent_id: recipient.agent_id,
                    seq: row.seq,
                    delivery_id: id.to_string(),
                    location: location(row.node_id.as_str(), provider),
                    gateways: row.gateways.clone(),
                    body: (!s.is_reference && payload.get().len() <= INLINE_LIMIT)
                        .then(|| deliver_frame::deliver_frame(id, name, row.seq, recipient.mode, payload)),
                    sender: Some(message.agent_id),
                    traceparent: s.traceparent.clone(),
                    epoch: self.epoch,
                    expires_at_ms: near_end(row.expires_at, message.created_at),
                });
            }
        }
        frames
    }
}

/// Returns the end of a delivery's life, in milliseconds of Unix time, if it is within [`SHORT_LIFE`].
fn near_end(expires_at: DateTime<Utc>, now: DateTime<Utc>) -> Option<i64> {
    (expires_at - now <= SHORT_LIFE).then(|| expires_at.timestamp_millis())
}

/// Formats a recipient's location for the log: `node/provider`, the provider empty while unassigned.
#[must_use]
pub(crate) fn location(node: &str, provider: &str) -> String {
    format!("{node}/{provider}")
}

#[derive(Debug, Clone)]
pub(crate) struct Publisher {
    sender: mpsc::Sender<CommittedBatch>,
}

impl Publisher {
    pub(crate) fn new() -> (Self, mpsc::Receiver<CommittedBatch>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        (Self { sender }, receiver)
    }

    /// Queues a batch; returns it when the queue is full.
    pub(crate) fn push(&self, committed: CommittedBatch) -> Result<(), CommittedBatch> {
        self.sender.try_send(committed).map_err(|error| {
            metrics::counter!(metric_names::PUBLISH_SKIPPED).increment(1);
            error.into_inner()
        })
    }
}

/// Publishes batches in commit order until the engine is dropped.
pub(crate) async fn run(engine: std::sync::Weak<Inner>, mut batches: mpsc::Receiver<CommittedBatch>) {
    let in_flight = Arc::new(Semaphore::new(IN_FLIGHT));
    let (published, marks) = queue(MARKS);
    let published = Arc::new(published);
    let Some(inner) = engine.upgrade() else { return };
    inner.tasks.spawn("publish-marks", mark_published(engine.clone(), marks));
    drop(inner);
    while let Some(mut committed) = batches.recv().await {
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        // The outbox relay publishes the batch once NATS is back; recipients read Postgres meanwhile. After a
        // recovery the deliveries may be lost, and their numbers assigned to others.
        if !engine.inner.stream.is_up() || engine.store().served_epoch() != committed.epoch {
            engine.hints().mailboxes_changed(committed.mailboxes());
            continue;
        }
        let spans = committed.start_publish_spans();
        let frames = committed.log_frames();
        if frames.is_empty() {
            // Nothing to publish: there were no recipients, all mailboxes were full, or these are fan-outs, whose
            // chunks have batches of their own.
            let _ = published.try_send(committed.batch);
            continue;
        }
        // Before the log, so that no recipient waits for JetStream. After a timeout some copies may be missing.
        let copied = tokio::time::timeout(STALL_TIMEOUT, engine.inner.stream.send_copies(&frames)).await;
        if !matches!(copied, Ok(Ok(()))) {
            engine.hints().mailboxes_changed(committed.mailboxes());
        }
        let permit = match Arc::clone(&in_flight).try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                // NATS may have stalled with the copies: delivery must not.
                engine.hints().mailboxes_changed(committed.mailboxes());
                let Ok(permit) = Arc::clone(&in_flight).acquire_owned().await else { return };
                permit
            }
        };
        // Awaited here only until it is sent, which keeps the order of commits; the acknowledgement is awaited apart.
        match engine.inner.stream.publish(&frames).await {
            Ok(stored) => {
                let published = Arc::clone(&published);
                // Only the number is needed from now on.
                let frames = frames.len();
                spawn_isolated("publish", async move {
                    if wait_until_stored(&engine, stored, &committed, frames).await {
                        let _ = published.try_send(committed.batch);
                    }
                    drop((permit, spans));
                });
            }
            Err(error) => {
                // It stays unmarked, so the outbox relay publishes it.
                tracing::debug!(error = &error as &dyn std::error::Error, "failed to publish a batch");
                engine.hints().mailboxes_changed(committed.mailboxes());
            }
        }
    }
}

/// Waits for JetStream's acknowledgement. After a stall or a failure it hints gateways to read Postgres.
async fn wait_until_stored(engine: &Engine, stored: PendingStore, committed: &CommittedBatch, frames: usize) -> bool {
    let wait = stored.wait();
    tokio::pin!(wait);
    let outcome = match tokio::time::timeout(stall_timeout(frames), &mut wait).await {
        Ok(outcome) => outcome,
        Err(_) => {
            metrics::counter!(metric_names::PUBLISH_STALLED).increment(1);
            engine.hints().mailboxes_changed(committed.mailboxes());
            // The batch may still be stored, and is marked then.
            wait.await
        }
    };
    match outcome {
        Ok(()) => {
            metrics::counter!(metric_names::DELIVERIES_PUBLISHED).increment(u64::try_from(frames).unwrap_or(0));
            true
        }
        Err(error) => {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "jetstream did not store a batch, gateways read postgres"
            );
            engine.hints().mailboxes_changed(committed.mailboxes());
            false
        }
    }
}

/// Returns the time within which JetStream should store a batch of this many frames.
pub(super) fn stall_timeout(frames: usize) -> Duration {
    STALL_TIMEOUT.max(STALL_TIMEOUT_PER_FRAME.saturating_mul(u32::try_from(frames).unwrap_or(u32::MAX)))
}

/// Marks published batches together. An unmarked batch is published again, which is harmless.
async fn mark_published(engine: std::sync::Weak<Inner>, mut marks: Batches<BatchId>) {
    while let Some(batches) = marks.next().await {
        let Some(inner) = engine.upgrade() else { return };
        if let Err(error) = inner.core.store.mark_published(&batches).await {
            tracing::debug!(
                error = &error as &dyn std::error::Error,
                "failed to mark published batches, they will be published again"
            );
        }
    }
}

impl Messages {
    /// Publishes the deliveries of these messages again, from Postgres, and waits until they are stored: all of them,
    /// or those of a range of agents. JetStream drops the copies that it has.
    ///
    /// # Errors
    /// When Postgres or JetStream failed; call again.
    pub async fn republish(
        &self,
        sources: &[(WorkspaceScope, MessageId)],
        agents: Option<(AgentId, AgentId)>,
        traceparent: Option<&str>,
    ) -> EngineResult<()> {
        let epoch = self.core.store.known_epoch();
        let rows = self.core.store.deliveries_of_sources(sources, agents).await?;
        let mailboxes = rows.iter().map(|row| (row.scope, row.agent_id));
        // First, so that recipients do not wait for JetStream.
        self.core.hints.mailboxes_changed(mailboxes);
        publish_rows(&self.core, &self.stream, rows, Origin { epoch, traceparent }).await
    }
}

/// Origin of stored deliveries.
#[derive(Clone, Copy)]
pub(crate) struct Origin<'a> {
    /// Recovery epoch that this process knew before it read them: they may be lost in a later one.
    pub(crate) epoch: Option<i64>,
    pub(crate) traceparent: Option<&'a str>,
}

/// Publishes stored deliveries in parts, and waits until they are stored. Only contents that fit into the log are read.
/// One task of a process does this at a time, so its memory is not reserved.
pub(crate) async fn publish_rows(
    core: &Core,
    stream: &Stream,
    mut rows: Vec<StoredDelivery>,
    origin: Origin<'_>,
) -> EngineResult<()> {
    rows.retain(|row| !row.is_dropped());
    let mut rest = rows.as_mut_slice();
    let now = core.now();
    while !rest.is_empty() {
        let mut budget = ContentBudget::new(REPUBLISH_BYTES);
        let fitting = rest.iter().take(REPUBLISH_ROWS).take_while(|row| !is_inline(row) || budget.add(row)).count();
        let (chunk, later) = rest.split_at_mut(fitting);
        rest = later;
        core.store.read_contents(chunk.iter_mut().filter(|row| is_inline(row))).await?;
        let mut payloads = SharedPayloads::default();
        let frames: Vec<LogFrame> = chunk.iter().map(|row| log_frame(&mut payloads, row, origin, now)).collect();
        // Stored before the next part is read, so that one part at most is in memory.
        stream.publish(&frames).await?.wait().await?;
    }
    Ok(())
}

/// Returns whether a delivery may be small enough for the log; a settled one is published as a reference.
fn is_inline(row: &StoredDelivery) -> bool {
    matches!(row.content, Content::Unread { bytes, .. } if bytes <= INLINE_LIMIT)
}

fn log_frame(payloads: &mut SharedPayloads, row: &StoredDelivery, origin: Origin<'_>, now: DateTime<Utc>) -> LogFrame {
    let body = payloads.frame(row).filter(|frame| frame.byte_len() <= INLINE_LIMIT);
    LogFrame {
        scope: row.scope,
        agent_id: row.agent_id,
        seq: row.seq,
        delivery_id: row.id().to_string(),
        // Without a provider the agent is unassigned, which an empty name says.
        location: location(&row.location.0, row.location.1.as_deref().unwrap_or_default()),
        // Gateways read Postgres.
        gateways: Vec::new(),
        body: body.map(|frame| frame.encode().into()),
        sender: row.sender,
        traceparent: origin.traceparent.map(ToOwned::to_owned),
        epoch: origin.epoch,
        expires_at_ms: near_end(row.expires_at, now),
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::ProviderName;

    use super::*;
    use crate::messages::fixture::{message, scope, send};

    fn committed(text: &str) -> CommittedBatch {
        let written = |seq, provider: Option<&str>| WrittenDelivery {
            seq,
            node_id: NodeId::new("n1"),
            provider: provider.map(ProviderName::new),
            gateways: Vec::new(),
            expires_at: DateTime::UNIX_EPOCH + TimeDelta::minutes(seq),
        };
        let mut committed = CommittedBatch { batch: BatchId::new(1), epoch: Some(7), sends: Vec::new(), _ended: None };
        let names = ["bob", "eve", "joe"].map(Arc::from).to_vec();
        let rows = vec![Some(written(1, Some("p1"))), None, Some(written(9, None))];
        committed.push(send(message(5, text), &[2, 3, 4]), names, rows, None);
        committed
    }

    #[test]
    fn each_written_row_is_a_frame_and_a_full_mailbox_gets_none() {
        let committed = committed("hello");
        let frames = committed.log_frames();
        let shown: Vec<_> = frames.iter().map(|f| (f.agent_id.get(), f.seq, f.location.as_str())).collect();
        assert_eq!(shown, [(2, 1, "n1/p1"), (4, 9, "n1/")]);
        let ends: Vec<_> = frames.iter().map(|frame| frame.expires_at_ms).collect();
        assert_eq!(ends, [Some(60_000), None], "only a delivery that ends soon says when");
        let bodies: Vec<_> = frames.iter().filter_map(|f| f.body.as_deref().map(String::from_utf8_lossy)).collect();
        assert!(bodies[0].contains(r#""agent":"bob""#) && bodies[1].contains(r#""agent":"joe""#), "{bodies:?}");
        assert_eq!(committed.mailboxes(), [(scope(), AgentId::new(2)), (scope(), AgentId::new(4))]);
        assert_eq!(committed.locations().count(), 2);
    }

    #[test]
    fn a_large_batch_has_longer_until_it_counts_as_stalled() {
        assert_eq!([1, 250, 1000].map(|frames| stall_timeout(frames).as_millis()), [250, 250, 1000]);
    }

    #[test]
    fn a_large_frame_travels_as_a_reference() {
        let frames = committed(&"a".repeat(INLINE_LIMIT)).log_frames();
        assert!(frames.iter().all(|frame| frame.body.is_none() && frame.sender == Some(AgentId::new(1))));
    }
}
