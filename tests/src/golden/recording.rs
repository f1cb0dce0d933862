//! Recording of the traffic between clients and the engine.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use relay_testkit::receiver::{Received, Receiver};
use serde_json::Value;

use super::http::{Frame, Message};
use super::{Tap, shape, transcript};

/// Something that was seen.
#[derive(Clone, Debug)]
pub(super) enum Entry {
    /// A request and its answer.
    Answer { request: Message, response: Message },
    /// A WebSocket message.
    Frame { path: String, from_engine: bool, frame: Frame },
    /// An event of a server-sent stream, with all of its lines.
    ServerEvent { path: String, text: String },
    /// A call of the engine to an endpoint.
    Call { path: String, headers: Vec<(String, String)>, body: String },
}

/// The traffic of one test.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    entries: Arc<Mutex<Vec<Entry>>>,
}

impl Recording {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A proxy in front of `upstream` (`http://host:port`) whose traffic is added.
    ///
    /// # Errors
    /// When no port can be had.
    pub async fn tap(&self, upstream: &str) -> Result<Tap> {
        Tap::start(upstream, self.clone()).await
    }

    /// Adds the calls that came in at a receiver, if `wanted` says so.
    pub fn add_calls(&self, receiver: &Receiver, wanted: impl Fn(&Received) -> bool) {
        for call in receiver.received().iter().filter(|call| wanted(call)) {
            let mut headers: Vec<_> = call.headers.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
            headers.sort();
            let body = String::from_utf8_lossy(&call.body).into_owned();
            self.add(Entry::Call { path: call.path.clone(), headers, body });
        }
    }

    /// All of it, in order where the test is (see the module `transcript`).
    #[must_use]
    pub fn transcript(&self) -> Vec<String> {
        transcript::lines(&self.entries())
    }

    /// The shapes of what the engine sent, sorted (see the module `shape`).
    #[must_use]
    pub fn shapes(&self) -> Vec<String> {
        shape::lines(&self.entries())
    }

    /// The JSON frames of all WebSockets, in the order in which they passed, each with true if the engine sent it.
    #[must_use]
    pub fn socket_frames(&self) -> Vec<(bool, Value)> {
        let frame = |entry| match entry {
            Entry::Frame { from_engine, frame: Frame::Text(text), .. } => {
                Some((from_engine, serde_json::from_str(&text).ok()?))
            }
            Entry::Frame { .. } | Entry::Answer { .. } | Entry::ServerEvent { .. } | Entry::Call { .. } => None,
        };
        self.entries().into_iter().filter_map(frame).collect()
    }

    /// The number of answers with a status of 5xx.
    #[must_use]
    pub fn server_errors(&self) -> u64 {
        let is_error =
            |entry: &&Entry| matches!(entry, Entry::Answer { response, .. } if response.head.word(1).starts_with('5'));
        self.entries().iter().filter(is_error).count() as u64
    }

    pub(super) fn add(&self, entry: Entry) {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).push(entry);
    }

    fn entries(&self) -> Vec<Entry> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
