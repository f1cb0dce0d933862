//! Event records: publishing them to JetStream, which republishes them for live tails.
//!
//! Observers detect lost and reordered records by their numbers and read the missing events from Postgres.

use std::future::IntoFuture as _;

use async_nats::{HeaderMap, Subscriber};
use bytes::Bytes;
use futures::StreamExt as _;
use relay_domain::WorkspaceScope;

use crate::{Stream, StreamError, StreamResult, subjects};

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

/// Live tail of one workspace's event records.
pub struct EventTail {
    subscriber: Subscriber,
}

impl EventTail {
    /// Returns the next record, or `None` once the client is closed.
    pub async fn next(&mut self) -> Option<EventRecord> {
        loop {
            let message = self.subscriber.next().await?;
            let number = |name: &str| message.headers.as_ref()?.get(name)?.as_str().parse().ok();
            if let (Some(first_seq), Some(last_seq)) = (number(FIRST), number(LAST)) {
                return Some(EventRecord { first_seq, last_seq, body: message.payload });
            }
        }
    }
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
        let ack = self
            .jetstream
            .publish_with_headers(subjects::event_subject(scope), headers, body)
            .await
            .map_err(StreamError::from_nats(doing))?;
        Ok(async move { ack.into_future().await.map(drop).map_err(StreamError::from_nats(doing)) })
    }

    /// Subscribes to a workspace's new records.
    ///
    /// # Errors
    /// If the client is closed.
    pub async fn tail_events(&self, scope: WorkspaceScope) -> StreamResult<EventTail> {
        let subject = subjects::live_event_subject(scope);
        let subscriber = self.client.subscribe(subject).await.map_err(StreamError::from_nats("tailing events"))?;
        Ok(EventTail { subscriber })
    }
}
