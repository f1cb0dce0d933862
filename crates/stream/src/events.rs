//! Event records: publishing them to JetStream, which republishes them for live tails.
//!
//! Observers detect lost and reordered records by their numbers and read the missing events from Postgres.

use std::future::IntoFuture as _;

use async_nats::{HeaderMap, Message, Subscriber};
use bytes::Bytes;
use futures::StreamExt as _;
use relay_domain::WorkspaceScope;

use crate::{
    FrameKeys, Stream, StreamError, StreamResult,
    mac::{Covered, MAC, MessageKind},
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
    pub first_seq: i64,
    /// Number of the last event.
    pub last_seq: i64,
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
        let headers = message.headers.unwrap_or_default();
        if !verify_record(&self.keys, MessageKind::Event, &self.subject, &headers, &message.payload) {
            return None;
        }
        let number = |name: &str| headers.get(name)?.as_str().parse().ok();
        Some(EventRecord { first_seq: number(FIRST)?, last_seq: number(LAST)?, body: message.payload })
    }
}

/// Headers of a record that its code covers.
const COVERED: [&str; 3] = [MESSAGE_ID, FIRST, LAST];

fn covered_fields(headers: &HeaderMap) -> [&str; COVERED.len()] {
    COVERED.map(|name| headers.get(name).map_or("", |value| value.as_str()))
}

/// Returns whether a process of this installation has published this record on `subject`.
pub(crate) fn verify_record(
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
        let covered = Covered { subject: &subject, fields: &covered_fields(&headers), body: &body };
        let code = self.identity.keys.sign(&covered);
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
