//! Events of a workspace for its observers. Main types: [`Events`], and [`EventStream`] for one observer.
//!
//! The transaction of a change records its events (`relay_store::events`). After the commit, `announce` publishes them
//! to observers and to agents' sockets. `feed` is the receiving end: one gap-free order per workspace, repaired from
//! Postgres. `log` reads past events. A lost announcement costs latency, never an event.

mod announce;
pub(crate) mod announcement;
mod fan_out;
mod feed;
mod log;
mod stream;

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, ChannelId, WorkspaceScope,
    events::{EventSeq, kind::EventFacts},
};
use relay_store::events::Event;
use relay_stream::Stream;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

pub(crate) use announce::{message_events, run as announce};
pub(crate) use feed::{Feeds, check_feeds};
pub use log::{EventPage, MAX_EVENTS_PAGE};
pub use stream::{EventStream, StreamItem};

use crate::{channels::audiences::Audiences, core::Core};

/// Cache of frames above [`INLINE_FRAME`].
pub(crate) type LargeFrames = moka::sync::Cache<(WorkspaceScope, EventSeq), Arc<RawValue>>;

/// Bound of the cache.
const LARGE_FRAMES_BYTES: u64 = 32 * 1024 * 1024;

/// Creates the cache of large frames, bounded by their bytes.
pub(crate) fn large_frames() -> LargeFrames {
    moka::sync::Cache::builder()
        .max_capacity(LARGE_FRAMES_BYTES)
        .weigher(|_, frame: &Arc<RawValue>| u32::try_from(frame.get().len()).unwrap_or(u32::MAX))
        .build()
}

/// Larger frames are not kept in feeds for slow readers, but read when needed.
const INLINE_FRAME: usize = 16 * 1024;

#[derive(Debug, Clone)]
pub struct LogEvent {
    pub seq: EventSeq,
    pub kind: String,
    pub channel_id: Option<ChannelId>,
    pub channel_name: Option<String>,
    pub conversation_id: Option<String>,
    /// Author or subject of the event.
    pub agent_id: Option<AgentId>,
    pub created_at: DateTime<Utc>,
    /// Frame without its number: a JSON object with at least `type` and `created_at`.
    payload: Option<Arc<RawValue>>,
    /// Frame for sockets, encoded once for all observers.
    text: OnceLock<Bytes>,
}

impl LogEvent {
    /// Returns the frame without its number; `None` when it is large and was not read back.
    #[must_use]
    pub fn payload(&self) -> Option<&RawValue> {
        self.payload.as_deref()
    }

    /// Returns the properties that decide on its visibility for an observer.
    #[must_use]
    pub fn facts(&self) -> EventFacts<'_> {
        EventFacts {
            kind: &self.kind,
            channel_id: self.channel_id,
            channel_name: self.channel_name.as_deref(),
            conversation_id: self.conversation_id.as_deref(),
            agent_id: self.agent_id,
            created_at: self.created_at,
        }
    }
}

/// Event in the live stream between processes.
#[derive(Debug, Serialize, Deserialize)]
struct PublishedEvent {
    k: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    c: Option<ChannelId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    n: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    v: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    a: Option<AgentId>,
    /// Left out above [`INLINE_FRAME`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    f: Option<Box<RawValue>>,
}

/// Record in the live stream between processes.
#[derive(Debug, Serialize, Deserialize)]
struct PublishedRecord {
    at: DateTime<Utc>,
    events: Vec<PublishedEvent>,
}

impl PublishedEvent {
    fn new(event: &Event, frame: Box<RawValue>) -> Self {
        Self {
            k: event.kind.to_string(),
            c: event.channel_id,
            n: event.channel_name.clone(),
            v: event.conversation_id.clone(),
            a: event.agent_id,
            f: Some(frame).filter(|frame| frame.get().len() <= INLINE_FRAME),
        }
    }

    fn into_log_event(self, seq: EventSeq, created_at: DateTime<Utc>) -> LogEvent {
        LogEvent {
            seq,
            kind: self.k,
            channel_id: self.c,
            channel_name: self.n,
            conversation_id: self.v,
            agent_id: self.a,
            created_at,
            payload: self.f.map(Arc::from),
            text: OnceLock::new(),
        }
    }
}

impl LogEvent {
    fn new(seq: EventSeq, created_at: DateTime<Utc>, event: Event, frame: Box<RawValue>) -> Self {
        Self {
            seq,
            kind: event.kind.into_owned(),
            channel_id: event.channel_id,
            channel_name: event.channel_name,
            conversation_id: event.conversation_id,
            agent_id: event.agent_id,
            created_at,
            payload: Some(Arc::from(frame)),
            text: OnceLock::new(),
        }
    }

    /// Drops a frame that is too large to be kept for slow readers.
    fn without_large_frame(mut self) -> Self {
        self.payload = self.payload.filter(|frame| frame.get().len() <= INLINE_FRAME);
        self
    }
}

/// Handle of the event log and its live streams.
#[derive(Clone)]
pub struct Events {
    pub(crate) core: Core,
    pub(crate) stream: Stream,
    pub(crate) audiences: Arc<Audiences>,
    pub(crate) feeds: Arc<Feeds>,
    pub(crate) large_frames: LargeFrames,
}
