//! Fan-outs: writes the deliveries of messages with many recipients in chunks, after the committer has accepted them
//! ([`OpenedFanout`]), and continues those of processes that stopped ([`continue_lapsed`]).
//!
//! A chunk is a transaction of its own, so other sends commit in between and no lock is held for longer. The record in
//! Postgres decides who has written what: two processes that write the same fan-out write each chunk once.

use std::{
    collections::HashMap,
    convert::Infallible,
    sync::{Arc, Weak},
    time::Duration,
};

use relay_domain::{AgentId, BatchId, GatewayId, MessageId, NodeId, WorkspaceScope, messages::Message, metric_names};
use relay_store::{
    Store, StoreError,
    messages::{
        batch::{NewRecipient, NewSend, WrittenDelivery},
        fanout_chunks::{ChunkOutcome, FanoutChunk, WrittenChunk},
        fanouts::ClaimedFanout,
    },
};
use relay_tasks::spawn_isolated;
use tokio::{sync::oneshot, time::Instant};

use super::publisher::{CommittedBatch, CommittedSend, stall_timeout};
use crate::{
    Engine, EngineError, EngineResult, Inner, due_work::WorkKind, events::announcement::Announcement,
    recovery::Readiness,
};

/// Longest wait of a reply for the last chunk. The message is accepted; its other deliveries follow.
const REPLY_AFTER: Duration = Duration::from_secs(10);
/// Longest wait of a send for earlier fan-outs of its author.
const PRECEDING_WAIT: Duration = Duration::from_secs(10);
/// Pause between two looks for open fan-outs: the first, and the longest, which it doubles up to.
const LOOK_EVERY: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));
/// Retries of a chunk that lost against other transactions. Then another process may continue.
const ABORT_RETRIES: u32 = 5;
/// Pause between two searches for fan-outs whose process stopped.
const CONTINUE_EVERY: Duration = Duration::from_secs(1);

/// Fan-out that this process has accepted and writes.
pub(crate) struct OpenedFanout {
    /// Without recipients, which a chunk has.
    send: CommittedSend,
    names: HashMap<AgentId, Arc<str>>,
    /// Dropped after the last chunk.
    completed: oneshot::Sender<()>,
}

impl OpenedFanout {
    /// Takes over an accepted fan-out. Calls `reply` after the last chunk, or when its caller has waited long enough.
    pub(crate) fn new(
        mut send: NewSend,
        names: Vec<Arc<str>>,
        traceparent: Option<String>,
        reply: impl FnOnce() + Send + 'static,
    ) -> Self {
        let (completed, completion) = oneshot::channel();
        spawn_isolated("commit", async move {
            // Nothing is ever sent: the sender is dropped after the last chunk.
            let _ = tokio::time::timeout(REPLY_AFTER, completion).await;
            reply();
        });
        let recipients = std::mem::take(&mut send.recipients);
        let copies = recipients.len();
        let names = recipients.into_iter().map(|recipient| recipient.agent_id).zip(names).collect();
        Self { send: CommittedSend::without_recipients(send, copies, traceparent), names, completed }
    }

    /// Writes and publishes chunk after chunk. One that fails leaves the rest to [`continue_lapsed`] of any process.
    pub(crate) async fn write_chunks(self, engine: &Engine) {
        let gateway_id = engine.core().gateway_id().unwrap_or(GatewayId::new(0));
        let mut writer =
            ChunkWriter { engine, scope: self.send.scope(), message: self.send.message(), written: 0, gateway_id };
        let (mut published, mut stalled): (Option<(_, usize)>, bool) = (None, false);
        while let Some((batch, chunk)) = writer.write_next().await {
            if let Some((earlier, frames)) = published.take().filter(|_| !stalled) {
                // JetStream stores in order: a whole fan-out there would delay what others post meanwhile. Behind a
                // stall the other chunks do not wait, because they would hold the lane.
                stalled = tokio::time::timeout(stall_timeout(frames), earlier).await.is_err();
            }
            let is_last = chunk.is_last;
            let frames = chunk.deliveries.len();
            published = Some((self.publish(engine, batch, chunk), frames));
            if is_last {
                return;
            }
        }
        let (scope, message) = (self.send.scope(), self.send.message());
        let (sender, id, store) = (message.agent_id, message.id, engine.store().clone());
        let completed = self.completed;
        spawn_isolated("commit", async move {
            // The record of the message itself is among those below the next id.
            let _ = wait_until_written(&store, (scope, sender), MessageId::new(id.get() + 1), REPLY_AFTER).await;
            drop(completed);
        });
    }

    /// Passes a chunk to the publisher. The result completes, with an error, when the chunk has been published or given
    /// up.
    fn publish(&self, engine: &Engine, batch: BatchId, chunk: WrittenChunk) -> oneshot::Receiver<Infallible> {
        note_written(engine, self.send.scope(), &chunk);
        let (recipients, rows): (Vec<NewRecipient>, Vec<WrittenDelivery>) = chunk.deliveries.into_iter().unzip();
        // A chunk's recipients are some of those with which the record was written, so each has its name.
        let names = recipients.iter().map(|to| self.names.get(&to.agent_id).cloned().unwrap_or_default()).collect();
        let send = self.send.with_recipients(recipients, names, rows);
        let (ended, end) = oneshot::channel();
        let committed = CommittedBatch { batch, epoch: chunk.epoch, sends: vec![send], _ended: Some(ended) };
        if let Err(committed) = engine.inner.publisher.push(committed) {
            // The outbox relay will publish it; recipients need not wait for that.
            engine.hints().mailboxes_changed(committed.mailboxes());
        }
        end
    }
}

