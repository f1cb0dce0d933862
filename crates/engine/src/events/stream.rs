//! One observer's way through the log: what it missed, then what happens.

use std::{collections::VecDeque, sync::Arc};

use bytes::Bytes;
use relay_domain::WorkspaceScope;
use serde_json::value::RawValue;
use tokio::sync::broadcast::{
    self,
    error::{RecvError, TryRecvError},
};

use super::{LogEvent, feed::Feed};
use crate::{Engine, EngineError, EngineResult};

/// Events of one read while an observer catches up.
const CATCH_UP_PAGE: i64 = 200;

/// What an observer meets next.
#[derive(Debug, Clone)]
pub enum Observed {
    /// An event, in order. Whether the observer may see it is for the caller to ask.
    Event(Arc<LogEvent>),
    /// What the observer wanted to resume from is no longer kept, or never was: it goes on with the oldest
    /// event that is.
    Resync {
        /// The number of the next event.
        oldest_seq: i64,
        /// The number of the newest event.
        latest_seq: i64,
    },
    /// The observer read too slowly and must resume from the log.
    TooSlow,
}

/// A position in a workspace's log that moves on with it.
pub struct EventStream {
    engine: Engine,
    feed: Arc<Feed>,
    receiver: broadcast::Receiver<Arc<LogEvent>>,
    /// The number that is given next.
    next: i64,
    /// Events below this number do not come from the feed.
    live_from: i64,
    backlog: VecDeque<Arc<LogEvent>>,
    resync: Option<Observed>,
}

impl Engine {
    /// A stream of a workspace's events: those above `since`, or those from now on.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn observe_events(&self, scope: WorkspaceScope, since: Option<i64>) -> EngineResult<EventStream> {
        let feed = self.feed(scope).await?;
        let (receiver, live_from) = feed.subscribe();
        let (mut next, mut resync) = (live_from, None);
        if let Some(since) = since {
            let (oldest_seq, next_seq) = self.store().event_range(scope).await?;
            next = since.saturating_add(1);
            if next < oldest_seq || next > next_seq {
                next = oldest_seq;
                resync = Some(Observed::Resync { oldest_seq, latest_seq: next_seq - 1 });
            }
        }
        Ok(EventStream { engine: self.clone(), feed, receiver, next, live_from, backlog: VecDeque::new(), resync })
    }

    /// Events above `since` and below `before`, for an observer that asks again for what it missed.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn events_between(&self, scope: WorkspaceScope, since: i64, before: i64) -> EngineResult<Vec<LogEvent>> {
        let mut events = self.events_after(scope, since, CATCH_UP_PAGE.min(before - since - 1)).await?;
        events.retain(|event| event.seq < before);
        Ok(events)
    }

    /// The frame of an event without its number.
    ///
    /// # Errors
    /// When it has to be read and storage is away, or retention has passed it.
    pub async fn event_payload(&self, scope: WorkspaceScope, event: &LogEvent) -> EngineResult<Arc<RawValue>> {
        if let Some(payload) = &event.payload {
            return Ok(Arc::clone(payload));
        }
        let large = &self.inner.large_frames;
        if let Some(payload) = large.get(&(scope, event.seq)) {
            return Ok(payload);
        }
        let found = self.events_after(scope, event.seq - 1, 1).await?;
        let payload = found.into_iter().find(|found| found.seq == event.seq).and_then(|found| found.payload);
        let payload = payload.ok_or(EngineError::MessageNotFound)?;
        large.insert((scope, event.seq), Arc::clone(&payload));
        Ok(payload)
    }

    /// The frame of an event as it goes over a socket: with its number, as `seq` and as the `agent_seq` that
    /// some clients resume from.
    ///
    /// # Errors
    /// As for [`Self::event_payload`].
    pub async fn event_text(&self, scope: WorkspaceScope, event: &LogEvent) -> EngineResult<Bytes> {
        if let Some(text) = event.text.get() {
            return Ok(text.clone());
        }
        let payload = self.event_payload(scope, event).await?;
        let (seq, rest) = (event.seq, payload.get().strip_prefix('{').unwrap_or("}"));
        let text = Bytes::from(format!(r#"{{"seq":{seq},"agent_seq":{seq},{rest}"#));
        // A large one is not kept: its feed holds on to it for slow readers.
        if event.payload.is_some() { Ok(event.text.get_or_init(|| text).clone()) } else { Ok(text) }
    }
}

impl EventStream {
    /// The number of the event that comes next.
    #[must_use]
    pub const fn position(&self) -> i64 {
        self.next
    }

    /// What comes next. Waits for it; giving up waiting loses nothing.
    ///
    /// # Errors
    /// When storage is away while the observer catches up; ask again.
    pub async fn next(&mut self) -> EngineResult<Observed> {
        if let Some(resync) = self.resync.take() {
            return Ok(resync);
        }
        loop {
            while let Some(event) = self.backlog.pop_front() {
                if event.seq >= self.next {
                    self.next = event.seq + 1;
                    return Ok(Observed::Event(event));
                }
            }
            if self.next < self.live_from {
                self.catch_up().await?;
                continue;
            }
            match self.receiver.recv().await {
                // Something before it was missed: Postgres has all of it.
                Ok(event) if event.seq > self.next => self.live_from = event.seq + 1,
                Ok(event) => self.backlog.push_back(event),
                Err(RecvError::Lagged(_)) => return Ok(Observed::TooSlow),
                // The feed ends with its last stream, so not before this one.
                Err(RecvError::Closed) => return Ok(Observed::TooSlow),
            }
        }
    }

    /// What comes next, if it is at hand.
    pub fn try_next(&mut self) -> Option<Observed> {
        if self.resync.is_some() || !self.backlog.is_empty() || self.next < self.live_from {
            return None;
        }
        match self.receiver.try_recv() {
            Ok(event) if event.seq == self.next => {
                self.next += 1;
                Some(Observed::Event(event))
            }
            Ok(event) => {
                if event.seq > self.next {
                    self.live_from = event.seq + 1;
                }
                None
            }
            Err(TryRecvError::Lagged(_)) => Some(Observed::TooSlow),
            Err(TryRecvError::Empty | TryRecvError::Closed) => None,
        }
    }

    async fn catch_up(&mut self) -> EngineResult<()> {
        let events = self.engine.events_after(self.feed.scope, self.next - 1, CATCH_UP_PAGE).await?;
        if events.is_empty() {
            // Retention has passed what was missing.
            self.next = self.next.max(self.live_from);
        }
        self.backlog.extend(events.into_iter().map(Arc::new));
        if self.receiver.len() > CATCH_UP_PAGE.unsigned_abs() as usize {
            // The feed must not cut an observer off for what it reads from Postgres anyway.
            (self.receiver, self.live_from) = self.feed.subscribe();
        }
        Ok(())
    }
}
