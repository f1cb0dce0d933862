//! After the commit: deliveries into the log, and the outbox row marked published.
//!
//! JetStream hears last and has no say. What it does not take, or takes too slowly, reaches the
//! recipients all the same: their gateways are told to look into Postgres.

use std::{collections::HashMap, sync::Arc, time::Duration};

use relay_domain::{AgentId, BatchId, DeliveryId, MessageId, NodeId, WorkspaceScope, delivery::Mode, metric_names};
use relay_store::{
    MessageRow,
    commit::{NewSend, Written},
    replay::StoredDelivery,
};
use relay_stream::{INLINE_LIMIT, LogFrame, Stored};
use tokio::sync::{Semaphore, mpsc};

use crate::{Engine, EngineResult, Inner, payload, trace};

/// Batches that may wait for publishing. Beyond it the outbox relay takes over.
const QUEUE: usize = 256;
/// Batches whose acknowledgement by JetStream may be outstanding.
const IN_FLIGHT: usize = 64;
/// A publish slower than this must not stall delivery: gateways are told to look into Postgres. A
/// cluster that elects a leader pauses for seconds.
const STALL: Duration = Duration::from_millis(250);
/// Published batches that may wait to be marked; one that finds no room is published again.
const MARKS: usize = 4096;
/// Published batches are marked set-wise this often.
const MARK_EVERY: Duration = Duration::from_millis(100);

/// What a batch committed.
pub(crate) struct Committed {
    pub(crate) batch: BatchId,
    pub(crate) sends: Vec<CommittedSend>,
}

pub(crate) struct CommittedSend {
    send: NewSend,
    names: Vec<Arc<str>>,
    rows: Vec<Option<Written>>,
    traceparent: Option<String>,
}

impl Committed {
    pub(crate) fn push(
        &mut self,
        send: NewSend,
        names: Vec<Arc<str>>,
        rows: Vec<Option<Written>>,
        traceparent: Option<String>,
    ) {
        self.sends.push(CommittedSend { send, names, rows, traceparent });
    }

    /// The messages of a workspace, by id.
    pub(crate) fn messages(&self, scope: WorkspaceScope) -> HashMap<i64, MessageRow> {
        let own = self.sends.iter().filter(|s| s.send.scope == scope);
        own.map(|s| (s.send.message.message_id, s.send.message.clone())).collect()
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

    /// Whose mailboxes were written to, and where they were.
    pub(crate) fn places(&self) -> impl Iterator<Item = (WorkspaceScope, AgentId, &NodeId)> {
        self.sends.iter().flat_map(|s| {
            let rows = s.send.recipients.iter().zip(&s.rows);
            rows.filter_map(|(r, row)| Some((s.send.scope, r.agent_id, &row.as_ref()?.node_id)))
        })
    }

    /// A span for each traced send; its frames go below it.
    fn begin_publish(&mut self) -> Vec<tracing::Span> {
        let traced = self.sends.iter_mut().filter_map(|send| {
            let span = trace::below(send.traceparent.as_deref(), || tracing::info_span!("stream.publish"))?;
            send.traceparent = trace::of(&span);
            Some(span)
        });
        traced.collect()
    }

    fn frames(&self) -> Vec<LogFrame> {
        let mut frames = Vec::new();
        for s in &self.sends {
            let message = &s.send.message;
            // All but one-to-one conversations share one payload.
            let mut shared = None;
            for ((recipient, name), row) in s.send.recipients.iter().zip(&s.names).zip(&s.rows) {
                let Some(row) = row else { continue };
                let payload = shared.get_or_insert_with(|| payload::payload(message, name));
                let id = DeliveryId { source: message.message_id, agent: recipient.agent_id, redrive_no: 0 };
                let mode = Mode::from_code(recipient.mode).unwrap_or_default();
                let provider = row.provider.as_ref().map_or("", |p| p.as_str());
                frames.push(LogFrame {
                    scope: s.send.scope,
                    agent_id: recipient.agent_id,
                    seq: row.seq,
                    delivery_id: id.to_string(),
                    location: location(row.node_id.as_str(), provider),
                    // A copy of a large one for each of a thousand recipients would be a gigabyte.
                    body: (payload.get().len() <= INLINE_LIMIT)
                        .then(|| payload::deliver_frame(id, name, row.seq, mode, payload)),
                    sender: Some(AgentId::new(message.agent_id)),
                    traceparent: s.traceparent.clone(),
                });
            }
        }
        frames
    }
}

/// A recipient's place as the log carries it: `node/provider`, the provider empty when unknown.
#[must_use]
pub(crate) fn location(node: &str, provider: &str) -> String {
    format!("{node}/{provider}")
}

/// The way into the publisher.
#[derive(Debug, Clone)]
pub(crate) struct Publisher {
    sender: mpsc::Sender<Committed>,
}

impl Publisher {
    pub(crate) fn new() -> (Self, mpsc::Receiver<Committed>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        (Self { sender }, receiver)
    }

