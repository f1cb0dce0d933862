//! Reads of the log for recovery: deliveries and events that a restored Postgres has lost.
//!
//! Replay and repair read Postgres instead.

use async_nats::jetstream::{
    self, ErrorCode,
    context::GetStreamErrorKind,
    message::StreamMessage,
    stream::{DirectGetErrorKind, Stream as JetStream},
};
use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use relay_domain::{AgentId, WorkspaceId, WorkspaceScope, mailboxes::stream::Seq};

use crate::{
    Stream, StreamError, StreamResult,
    connection::{REBUILT, STREAMS},
    events::{LAST, record_fields},
    log::{MESSAGE_ID, REFERENCE, SENDER, SEQ, frame_fields},
    mac::MessageKind,
};

/// Maximum number of concurrent reads.
const MAX_CONCURRENT_READS: usize = 256;

/// One of the engine's streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogKind {
    /// Delivery frames of all agents.
    Deliveries,
    /// Event records of all workspaces.
    Events,
}

impl LogKind {
    const fn name(self) -> &'static str {
        STREAMS[self as usize].name
    }

    const fn subjects(self) -> &'static str {
        STREAMS[self as usize].subjects
    }
}

/// Contents of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogState {
    /// Creation time, in unix milliseconds.
    pub created_at_ms: i64,
    /// Position of the oldest message.
    pub first: u64,
    /// Time at which the oldest message was stored, in unix milliseconds.
    pub first_at_ms: i64,
    /// Position of the newest message.
    pub last: u64,
    /// Time at which the newest message was stored, in unix milliseconds.
    pub last_at_ms: i64,
}

/// Delivery read from the log.
#[derive(Debug, Clone)]
pub struct LoggedFrame {
    /// Workspace of the recipient.
    pub scope: WorkspaceScope,
    /// Id of the recipient.
    pub agent_id: AgentId,
    /// Position in the mailbox.
    pub seq: Seq,
    /// Id of the delivery.
    pub delivery_id: String,
    /// Time at which it was stored, in unix milliseconds.
    pub stored_at_ms: i64,
    /// The frame; `None` for a reference.
    pub body: Option<Bytes>,
    /// Id of the sender, if this is a reference.
    pub sender: Option<AgentId>,
}

/// Messages of a stream that processes of this installation have published.
#[derive(Debug, Clone)]
pub struct VerifiedPage<T> {
    /// Decoded messages, in no particular order.
    pub verified: Vec<T>,
    /// Number of messages without a valid code or that cannot be decoded, which prove nothing.
    pub unverified: usize,
}

impl Stream {
    /// Returns the contents of a stream, or `None` when it does not exist.
    ///
    /// # Errors
    /// If JetStream is unavailable.
    pub async fn log_state(&self, kind: LogKind) -> StreamResult<Option<LogState>> {
        let Some(stream) = self.find_kind(kind).await? else { return Ok(None) };
        let info = stream.cached_info();
        Ok(Some(LogState {
            created_at_ms: millis(info.created.unix_timestamp_nanos()),
            first: info.state.first_sequence,
            first_at_ms: millis(info.state.first_timestamp.unix_timestamp_nanos()),
            last: info.state.last_sequence,
            last_at_ms: millis(info.state.last_timestamp.unix_timestamp_nanos()),
        }))
    }

    /// Returns the first position that was stored at `at_ms` or later, or the position after the last one.
    ///
    /// # Errors
    /// If JetStream is unavailable.
    pub async fn position_at(&self, kind: LogKind, state: &LogState, at_ms: i64) -> StreamResult<u64> {
        let Some(stream) = self.find_kind(kind).await?.filter(|_| state.last > 0) else { return Ok(state.last + 1) };
        let (mut low, mut high) = (state.first, state.last + 1);
        while low < high {
            let middle = low + (high - low) / 2;
            // Positions may be empty after a workspace was erased.
            let next = stream.direct_get_next_for_subject(kind.subjects(), Some(middle)).await;
            match next {
                Ok(message) if millis(message.time.unix_timestamp_nanos()) < at_ms => low = message.sequence + 1,
                Ok(_) => high = middle,
                // No message from here to the end.
                Err(error) if error.kind() == DirectGetErrorKind::NotFound => high = middle,
                Err(error) => return Err(StreamError::from_nats("looking for a time in the log")(error)),
            }
        }
        Ok(low)
    }

    /// Returns whether the message at a position is the one that was stored at `at_ms`. A server that lost the end of
    /// its log in a crash assigns the positions again.
    ///
    /// # Errors
    /// If JetStream is unavailable.
    pub async fn is_stored_at(&self, kind: LogKind, position: u64, at_ms: i64) -> StreamResult<bool> {
        let found = self.read_messages(kind, position, position).await?;
        Ok(found.iter().any(|message| millis(message.time.unix_timestamp_nanos()) == at_ms))
    }

    /// Reads the deliveries between two positions.
    ///
    /// # Errors
    /// If JetStream is unavailable.
    pub async fn read_frames(&self, from: u64, to: u64) -> StreamResult<VerifiedPage<LoggedFrame>> {
        let read = self.read_messages(LogKind::Deliveries, from, to).await?;
        Ok(decode_page(read, |message| self.decode_logged_frame(message)))
    }

