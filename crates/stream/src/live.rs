//! Live copies: committed deliveries on their way to the gateways with their recipients' sockets.
//!
//! A gateway that has committed a batch sends each gateway, itself included, one message with the deliveries that are
//! for its sockets. A copy may be lost, late or for a socket that is elsewhere by now: its receiver compares the seq,
//! and reads Postgres.

use std::{borrow::Cow, collections::BTreeMap};

use async_nats::{HeaderMap, Message, Subscriber};
use bytes::Bytes;
use futures::StreamExt as _;
use relay_domain::{AgentId, GatewayId, WorkspaceId, WorkspaceScope, mailboxes::stream::Seq};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::{
    FrameKeys, LogFrame, Stream, StreamError, StreamResult,
    mac::{CoveredParts, MAC, MessageKind},
    subjects,
};

/// Bytes of frames from which on the next copy begins another message. A gateway that is busy has up to 1024 messages
/// waiting.
const MESSAGE_BYTES: usize = 64 * 1024;

/// Approximate size of a copy without its frame and location.
const COPY_BYTES: usize = 256;

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
    /// Recovery epoch of the delivery.
    pub epoch: Option<i64>,
    /// Time at which the delivery expires, in milliseconds of Unix time; `None` if it had more than a minute left.
    pub expires_at_ms: Option<i64>,
}

/// Content of a message for one mailbox.
#[derive(Debug, Clone)]
pub enum LiveCopy {
    /// Delivery that a process of this installation has committed.
    Frame(LiveFrame),
    /// From an unverified message: the mailbox may have changed.
    WakeUp,
}

/// Message on the subject of a gateway.
#[derive(Debug, Serialize, Deserialize)]
struct Copies<'a> {
    #[serde(borrow)]
    copies: Vec<EncodedCopy<'a>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct EncodedCopy<'a> {
    workspace: WorkspaceId,
    agent: AgentId,
    seq: Seq,
    #[serde(borrow)]
    id: Cow<'a, str>,
    #[serde(borrow)]
    location: Cow<'a, str>,
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    traceparent: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    epoch: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at_ms: Option<i64>,
    /// Absent in a reference.
    #[serde(borrow, skip_serializing_if = "Option::is_none")]
    frame: Option<&'a RawValue>,
}

impl<'a> EncodedCopy<'a> {
    fn new(frame: &'a LogFrame) -> Self {
        Self {
            workspace: frame.scope.workspace_id(),
            agent: frame.agent_id,
            seq: frame.seq,
            id: Cow::Borrowed(&frame.delivery_id),
            location: Cow::Borrowed(&frame.location),
            traceparent: frame.traceparent.as_deref().map(Cow::Borrowed),
            epoch: frame.epoch,
            expires_at_ms: frame.expires_at_ms,
            // A body that is no JSON becomes a reference, which the receiver reads from Postgres.
            frame: frame.body.as_deref().and_then(|body| serde_json::from_slice(body).ok()),
        }
    }

    fn into_copy(self, is_verified: bool) -> (WorkspaceScope, AgentId, LiveCopy) {
        let scope = WorkspaceScope::from_engine_row(self.workspace);
        if !is_verified {
            return (scope, self.agent, LiveCopy::WakeUp);
        }
        let frame = LiveFrame {
            seq: self.seq,
            delivery_id: self.id.into_owned(),
            location: self.location.into_owned(),
            // A copy: a slice would keep the whole message in memory while one frame waits on a connection.
            body: self.frame.map(|frame| Bytes::copy_from_slice(frame.get().as_bytes())),
            traceparent: self.traceparent.map(Cow::into_owned),
            epoch: self.epoch,
            expires_at_ms: self.expires_at_ms,
        };
        (scope, self.agent, LiveCopy::Frame(frame))
    }
}

/// Groups frames by gateway, in their order, into messages of about [`MESSAGE_BYTES`].
fn messages<'a>(frames: impl IntoIterator<Item = &'a LogFrame>) -> Vec<(GatewayId, Copies<'a>)> {
    let mut full = Vec::new();
    let mut open: BTreeMap<GatewayId, (usize, Vec<EncodedCopy<'a>>)> = BTreeMap::new();
    for frame in frames {
        for gateway in frame.gateways.iter().copied() {
            let (bytes, copies) = open.entry(gateway).or_default();
            *bytes += COPY_BYTES + frame.location.len() + frame.body.as_ref().map_or(0, Bytes::len);
            copies.push(EncodedCopy::new(frame));
            if *bytes >= MESSAGE_BYTES {
                *bytes = 0;
                full.push((gateway, Copies { copies: std::mem::take(copies) }));
            }
        }
    }
    let rest = open.into_iter().filter(|(_, (_, copies))| !copies.is_empty());
    full.extend(rest.map(|(gateway, (_, copies))| (gateway, Copies { copies })));
    full
}

/// Live copies for one gateway.
#[derive(Debug)]
pub struct LiveCopies {
    subscriber: Subscriber,
    subject: String,
    keys: FrameKeys,
}

impl LiveCopies {
    /// Returns the copies of the next message, or `None` once the client is closed. A message that cannot be read has
    /// none.
    pub async fn next(&mut self) -> Option<Vec<(WorkspaceScope, AgentId, LiveCopy)>> {
        let message = self.subscriber.next().await?;
        Some(decode(&message, &self.subject, &self.keys))
    }
}

fn decode(message: &Message, subject: &str, keys: &FrameKeys) -> Vec<(WorkspaceScope, AgentId, LiveCopy)> {
    let code = message.headers.as_ref().and_then(|headers| headers.get(MAC)).map(|value| value.as_str());
    let covered = CoveredParts { subject, fields: &[], body: &message.payload };
    let is_verified = keys.verify(MessageKind::Delivery, code, &covered);
    match serde_json::from_slice::<Copies<'_>>(&message.payload) {
        Ok(Copies { copies }) => copies.into_iter().map(|copy| copy.into_copy(is_verified)).collect(),
        Err(error) => {
            tracing::debug!(%error, "skipped live copies that cannot be read");
            Vec::new()
        }
    }
}