    /// Hands a batch over; gives it back when the publisher is that far behind.
    pub(crate) fn push(&self, committed: Committed) -> Result<(), Committed> {
        self.sender.try_send(committed).map_err(|error| {
            metrics::counter!(metric_names::PUBLISH_SKIPPED).increment(1);
            error.into_inner()
        })
    }
}

/// Publishes batches in commit order until the engine is gone.
pub(crate) async fn run(engine: std::sync::Weak<Inner>, mut queue: mpsc::Receiver<Committed>) {
    let in_flight = Arc::new(Semaphore::new(IN_FLIGHT));
    let (published, marks) = mpsc::channel(MARKS);
    tokio::spawn(mark(engine.clone(), marks));
    while let Some(mut committed) = queue.recv().await {
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        if !engine.inner.stream.is_up() {
            engine.hints().mailboxes_changed(committed.mailboxes());
            continue;
        }
        let spans = committed.begin_publish();
        let frames = committed.frames();
        if frames.is_empty() {
            let _ = published.try_send(committed.batch);
            continue;
        }
        let permit = match Arc::clone(&in_flight).try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                // JetStream has stalled: delivery must not.
                engine.hints().mailboxes_changed(committed.mailboxes());
                let Ok(permit) = Arc::clone(&in_flight).acquire_owned().await else { return };
                permit
            }
        };
        match engine.inner.stream.publish(&frames).await {
            Ok(stored) => {
                let published = published.clone();
                tokio::spawn(async move {
                    if wait_stored(&engine, stored, &committed, frames.len()).await {
                        let _ = published.try_send(committed.batch);
                    }
                    drop((permit, spans));
                });
            }
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "a batch was not published");
                engine.hints().mailboxes_changed(committed.mailboxes());
            }
        }
    }
}

/// Waits for JetStream; a stall or a refusal makes the gateways look into Postgres.
async fn wait_stored(engine: &Engine, stored: Stored, committed: &Committed, frames: usize) -> bool {
    let wait = stored.wait();
    tokio::pin!(wait);
    let outcome = match tokio::time::timeout(STALL, &mut wait).await {
        Ok(outcome) => outcome,
        Err(_) => {
            metrics::counter!(metric_names::PUBLISH_STALLED).increment(1);
            engine.hints().mailboxes_changed(committed.mailboxes());
            wait.await
        }
    };
    match outcome {
        Ok(()) => {
            metrics::counter!(metric_names::DELIVERIES_PUBLISHED).increment(u64::try_from(frames).unwrap_or(0));
            true
        }
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "jetstream did not store a batch");
            engine.hints().mailboxes_changed(committed.mailboxes());
            false
        }
    }
}

/// Marks published batches set-wise. What is not marked is published again, which does no harm.
async fn mark(engine: std::sync::Weak<Inner>, mut marks: mpsc::Receiver<BatchId>) {
    let mut batches = Vec::new();
    while let Some(first) = marks.recv().await {
        batches.push(first);
        tokio::time::sleep(MARK_EVERY).await;
        while let Ok(next) = marks.try_recv() {
            batches.push(next);
        }
        let Some(inner) = engine.upgrade() else { return };
        if let Err(error) = inner.store.mark_relayed(&batches).await {
            tracing::debug!(error = &error as &dyn std::error::Error, "published batches were not marked");
        }
        batches.clear();
    }
}

impl Engine {
    /// Publishes all deliveries of these messages again, from Postgres, and waits until they are
    /// stored. JetStream drops the copies that it already has.
    ///
    /// # Errors
    /// When Postgres or JetStream did not do it; try again.
    pub async fn republish(
        &self,
        sources: &[(WorkspaceScope, MessageId)],
        traceparent: Option<&str>,
    ) -> EngineResult<()> {
        let rows = self.store().deliveries_of(sources).await?;
        let frames: Vec<LogFrame> = rows.iter().filter_map(|row| log_frame(row, traceparent)).collect();
        let mailboxes = rows.iter().map(|row| (row.scope, row.agent_id));
        self.hints().mailboxes_changed(mailboxes);
        self.inner.stream.publish(&frames).await?.wait().await?;
        Ok(())
    }
}

pub(crate) fn log_frame(row: &StoredDelivery, traceparent: Option<&str>) -> Option<LogFrame> {
    let id = DeliveryId { source: row.source_id, agent: row.agent_id, redrive_no: row.redrive_no };
    Some(LogFrame {
        scope: row.scope,
        agent_id: row.agent_id,
        seq: row.seq,
        delivery_id: id.to_string(),
        location: location(&row.location.0, row.location.1.as_deref().unwrap_or_default()),
        body: match &row.message {
            Some(message) if message.text.len() > INLINE_LIMIT => None,
            _ => Some(payload::stored_frame(row)?).filter(|body| body.len() <= INLINE_LIMIT),
        },
        sender: row.message.as_ref().map(|message| AgentId::new(message.agent_id)),
        traceparent: traceparent.map(ToOwned::to_owned),
    })
}
