//! Records of the event log on their way to those who watch: stored by JetStream, republished live.
//!
//! What gets lost or reordered here is noticed by its numbers and read from Postgres.

use std::future::IntoFuture as _;

use async_nats::{HeaderMap, Subscriber};
use bytes::Bytes;
use futures::StreamExt as _;
use relay_domain::WorkspaceScope;

use crate::{Stream, StreamError, StreamResult, subjects};

/// Records above this size travel as a reference: watchers read them from Postgres.
pub const EVENT_RECORD_LIMIT: usize = 512 * 1024;

const MESSAGE_ID: &str = "Nats-Msg-Id";
const FIRST: &str = "Relay-First-Seq";
pub(crate) const LAST: &str = "Relay-Last-Seq";

/// A record of events of one workspace.
#[derive(Debug, Clone)]
pub struct EventRecord {
    /// The number of its first event.
    pub first_seq: i64,
    /// The number of its last event.
    pub last_seq: i64,
    /// The events as the engine encodes them; empty when they are to be read from Postgres.
    pub body: Bytes,
}

/// A workspace's records from now on.
pub struct EventTail {
    subscriber: Subscriber,
}

impl EventTail {
    /// The next record; `None` once the client has been closed.
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
    /// Publishes a record; the answer tells when JetStream has it. Above [`EVENT_RECORD_LIMIT`] only its
    /// numbers travel.
    ///
    /// # Errors
    /// When the client has been closed, or JetStream did not take it: watchers find it in Postgres.
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

    /// Tails a workspace's records from now on.
    ///
    /// # Errors
    /// When the client has been closed.
    pub async fn tail_events(&self, scope: WorkspaceScope) -> StreamResult<EventTail> {
        let subject = subjects::live_event_subject(scope);
        let subscriber = self.client.subscribe(subject).await.map_err(StreamError::from_nats("tailing events"))?;
        Ok(EventTail { subscriber })
    }
}