impl Stream {
    /// Sends the gateways of the recipients their copies of these frames, in order.
    ///
    /// # Errors
    /// If the client is closed.
    pub async fn send_copies(&self, frames: &[LogFrame]) -> StreamResult<()> {
        let mut outcome = Ok(());
        for (gateway, copies) in messages(frames) {
            let Ok(payload) = serde_json::to_vec(&copies) else { continue };
            let subject = subjects::live_subject(gateway);
            let mut headers = HeaderMap::new();
            let covered = CoveredParts { subject: &subject, fields: &[], body: &payload };
            headers.insert(MAC, self.identity.keys.sign(&covered));
            let sent = self.client.publish_with_headers(subject, headers, payload.into()).await;
            // The other gateways get their copies all the same.
            outcome = outcome.and(sent.map_err(StreamError::from_nats("sending live copies")));
        }
        outcome
    }

    /// Subscribes to the live copies for a gateway.
    ///
    /// # Errors
    /// If the client is closed.
    pub async fn subscribe_copies(&self, gateway: GatewayId) -> StreamResult<LiveCopies> {
        let subject = subjects::live_subject(gateway);
        let subscriber = self.client.subscribe(subject.clone()).await;
        let subscriber = subscriber.map_err(StreamError::from_nats("subscribing to live copies"))?;
        Ok(LiveCopies { subscriber, subject, keys: self.identity.keys.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(agent: i64, gateways: &[i64], bytes: usize) -> LogFrame {
        LogFrame {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(7)),
            agent_id: AgentId::new(agent),
            seq: agent * 10,
            delivery_id: format!("dlv_1_{agent}"),
            location: "n/p".to_owned(),
            gateways: gateways.iter().copied().map(GatewayId::new).collect(),
            body: Some(format!(r#"{{"text":"{}"}}"#, "a".repeat(bytes)).into()),
            sender: None,
            traceparent: None,
            epoch: Some(3),
            expires_at_ms: None,
        }
    }

    #[test]
    fn copies_are_grouped_by_gateway_in_order_and_large_ones_are_split() {
        let half = MESSAGE_BYTES / 2;
        let frames =
            [frame(1, &[5], half), frame(2, &[6], 9), frame(3, &[], 9), frame(4, &[5, 7], half), frame(5, &[5], 9)];
        let shown: Vec<_> = messages(&frames)
            .into_iter()
            .map(|(gateway, copies)| {
                (gateway.get(), copies.copies.iter().map(|copy| copy.agent.get()).collect::<Vec<_>>())
            })
            .collect();
        assert_eq!(shown, [(5, vec![1, 4]), (5, vec![5]), (6, vec![2]), (7, vec![4])]);
    }

    #[test]
    fn a_message_is_believed_only_as_it_was_signed_for_its_gateway() {
        let keys = FrameKeys::new([[7; 32]]);
        let (sent, subject) = (frame(1, &[5], 3), subjects::live_subject(GatewayId::new(5)));
        let payload = serde_json::to_vec(&Copies { copies: vec![EncodedCopy::new(&sent)] }).unwrap();
        let code = keys.sign(&CoveredParts { subject: &subject, fields: &[], body: &payload });
        let received = |payload: &[u8], subject: &str, code: Option<&str>| {
            let headers = code.map(|code| {
                let mut headers = HeaderMap::new();
                headers.insert(MAC, code);
                headers
            });
            let message = Message {
                subject: subject.into(),
                reply: None,
                payload: payload.to_vec().into(),
                headers,
                status: None,
                description: None,
                length: 0,
            };
            decode(&message, subject, &keys)
        };
        let copies = received(&payload, &subject, Some(&code));
        let [(scope, agent, LiveCopy::Frame(copy))] = &copies[..] else { panic!("{copies:?}") };
        assert_eq!((*scope, *agent, copy.seq, copy.epoch), (sent.scope, sent.agent_id, 10, Some(3)));
        assert_eq!((&copy.body, copy.location.as_str(), &copy.delivery_id), (&sent.body, "n/p", &sent.delivery_id));
        let changed = String::from_utf8(payload.clone()).unwrap().replace(r#""seq":10"#, r#""seq":11"#);
        let other = subjects::live_subject(GatewayId::new(6));
        for copies in [
            received(changed.as_bytes(), &subject, Some(&code)),
            received(&payload, &other, Some(&code)),
            received(&payload, &subject, Some("")),
            received(&payload, &subject, None),
        ] {
            assert!(matches!(copies[..], [(_, agent, LiveCopy::WakeUp)] if agent == sent.agent_id), "{copies:?}");
        }
        assert!(received(b"{}", &subject, Some(&code)).is_empty());
    }
}