    /// Reads the workspace and the last number of the event records between two positions.
    ///
    /// # Errors
    /// If JetStream is unavailable.
    pub async fn read_event_marks(&self, from: u64, to: u64) -> StreamResult<VerifiedPage<(WorkspaceScope, i64)>> {
        let read = self.read_messages(LogKind::Events, from, to).await?;
        Ok(decode_page(read, |message| {
            let (subject, headers) = (message.subject.as_str(), &message.headers);
            if !self.identity.keys.verify_headers(
                MessageKind::Logged,
                subject,
                record_fields(headers),
                &message.payload,
            ) {
                return None;
            }
            let workspace: WorkspaceId = subject.split('.').nth(2)?.parse().ok()?;
            let last = headers.get(LAST)?.as_str().parse().ok()?;
            Some((WorkspaceScope::from_engine_row(workspace), last))
        }))
    }

    fn decode_logged_frame(&self, message: StreamMessage) -> Option<LoggedFrame> {
        let headers = &message.headers;
        if !self.identity.keys.verify_headers(
            MessageKind::Logged,
            &message.subject,
            frame_fields(headers),
            &message.payload,
        ) {
            return None;
        }
        let mut subject = message.subject.split('.').skip(2);
        let workspace: WorkspaceId = subject.next()?.parse().ok()?;
        let agent_id = subject.next()?.parse().ok()?;
        let header = |name: &str| headers.get(name).map(|value| value.as_str().to_owned());
        Some(LoggedFrame {
            scope: WorkspaceScope::from_engine_row(workspace),
            agent_id,
            seq: header(SEQ)?.parse().ok()?,
            delivery_id: header(MESSAGE_ID)?,
            stored_at_ms: millis(message.time.unix_timestamp_nanos()),
            sender: header(SENDER).and_then(|id| id.parse().ok()),
            body: headers.get(REFERENCE).is_none().then_some(message.payload),
        })
    }

    /// Returns whether [`Self::mark_rebuilt`] was called since the stream was created.
    ///
    /// # Errors
    /// If JetStream is unavailable.
    pub async fn is_rebuilt(&self) -> StreamResult<bool> {
        let stream = self.find_kind(LogKind::Deliveries).await?;
        Ok(stream.is_some_and(|stream| stream.cached_info().config.metadata.contains_key(REBUILT)))
    }

    /// Marks the delivery stream as holding everything that Postgres has. The mark is lost with the stream.
    ///
    /// # Errors
    /// If JetStream is unavailable.
    pub async fn mark_rebuilt(&self) -> StreamResult<()> {
        let doing = "marking the log as rebuilt";
        let Some(stream) = self.find_kind(LogKind::Deliveries).await? else { return Ok(()) };
        // An update replaces the whole configuration, so the rest is sent as it is.
        let mut config = stream.cached_info().config.clone();
        config.metadata.insert(REBUILT.to_owned(), "yes".to_owned());
        self.jetstream.update_stream(config).await.map(drop).map_err(StreamError::from_nats(doing))
    }

    async fn read_messages(&self, kind: LogKind, from: u64, to: u64) -> StreamResult<Vec<StreamMessage>> {
        let Some(stream) = self.find_kind(kind).await? else { return Ok(Vec::new()) };
        let stream = &stream;
        let read = futures::stream::iter(from..=to).map(|place| async move {
            match stream.direct_get(place).await {
                Ok(message) => Ok(Some(message)),
                // Dropped by age or size, or purged with a workspace.
                Err(error) if error.kind() == DirectGetErrorKind::NotFound => Ok(None),
                Err(error) => Err(StreamError::from_nats("reading the log back")(error)),
            }
        });
        read.buffer_unordered(MAX_CONCURRENT_READS).try_filter_map(|found| async move { Ok(found) }).try_collect().await
    }

    async fn find_kind(&self, kind: LogKind) -> StreamResult<Option<JetStream>> {
        find_stream(&self.jetstream, kind.name()).await
    }
}

/// Returns a stream by name, or `None` when JetStream reports that it does not exist.
pub(crate) async fn find_stream(context: &jetstream::Context, name: &str) -> StreamResult<Option<JetStream>> {
    match context.get_stream(name).await {
        Ok(stream) => Ok(Some(stream)),
        Err(error) => {
            if let GetStreamErrorKind::JetStream(cause) = error.kind()
                && cause.error_code() == ErrorCode::STREAM_NOT_FOUND
            {
                return Ok(None);
            }
            Err(StreamError::from_nats("looking at a stream")(error))
        }
    }
}

fn decode_page<T>(read: Vec<StreamMessage>, decode: impl Fn(StreamMessage) -> Option<T>) -> VerifiedPage<T> {
    let total = read.len();
    let verified: Vec<T> = read.into_iter().filter_map(decode).collect();
    VerifiedPage { unverified: total - verified.len(), verified }
}

fn millis(nanos: i128) -> i64 {
    i64::try_from(nanos / 1_000_000).unwrap_or(i64::MAX)
}