/// Counts the deliveries of a chunk, announces its events, and wakes the consumers of nodes without a socket.
fn note_written(engine: &Engine, scope: WorkspaceScope, chunk: &WrittenChunk) {
    metrics::counter!(metric_names::DELIVERIES_WRITTEN).increment(chunk.deliveries.len() as u64);
    for recorded in chunk.events.clone() {
        engine.core().announce(Announcement::with_messages(recorded, HashMap::new()));
    }
    let located = |(to, row): &'_ (NewRecipient, WrittenDelivery)| -> (WorkspaceScope, AgentId, NodeId) {
        (scope, to.agent_id, row.node_id.clone())
    };
    let locations: Vec<_> = chunk.deliveries.iter().map(located).collect();
    engine.node_kinds().hint_due_deliveries(locations.iter().map(|(scope, agent, node)| (*scope, *agent, node)));
}

/// Writer of the chunks of one fan-out.
struct ChunkWriter<'a> {
    engine: &'a Engine,
    scope: WorkspaceScope,
    message: &'a Message,
    /// Recipients that earlier chunks have dealt with.
    written: i32,
    gateway_id: GatewayId,
}

impl ChunkWriter<'_> {
    /// Writes the next chunk; `None` if the rest has to be left to others, or has been written by them.
    async fn write_next(&mut self) -> Option<(BatchId, WrittenChunk)> {
        let mut retries = 0;
        loop {
            let core = self.engine.core();
            let chunk = FanoutChunk {
                scope: self.scope,
                message: self.message,
                written: self.written,
                batch_id: BatchId::new(core.next_id()),
                gateway_id: self.gateway_id,
                at: core.now(),
            };
            match core.store.write_fanout_chunk(&chunk).await {
                Ok(ChunkOutcome::Written(written)) => {
                    self.written = written.written;
                    return Some((chunk.batch_id, written));
                }
                Ok(ChunkOutcome::Overtaken) => return None,
                Err(StoreError::Aborted { .. }) if retries < ABORT_RETRIES => {
                    retries += 1;
                    // Random, so that two processes that lost against each other do not meet again.
                    let pause = fastrand::u64(1..=10 << retries);
                    tokio::time::sleep(Duration::from_millis(pause)).await;
                }
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(error, message.id = %self.message.id, "chunk of a fan-out not written, will continue");
                    return None;
                }
            }
        }
    }
}

/// Waits until no fan-out of an author with an id below `before` is open.
///
/// # Errors
/// When it takes too long, or Postgres is unavailable.
pub(crate) async fn wait_until_written(
    store: &Store,
    (scope, sender): (WorkspaceScope, AgentId),
    before: MessageId,
    at_most: Duration,
) -> EngineResult<()> {
    let until = Instant::now() + at_most;
    let (mut pause, longest) = LOOK_EVERY;
    while store.has_open_fanout(scope, sender, before).await? {
        if Instant::now() >= until {
            return Err(EngineError::Overloaded);
        }
        tokio::time::sleep(pause).await;
        pause = longest.min(pause * 2);
    }
    Ok(())
}

/// Waits until the fan-outs are written that precede a send of this author.
///
/// # Errors
/// When it takes too long, or Postgres is unavailable.
pub(crate) async fn wait_for_preceding(
    store: &Store,
    author: (WorkspaceScope, AgentId),
    arrived: MessageId,
) -> EngineResult<()> {
    wait_until_written(store, author, arrived, PRECEDING_WAIT).await
}

/// Continues fan-outs whose process stopped, until the engine is dropped.
pub(crate) async fn continue_lapsed(engine: Weak<Inner>) {
    let lapsed = engine.upgrade().map(|inner| inner.due_work.watch(WorkKind::LapsedFanouts, CONTINUE_EVERY));
    let Some(mut lapsed) = lapsed else { return };
    loop {
        tokio::time::sleep(CONTINUE_EVERY).await;
        if !lapsed.wait().await {
            return;
        }
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        // The rows of a restored database may be outdated until the repair.
        if matches!(engine.recovery().readiness(), Readiness::Closed(_)) {
            continue;
        }
        if let Err(error) = continue_all(&engine).await {
            tracing::debug!(error = &error as &dyn std::error::Error, "failed to look for open fan-outs");
        }
    }
}

async fn continue_all(engine: &Engine) -> EngineResult<()> {
    // Not this gateway: the outbox relay publishes the chunks at once, because there is no lease behind them.
    while let Some(claimed) = engine.store().claim_lapsed_fanout(GatewayId::new(0)).await? {
        let ClaimedFanout { scope, message_id, written, is_outdated } = claimed;
        let listed = engine.store().message(scope, message_id).await?;
        let Some(listed) = listed.filter(|_| !is_outdated) else {
            tracing::warn!(message.id = %message_id, written, "ended a fan-out whose deliveries have expired");
            engine.store().abandon_fanout(scope, message_id).await?;
            continue;
        };
        tracing::info!(message.id = %message_id, written, "continuing a fan-out");
        let message = &listed.message;
        let mut writer = ChunkWriter { engine, scope, message, written, gateway_id: GatewayId::new(0) };
        while let Some((_, chunk)) = writer.write_next().await {
            note_written(engine, scope, &chunk);
            // No copies are sent from here: gateways read Postgres at this hint, and the outbox relay publishes.
            engine.hints().mailboxes_changed(chunk.deliveries.iter().map(|(to, _)| (scope, to.agent_id)));
            if chunk.is_last {
                break;
            }
        }
    }
    Ok(())
}
