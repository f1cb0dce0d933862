//! The per-agent log: publishing committed deliveries and tailing them live.

use std::{
    future::IntoFuture,
    pin::Pin,
    task::{Context, Poll},
};

use async_nats::{HeaderMap, Message, Subscriber, jetstream::context::PublishAckFuture};
use bytes::Bytes;
use futures::{StreamExt as _, stream::FuturesUnordered};
use relay_domain::{AgentId, WorkspaceScope, session::Seq};

use crate::{Stream, StreamError, StreamResult, subjects};

/// Frames above this size travel as a reference: the gateway reads them from Postgres.
pub const INLINE_LIMIT: usize = 32 * 1024;

pub(crate) const MESSAGE_ID: &str = "Nats-Msg-Id";
pub(crate) const SEQ: &str = "Relay-Seq";
const LOCATION: &str = "Relay-Location";
pub(crate) const REFERENCE: &str = "Relay-Reference";
/// With a reference only: who is to be told if Postgres loses what it refers to.
pub(crate) const SENDER: &str = "Relay-Sender";
const TRACEPARENT: &str = "traceparent";

/// A committed delivery on its way into the log.
#[derive(Debug, Clone)]
pub struct LogFrame {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The recipient.
    pub agent_id: AgentId,
    /// Its place in the mailbox.
    pub seq: Seq,
    /// The delivery id: JetStream drops a second copy by it.
    pub delivery_id: String,
    /// `node/provider` of the recipient at commit; the provider may be empty.
    pub location: String,
    /// The `deliver` frame, as it is written to the socket; none above [`INLINE_LIMIT`].
    pub body: Option<Bytes>,
    /// Who sent it, if anybody.
    pub sender: Option<AgentId>,
    /// W3C trace context.
    pub traceparent: Option<String>,
}

/// A live copy from the tail.
#[derive(Debug, Clone)]
pub struct LiveFrame {
    /// Its place in the mailbox.
    pub seq: Seq,
    /// The delivery's id.
    pub delivery_id: String,
    /// `node/provider` of the recipient at commit.
    pub location: String,
    /// The frame; none when it is too large for the log and must be read from Postgres.
    pub body: Option<Bytes>,
    /// W3C trace context.
    pub traceparent: Option<String>,
}

type AckFuture = <PublishAckFuture as IntoFuture>::IntoFuture;

/// Frames on their way into the log.
pub struct Stored {
    acks: FuturesUnordered<AckFuture>,
}

impl Stored {
    /// Waits until all frames are stored.
    ///
    /// # Errors
    /// When one of them was not, or JetStream did not answer.
    pub async fn wait(mut self) -> StreamResult<()> {
        while let Some(ack) = self.acks.next().await {
            ack.map_err(StreamError::from_nats("storing a delivery in the log"))?;
        }
        Ok(())
    }
}

/// One agent's live tail.
pub struct Tail {
    subscriber: Subscriber,
}

impl futures::Stream for Tail {
    type Item = LiveFrame;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<LiveFrame>> {
        loop {
            match Pin::new(&mut self.subscriber).poll_next(cx) {
                Poll::Ready(Some(message)) => {
                    if let Some(frame) = live_frame(message) {
                        return Poll::Ready(Some(frame));
                    }
                }
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

fn live_frame(message: Message) -> Option<LiveFrame> {
    let headers = message.headers?;
    let text = |name: &str| headers.get(name).map(|value| value.as_str().to_owned());
    Some(LiveFrame {
        seq: headers.get(SEQ)?.as_str().parse().ok()?,
        delivery_id: text(MESSAGE_ID)?,
        location: text(LOCATION)?,
        traceparent: text(TRACEPARENT),
        body: headers.get(REFERENCE).is_none().then_some(message.payload),
    })
}

impl Stream {
    /// Publishes frames pipelined, in order. The answer tells when JetStream has stored all of them.
    ///
    /// # Errors
    /// When the client has been closed. Publishing the same frames again does no harm.
    pub async fn publish(&self, frames: &[LogFrame]) -> StreamResult<Stored> {
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
            let ack = self
                .jetstream
                .publish_with_headers(subject, headers, body)
                .await
                .map_err(StreamError::from_nats("publishing a delivery"))?;
            acks.push(ack.into_future());
        }
        Ok(Stored { acks })
    }

    /// Tails an agent's log from now on.
    ///
    /// # Errors
    /// When the client has been closed.
    pub async fn tail(&self, scope: WorkspaceScope, agent: AgentId) -> StreamResult<Tail> {
        let subscriber = self
            .client
            .subscribe(subjects::live_subject(scope, agent))
            .await
            .map_err(StreamError::from_nats("tailing an agent's log"))?;
        Ok(Tail { subscriber })
    }
}
