//! Reading the log back: what it still holds of deliveries and events that a restored Postgres has lost.
//!
//! Only recovery comes here. Replay and repair read Postgres.

use async_nats::jetstream::{
    self, ErrorCode,
    context::GetStreamErrorKind,
    stream::{DirectGetErrorKind, Stream as JetStream},
};
use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use relay_domain::{AgentId, WorkspaceId, WorkspaceScope, session::Seq};

use crate::{
    Stream, StreamError, StreamResult,
    connection::{REBUILT, STREAMS},
    events::LAST,
    log::{MESSAGE_ID, REFERENCE, SENDER, SEQ},
};

/// Reads that are under way at once.
const IN_FLIGHT: usize = 256;

/// One of the engine's streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogKind {
    /// Deliveries.
    Deliveries,
    /// Events.
    Events,
}

impl LogKind {
    const fn name(self) -> &'static str {
        STREAMS[self as usize].0
    }

    const fn subjects(self) -> &'static str {
        STREAMS[self as usize].1
    }
}

/// What a stream holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogState {
    /// When it was made, in unix milliseconds.
    pub created_at_ms: i64,
    /// The oldest place that it still holds.
    pub first: u64,
    /// When that was stored, in unix milliseconds.
    pub first_at_ms: i64,
    /// The newest place.
    pub last: u64,
}

/// A delivery as the log holds it.
#[derive(Debug, Clone)]
pub struct LoggedFrame {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The recipient.
    pub agent_id: AgentId,
    /// Its place in the mailbox.
    pub seq: Seq,
    /// Its id.
    pub delivery_id: String,
    /// When it was stored, in unix milliseconds.
    pub stored_at_ms: i64,
    /// The frame; none when it was too large for the log.
    pub body: Option<Bytes>,
    /// Who sent it, where the frame does not tell.
    pub sender: Option<AgentId>,
}

impl Stream {
    /// What a stream holds; `None` when there is no such stream.
    ///
    /// # Errors
    /// When JetStream does not answer.
    pub async fn log_state(&self, kind: LogKind) -> StreamResult<Option<LogState>> {
        let Some(stream) = self.find(kind).await? else { return Ok(None) };
        let info = stream.cached_info();
        Ok(Some(LogState {
            created_at_ms: millis(info.created.unix_timestamp_nanos()),
            first: info.state.first_sequence,
            first_at_ms: millis(info.state.first_timestamp.unix_timestamp_nanos()),
            last: info.state.last_sequence,
        }))
    }

    /// The first place whose message was stored at `at_ms` or later; behind the last one if there is none.
    ///
    /// # Errors
    /// When JetStream does not answer.
    pub async fn place_of(&self, kind: LogKind, state: &LogState, at_ms: i64) -> StreamResult<u64> {
        let Some(stream) = self.find(kind).await?.filter(|_| state.last > 0) else { return Ok(state.last + 1) };
        let (mut low, mut high) = (state.first, state.last + 1);
        while low < high {
            let middle = low + (high - low) / 2;
            // Places may be empty: a workspace was erased.
            let next = stream.direct_get_next_for_subject(kind.subjects(), Some(middle)).await;
            match next {
                Ok(message) if millis(message.time.unix_timestamp_nanos()) < at_ms => low = message.sequence + 1,
                Ok(_) => high = middle,
                Err(error) if error.kind() == DirectGetErrorKind::NotFound => high = middle,
                Err(error) => return Err(StreamError::from_nats("looking for a time in the log")(error)),
            }
        }
        Ok(low)
    }

    /// The deliveries from one place to another, in no particular order. What cannot be read as one is left out.
    ///
    /// # Errors
    /// When JetStream does not answer.
    pub async fn logged(&self, from: u64, to: u64) -> StreamResult<Vec<LoggedFrame>> {
        let read = self.messages(LogKind::Deliveries, from, to).await?;
        Ok(read.into_iter().filter_map(frame).collect())
    }

