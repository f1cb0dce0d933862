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
    mac::{HeaderFields, MAC, MessageKind},
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
/// Recovery epoch in which the delivery was committed.
const EPOCH: &str = "Relay-Epoch";
/// End of the delivery's life, in milliseconds of Unix time.
const EXPIRES: &str = "Relay-Expires";

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
    /// Recovery epoch in which the delivery was committed, or read.
    pub epoch: Option<i64>,
    /// Time at which the delivery expires, in milliseconds of Unix time, if that is soon.
    pub expires_at_ms: Option<i64>,
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
    /// Recovery epoch of the delivery; `None` in frames of the version before.
    pub epoch: Option<i64>,
    /// Time at which the delivery expires, in milliseconds of Unix time; `None` if it had more than a minute left, and
    /// in frames of the version before.
    pub expires_at_ms: Option<i64>,
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
        // Without headers, which carry its code, a message does not verify.
        let headers = message.headers.unwrap_or_default();
        if !self.keys.verify_headers(MessageKind::Delivery, &self.subject, frame_fields(&headers), &message.payload) {
            return LiveCopy::WakeUp;
        }
        decode_live_frame(&headers, message.payload).map_or(LiveCopy::WakeUp, LiveCopy::Frame)
    }
}

fn decode_live_frame(headers: &HeaderMap, body: Bytes) -> Option<LiveFrame> {
    let text = |name: &str| headers.get(name).map(|value| value.as_str().to_owned());
    let number = |name: &str| headers.get(name).map(|value| value.as_str().parse()).transpose().ok();
    Some(LiveFrame {
        seq: headers.get(SEQ)?.as_str().parse().ok()?,
        delivery_id: text(MESSAGE_ID)?,
        location: text(LOCATION)?,
        traceparent: text(TRACEPARENT),
        epoch: number(EPOCH)?,
        expires_at_ms: number(EXPIRES)?,
        body: headers.get(REFERENCE).is_none().then_some(body),
    })
}

/// Headers of a frame that its code covers. The version before does not know the last two, so the code does not cover
/// those that are absent at the end.
const FRAME_FIELDS: &[&str] = &[MESSAGE_ID, SEQ, LOCATION, REFERENCE, SENDER, TRACEPARENT, EPOCH, EXPIRES];

/// Returns the headers of a frame that its code covers.
pub(crate) fn frame_fields(headers: &HeaderMap) -> HeaderFields<'_> {
    let absent = [EXPIRES, EPOCH].iter().take_while(|name| headers.get(**name).is_none()).count();
    let count = FRAME_FIELDS.len() - absent;
    HeaderFields { headers, names: &FRAME_FIELDS[..count] }
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
            if let Some(epoch) = frame.epoch {
                headers.insert(EPOCH, epoch.to_string());
            }
            if let Some(expires_at_ms) = frame.expires_at_ms {
                headers.insert(EXPIRES, expires_at_ms.to_string());
            }
            let body = frame.body.clone().unwrap_or_else(|| {
                headers.insert(REFERENCE, "postgres");
                if let Some(sender) = frame.sender {
                    headers.insert(SENDER, sender.to_string());
                }
                Bytes::new()
            });
            let subject = subjects::log_subject(frame.scope, frame.agent_id);
            let code = self.identity.keys.sign_headers(&subject, frame_fields(&headers), &body);
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

#[cfg(test)]
mod tests {
    use super::*;

    const SUBJECT: &str = "d.1.7.9";

    fn frame() -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in [(MESSAGE_ID, "del_5_9"), (SEQ, "3"), (LOCATION, "node/broker")] {
            headers.insert(name, value);
        }
        headers
    }

    #[test]
    fn a_frame_is_believed_only_as_it_was_signed() {
        let keys = FrameKeys::new([[7; 32]]);
        let mut signed = frame();
        signed.insert(MAC, keys.sign_headers(SUBJECT, frame_fields(&frame()), b"body"));
        let is_believed = |headers: &HeaderMap, subject: &str, body: &[u8]| {
            keys.verify_headers(MessageKind::Delivery, subject, frame_fields(headers), body)
        };
        assert!(is_believed(&signed, SUBJECT, b"body"));
        for name in FRAME_FIELDS {
            let mut changed = signed.clone();
            changed.insert(*name, "other");
            assert!(!is_believed(&changed, SUBJECT, b"body"), "{name}");
        }
        assert!(!is_believed(&signed, "d.1.7.8", b"body"), "another agent's");
        assert!(!is_believed(&signed, SUBJECT, b"other"));
        assert!(!is_believed(&frame(), SUBJECT, b"body"), "without a code");
        let mut of_epoch = frame();
        of_epoch.insert(EPOCH, "7");
        let code = keys.sign_headers(SUBJECT, frame_fields(&of_epoch), b"body");
        of_epoch.insert(MAC, code.as_str());
        assert!(is_believed(&of_epoch, SUBJECT, b"body"));
        assert_eq!(decode_live_frame(&of_epoch, Bytes::new()).and_then(|frame| frame.epoch), Some(7));
        let mut without_epoch = frame();
        without_epoch.insert(MAC, code);
        assert!(!is_believed(&without_epoch, SUBJECT, b"body"), "its epoch was removed");
        for names in [&[EXPIRES][..], &[EPOCH, EXPIRES]] {
            let mut expiring = frame();
            for name in names {
                expiring.insert(*name, "8");
            }
            let code = keys.sign_headers(SUBJECT, frame_fields(&expiring), b"body");
            expiring.insert(MAC, code.as_str());
            assert!(is_believed(&expiring, SUBJECT, b"body"));
            assert_eq!(decode_live_frame(&expiring, Bytes::new()).and_then(|frame| frame.expires_at_ms), Some(8));
            expiring.insert(EXPIRES, "9");
            assert!(!is_believed(&expiring, SUBJECT, b"body"), "its end was changed");
            let mut without_end = frame();
            if names.contains(&EPOCH) {
                without_end.insert(EPOCH, "8");
            }
            without_end.insert(MAC, code);
            assert!(!is_believed(&without_end, SUBJECT, b"body"), "its end was removed");
        }
    }

    #[test]
    fn a_frame_needs_its_seq_and_location_and_a_reference_has_no_body() {
        let body = Bytes::from_static(b"body");
        let decoded = decode_live_frame(&frame(), body.clone()).expect("complete");
        assert_eq!((decoded.seq, decoded.location.as_str(), decoded.body.as_ref()), (3, "node/broker", Some(&body)));
        let mut reference = frame();
        reference.insert(REFERENCE, "postgres");
        assert_eq!(decode_live_frame(&reference, body.clone()).expect("complete").body, None);
        let mut unnumbered = frame();
        unnumbered.insert(SEQ, "three");
        assert!(decode_live_frame(&unnumbered, body.clone()).is_none());
        assert!(decode_live_frame(&HeaderMap::new(), body).is_none());
    }
}
