//! Event records: publishing them to JetStream, which republishes them for live tails.
//!
//! Observers detect lost and reordered records by their numbers and read the missing events from Postgres.

use std::future::IntoFuture as _;

use async_nats::{HeaderMap, Message, Subscriber};
use bytes::Bytes;
use futures::StreamExt as _;
use relay_domain::{WorkspaceScope, events::EventSeq};

use crate::{
    FrameKeys, Stream, StreamError, StreamResult,
    mac::{HeaderFields, MAC, MessageKind},
    subjects,
};

/// Maximum size of an inline record, in bytes. Larger records are references, and observers read the events from
/// Postgres.
pub const EVENT_RECORD_LIMIT: usize = 512 * 1024;

const MESSAGE_ID: &str = "Nats-Msg-Id";
const FIRST: &str = "Relay-First-Seq";
pub(crate) const LAST: &str = "Relay-Last-Seq";

/// Consecutive events of one workspace.
#[derive(Debug, Clone)]
pub struct EventRecord {
    /// Number of the first event.
    pub first_seq: EventSeq,
    /// Number of the last event.
    pub last_seq: EventSeq,
    /// Events as encoded by the engine; empty for a reference.
    pub body: Bytes,
}

/// Message of a live tail of events.
#[derive(Debug, Clone)]
pub enum EventCopy {
    /// Record that a process of this installation has published.
    Record(EventRecord),
    /// Unverified message: the workspace may have new events.
    WakeUp,
}

/// Live tail of one workspace's event records.
pub struct EventTail {
    subscriber: Subscriber,
    /// Subject of the workspace's events, which the codes of its records cover.
    subject: String,
    keys: FrameKeys,
}

impl EventTail {
    /// Returns the next message, or `None` once the client is closed.
    pub async fn next(&mut self) -> Option<EventCopy> {
        let message = self.subscriber.next().await?;
        Some(self.decode(message).map_or(EventCopy::WakeUp, EventCopy::Record))
    }

    fn decode(&self, message: Message) -> Option<EventRecord> {
        // Without headers, which carry its code, a message does not verify.
        let headers = message.headers.unwrap_or_default();
        if !self.keys.verify_headers(MessageKind::Event, &self.subject, record_fields(&headers), &message.payload) {
            return None;
        }
        let number = |name: &str| headers.get(name)?.as_str().parse().ok();
        Some(EventRecord { first_seq: number(FIRST)?, last_seq: number(LAST)?, body: message.payload })
    }
}

/// Returns the headers of a record that its code covers.
pub(crate) const fn record_fields(headers: &HeaderMap) -> HeaderFields<'_> {
    HeaderFields { headers, names: &[MESSAGE_ID, FIRST, LAST] }
}

impl Stream {
    /// Publishes a record and returns a future that completes when JetStream has stored it. Records above
    /// [`EVENT_RECORD_LIMIT`] are published as references.
    ///
    /// # Errors
    /// If the client is closed or JetStream rejects the record. Observers then read the events from Postgres.
    pub async fn publish_events(
        &self,
        scope: WorkspaceScope,
        record: EventRecord,
    ) -> StreamResult<impl Future<Output = StreamResult<()>> + Send + 'static> {
        let doing = "publishing events";
        let mut headers = HeaderMap::new();
        headers.insert(MESSAGE_ID, format!("{}-{}", scope.workspace_id(), record.first_seq));
        headers.insert(FIRST, record.first_seq.to_string());
        headers.insert(LAST, record.last_seq.to_string());
        let body = if record.body.len() > EVENT_RECORD_LIMIT { Bytes::new() } else { record.body };
        let subject = subjects::event_subject(scope);
        let code = self.identity.keys.sign_headers(&subject, record_fields(&headers), &body);
        headers.insert(MAC, code);
        let ack =
            self.jetstream.publish_with_headers(subject, headers, body).await.map_err(StreamError::from_nats(doing))?;
        Ok(async move { ack.into_future().await.map(drop).map_err(StreamError::from_nats(doing)) })
    }

    /// Subscribes to a workspace's new records.
    ///
    /// # Errors
    /// If the client is closed.
    pub async fn tail_events(&self, scope: WorkspaceScope) -> StreamResult<EventTail> {
        let subject = subjects::live_event_subject(scope);
        let subscriber = self.client.subscribe(subject).await.map_err(StreamError::from_nats("tailing events"))?;
        Ok(EventTail { subscriber, subject: subjects::event_subject(scope), keys: self.identity.keys.clone() })
    }
}
