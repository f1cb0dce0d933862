//! Per-agent log: publishing committed deliveries and tailing them live.

use std::{
    future::IntoFuture,
    pin::Pin,
    task::{Context, Poll},
};

use async_nats::{HeaderMap, Message, Subscriber, jetstream::context::PublishAckFuture};
use bytes::Bytes;
use futures::{StreamExt as _, stream::FuturesUnordered};
use relay_domain::{AgentId, WorkspaceScope, mailboxes::stream::Seq, shard::agent_shard};

use crate::{
    FrameKeys, Stream, StreamError, StreamResult,
    mac::{Covered, MAC, MessageKind},
    subjects,
};

/// Maximum size of an inline frame, in bytes. Larger frames are references, which the gateway reads from Postgres.
pub const INLINE_LIMIT: usize = 32 * 1024;

pub(crate) const MESSAGE_ID: &str = "Nats-Msg-Id";
pub(crate) const SEQ: &str = "Relay-Seq";
const LOCATION: &str = "Relay-Location";
pub(crate) const REFERENCE: &str = "Relay-Reference";
/// Sender of a reference. Recovery notifies it if a restored Postgres has lost the message.
pub(crate) const SENDER: &str = "Relay-Sender";
const TRACEPARENT: &str = "traceparent";

/// Committed delivery to publish.
#[derive(Debug, Clone)]
pub struct LogFrame {
    /// Workspace of the recipient.
    pub scope: WorkspaceScope,
    /// Id of the recipient.
    pub agent_id: AgentId,
    /// Position in the mailbox.
    pub seq: Seq,
    /// Id of the delivery, by which JetStream drops duplicates.
    pub delivery_id: String,
    /// `node/provider` of the recipient at commit; the provider may be empty.
    pub location: String,
    /// The `deliver` frame as written to the socket; `None` above [`INLINE_LIMIT`].
    pub body: Option<Bytes>,
    /// Id of the sender, if any.
    pub sender: Option<AgentId>,
    /// W3C trace context of the request.
    pub traceparent: Option<String>,
}

/// Live copy of a delivery.
#[derive(Debug, Clone)]
pub struct LiveFrame {
    /// Position in the mailbox.
    pub seq: Seq,
    /// Id of the delivery.
    pub delivery_id: String,
    /// `node/provider` of the recipient at commit.
    pub location: String,
    /// The frame; `None` for a reference that must be read from Postgres.
    pub body: Option<Bytes>,
    /// W3C trace context of the request.
    pub traceparent: Option<String>,
}

/// Message of a live tail.
#[derive(Debug, Clone)]
pub enum LiveCopy {
    /// Delivery that a process of this installation has published.
    Frame(LiveFrame),
    /// Unverified message: the mailbox may have changed.
    WakeUp,
}

type AckFuture = <PublishAckFuture as IntoFuture>::IntoFuture;

/// Published frames that JetStream has not confirmed yet.
pub struct PendingStore {
    acks: FuturesUnordered<AckFuture>,
}

impl PendingStore {
    /// Waits until all frames are stored.
    ///
    /// # Errors
    /// If a frame was not stored, or JetStream is unavailable.
    pub async fn wait(mut self) -> StreamResult<()> {
        while let Some(ack) = self.acks.next().await {
            ack.map_err(StreamError::from_nats("storing a delivery in the log"))?;
        }
        Ok(())
    }
}

/// Live tail of one agent's log.
pub struct Tail {
    subscriber: Subscriber,
    /// Subject of the agent's log, which the codes of its frames cover.
    subject: String,
    keys: FrameKeys,
}

impl futures::Stream for Tail {
    type Item = LiveCopy;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<LiveCopy>> {
        let received = std::task::ready!(Pin::new(&mut self.subscriber).poll_next(cx));
        Poll::Ready(received.map(|message| self.decode(message)))
    }
}

impl Tail {
    fn decode(&self, message: Message) -> LiveCopy {
        let headers = message.headers.unwrap_or_default();
        if !verify_frame(&self.keys, MessageKind::Delivery, &self.subject, &headers, &message.payload) {
            return LiveCopy::WakeUp;
        }
        decode_live_frame(&headers, message.payload).map_or(LiveCopy::WakeUp, LiveCopy::Frame)
    }
}

fn decode_live_frame(headers: &HeaderMap, body: Bytes) -> Option<LiveFrame> {
    let text = |name: &str| headers.get(name).map(|value| value.as_str().to_owned());
    Some(LiveFrame {
        seq: headers.get(SEQ)?.as_str().parse().ok()?,
        delivery_id: text(MESSAGE_ID)?,
        location: text(LOCATION)?,
        traceparent: text(TRACEPARENT),
        body: headers.get(REFERENCE).is_none().then_some(body),
    })
}

/// Headers of a frame that its code covers; an absent one is empty.
const COVERED: [&str; 6] = [MESSAGE_ID, SEQ, LOCATION, REFERENCE, SENDER, TRACEPARENT];

fn covered_fields(headers: &HeaderMap) -> [&str; COVERED.len()] {
    COVERED.map(|name| headers.get(name).map_or("", |value| value.as_str()))
}

/// Returns whether a process of this installation has published this frame on `subject`.
pub(crate) fn verify_frame(
    keys: &FrameKeys,
    kind: MessageKind,
    subject: &str,
    headers: &HeaderMap,
    body: &[u8],
) -> bool {
    let code = headers.get(MAC).map(|value| value.as_str());
    keys.verify(kind, code, &Covered { subject, fields: &covered_fields(headers), body })
}

impl Stream {
    /// Publishes frames pipelined and in order. The result completes when JetStream has stored all of them.
    ///
    /// # Errors
    /// If the client is closed. Publishing the same frames again is harmless.
    pub async fn publish(&self, frames: &[LogFrame]) -> StreamResult<PendingStore> {
        let acks = FuturesUnordered::new();
        for frame in frames {
            let mut headers = HeaderMap::new();
            headers.insert(MESSAGE_ID, frame.delivery_id.as_str());
            headers.insert(SEQ, frame.seq.to_string());
            headers.insert(LOCATION, frame.location.as_str());
            if let Some(traceparent) = &frame.traceparent {
                headers.insert(TRACEPARENT, traceparent.as_str());
            }
            let body = frame.body.clone().unwrap_or_else(|| {
                headers.insert(REFERENCE, "postgres");
                if let Some(sender) = frame.sender {
                    headers.insert(SENDER, sender.to_string());
                }
                Bytes::new()
            });
            let subject = subjects::log_subject(frame.scope, frame.agent_id);
            let covered = Covered { subject: &subject, fields: &covered_fields(&headers), body: &body };
            let code = self.identity.keys.sign(&covered);
            headers.insert(MAC, code);
            let ack = self
                .jetstream
                .publish_with_headers(subject, headers, body)
                .await
                .map_err(StreamError::from_nats("publishing a delivery"))?;
            acks.push(ack.into_future());
        }
        Ok(PendingStore { acks })
    }

    /// Subscribes to an agent's new frames.
    ///
    /// # Errors
    /// If the client is closed.
    pub async fn tail_agent(&self, scope: WorkspaceScope, agent: AgentId) -> StreamResult<Tail> {
        // Ids are not spread evenly, shards are.
        let connection = usize::from(agent_shard(scope.workspace_id(), agent)) % self.tails.len();
        let subscriber = self.tails[connection]
            .subscribe(subjects::live_subject(scope, agent))
            .await
            .map_err(StreamError::from_nats("tailing an agent's log"))?;
        Ok(Tail { subscriber, subject: subjects::log_subject(scope, agent), keys: self.identity.keys.clone() })
    }
}
