//! Per-agent log: publishing committed deliveries, which recovery reads back.

use std::future::IntoFuture;

use async_nats::{HeaderMap, jetstream::context::PublishAckFuture};
use bytes::Bytes;
use futures::{StreamExt as _, stream::FuturesUnordered};
use relay_domain::{AgentId, GatewayId, WorkspaceScope, mailboxes::stream::Seq};

use crate::{
    Stream, StreamError, StreamResult,
    mac::{HeaderFields, MAC},
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
    /// Gateways with the recipient's sockets at commit, to which its live copy is sent.
    pub gateways: Vec<GatewayId>,
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
            // The others are not waited for: the batch stays unmarked, and is published again as a whole.
            ack.map_err(StreamError::from_nats("storing a delivery in the log"))?;
        }
        Ok(())
    }
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
            // Last, because it covers the other headers.
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FrameKeys, mac::MessageKind};

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
            keys.verify_headers(MessageKind::Logged, subject, frame_fields(headers), body)
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
}