    /// The workspaces and last numbers of the event records from one place to another, in no particular order.
    ///
    /// # Errors
    /// When JetStream does not answer.
    pub async fn logged_events(&self, from: u64, to: u64) -> StreamResult<Vec<(WorkspaceScope, i64)>> {
        let read = self.messages(LogKind::Events, from, to).await?;
        let marks = read.into_iter().filter_map(|message| {
            let workspace: WorkspaceId = message.subject.split('.').nth(2)?.parse().ok()?;
            let last = message.headers.get(LAST)?.as_str().parse().ok()?;
            Some((WorkspaceScope::from_engine_row(workspace), last))
        });
        Ok(marks.collect())
    }

    /// Whether [`Self::mark_rebuilt`] was called since the log was made.
    ///
    /// # Errors
    /// When JetStream does not answer.
    pub async fn is_rebuilt(&self) -> StreamResult<bool> {
        let stream = self.find(LogKind::Deliveries).await?;
        Ok(stream.is_some_and(|stream| stream.cached_info().config.metadata.contains_key(REBUILT)))
    }

    /// Says that the log holds what Postgres has to give, until it is lost again.
    ///
    /// # Errors
    /// When JetStream does not answer.
    pub async fn mark_rebuilt(&self) -> StreamResult<()> {
        let doing = "marking the log as rebuilt";
        let Some(stream) = self.find(LogKind::Deliveries).await? else { return Ok(()) };
        let mut config = stream.cached_info().config.clone();
        config.metadata.insert(REBUILT.to_owned(), "yes".to_owned());
        self.jetstream.update_stream(config).await.map(drop).map_err(StreamError::from_nats(doing))
    }

    async fn messages(
        &self,
        kind: LogKind,
        from: u64,
        to: u64,
    ) -> StreamResult<Vec<jetstream::message::StreamMessage>> {
        let Some(stream) = self.find(kind).await? else { return Ok(Vec::new()) };
        let stream = &stream;
        let read = futures::stream::iter(from..=to).map(|place| async move {
            match stream.direct_get(place).await {
                Ok(message) => Ok(Some(message)),
                Err(error) if error.kind() == DirectGetErrorKind::NotFound => Ok(None),
                Err(error) => Err(StreamError::from_nats("reading the log back")(error)),
            }
        });
        read.buffer_unordered(IN_FLIGHT).try_filter_map(|found| async move { Ok(found) }).try_collect().await
    }

    async fn find(&self, kind: LogKind) -> StreamResult<Option<JetStream>> {
        find(&self.jetstream, kind.name()).await
    }
}

/// A stream by its name; `None` when JetStream says that there is none.
pub(crate) async fn find(context: &jetstream::Context, name: &str) -> StreamResult<Option<JetStream>> {
    match context.get_stream(name).await {
        Ok(stream) => Ok(Some(stream)),
        Err(error) => match error.kind() {
            GetStreamErrorKind::JetStream(cause) if cause.error_code() == ErrorCode::STREAM_NOT_FOUND => Ok(None),
            _ => Err(StreamError::from_nats("looking at a stream")(error)),
        },
    }
}

fn frame(message: jetstream::message::StreamMessage) -> Option<LoggedFrame> {
    let mut subject = message.subject.split('.').skip(2);
    let workspace: WorkspaceId = subject.next()?.parse().ok()?;
    let agent_id = subject.next()?.parse().ok()?;
    let header = |name: &str| message.headers.get(name).map(|value| value.as_str().to_owned());
    Some(LoggedFrame {
        scope: WorkspaceScope::from_engine_row(workspace),
        agent_id,
        seq: header(SEQ)?.parse().ok()?,
        delivery_id: header(MESSAGE_ID)?,
        stored_at_ms: millis(message.time.unix_timestamp_nanos()),
        sender: header(SENDER).and_then(|id| id.parse().ok()),
        body: header(REFERENCE).is_none().then_some(message.payload),
    })
}

fn millis(nanos: i128) -> i64 {
    i64::try_from(nanos / 1_000_000).unwrap_or(i64::MAX)
}
