//! What happens in a workspace, told to whoever observes it.
//!
//! The transaction that does something records it (`relay_store::events`). Here it is announced after the
//! commit: `announce` publishes it to observers and tells agents' sockets. `feed` is the other end: one
//! gap-free order per workspace, repaired from Postgres. `log` reads what has been. A lost announcement
//! costs latency, never an event.

mod announce;
mod fan_out;
mod feed;
mod frame;
mod log;
mod stream;

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use chrono::{DateTime, Utc};
use relay_domain::{AgentId, ChannelId, WorkspaceScope, event::EventFacts};
use relay_store::events::NewEvent;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

pub(crate) use announce::{Announcer, run as announce, told};
pub(crate) use feed::{Feeds, check as check_feeds};
pub use log::{EventPage, MAX_EVENTS_PAGE};
pub use stream::{EventStream, Observed};

/// Frames above [`INLINE_FRAME`] that were read lately.
pub(crate) type LargeFrames = moka::sync::Cache<(WorkspaceScope, i64), Arc<RawValue>>;

/// Bytes of frames above [`INLINE_FRAME`] that are remembered.
const LARGE_FRAMES_BYTES: u64 = 32 * 1024 * 1024;

/// A memory for large frames, bounded by their bytes.
pub(crate) fn large_frames() -> LargeFrames {
    moka::sync::Cache::builder()
        .max_capacity(LARGE_FRAMES_BYTES)
        .weigher(|_, frame: &Arc<RawValue>| u32::try_from(frame.get().len()).unwrap_or(u32::MAX))
        .build()
}

/// Frames above this size are not kept in memory for slow readers: they are read when somebody needs them.
const INLINE_FRAME: usize = 16 * 1024;

/// An event as observers get it.
#[derive(Debug, Clone)]
pub struct LogEvent {
    /// Its number in its workspace.
    pub seq: i64,
    /// Its type, such as `message.created`.
    pub kind: String,
    /// The channel that it happened in.
    pub channel_id: Option<ChannelId>,
    /// The channel's name.
    pub channel_name: Option<String>,
    /// The conversation that it happened in.
    pub conversation_id: Option<String>,
    /// Who did it, or whom it is about.
    pub agent_id: Option<AgentId>,
    /// When it happened.
    pub created_at: DateTime<Utc>,
    /// The frame without its number: a JSON object with at least `type` and `created_at`.
    payload: Option<Arc<RawValue>>,
    /// The frame as it goes over sockets, made once for all observers.
    text: OnceLock<Bytes>,
}

impl LogEvent {
    /// The frame without its number; none when it is large and was not read back.
    #[must_use]
    pub fn payload(&self) -> Option<&RawValue> {
        self.payload.as_deref()
    }

    /// What decides whether an observer may see it.
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

/// An event on its way between processes.
#[derive(Debug, Serialize, Deserialize)]
struct Travelling {
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

/// A record on its way between processes.
#[derive(Debug, Serialize, Deserialize)]
struct TravellingRecord {
    at: DateTime<Utc>,
    events: Vec<Travelling>,
}

impl Travelling {
    fn new(event: &NewEvent, frame: Box<RawValue>) -> Self {
        Self {
            k: event.kind.to_string(),
            c: event.channel_id,
            n: event.channel_name.clone(),
            v: event.conversation_id.clone(),
            a: event.agent_id,
            f: Some(frame).filter(|frame| frame.get().len() <= INLINE_FRAME),
        }
    }

    fn arrived(self, seq: i64, created_at: DateTime<Utc>) -> LogEvent {
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
    fn new(seq: i64, created_at: DateTime<Utc>, event: NewEvent, frame: Box<RawValue>) -> Self {
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

    /// The same, without its frame if that is too large to be kept for slow readers.
    fn trimmed(mut self) -> Self {
        self.payload = self.payload.filter(|frame| frame.get().len() <= INLINE_FRAME);
        self
    }
}
