//! Position of one observer in the event log: first the missed events, then the live ones.

use std::{collections::VecDeque, sync::Arc};

use bytes::Bytes;
use relay_domain::{WorkspaceScope, events::EventSeq};
use relay_tasks::byte_budget::ByteLease;
use serde_json::value::RawValue;
use tokio::sync::broadcast::{
    self,
    error::{RecvError, TryRecvError},
};

use super::{Events, LogEvent, feed::Feed, log::PAGE_MEMORY};
use crate::{EngineError, EngineResult, error::Missing};

/// Events of one read while an observer catches up.
const CATCH_UP_PAGE: i64 = 200;
/// Memory of a large event while it is read and written.
const LARGE_EVENT_BYTES: usize = 2 * 1024 * 1024;

/// Next item of an observer's stream.
#[derive(Debug, Clone)]
pub enum StreamItem {
    /// Event, in order. The caller checks its visibility.
    Event(Arc<LogEvent>),
    /// The requested position is no longer kept, or never existed: the stream continues with the oldest kept event.
    Resync { oldest_seq: EventSeq, latest_seq: EventSeq },
    /// The observer read too slowly and must resume from the log.
    TooSlow,
}

/// Stream of a workspace's events from a position on.
pub struct EventStream {
    events: Events,
    feed: Arc<Feed>,
    receiver: broadcast::Receiver<Arc<LogEvent>>,
    /// Number of the next item.
    next: EventSeq,
    /// Events below this number come from the log, not from the feed.
    live_from: EventSeq,
    backlog: VecDeque<Arc<LogEvent>>,
    /// Memory of a backlog that was read from the log, until its last event was written.
    memory: Option<ByteLease>,
    resync: Option<StreamItem>,
}

impl Events {
    /// Opens a stream of a workspace's events: those above `since`, or those from now on.
    pub async fn observe(&self, scope: WorkspaceScope, since: Option<EventSeq>) -> EngineResult<EventStream> {
        let feed = self.feed(scope).await?;
        // Before the log is read, so that no event falls between the two.
        let (receiver, live_from) = feed.subscribe();
        let (mut next, mut resync) = (live_from, None);
        if let Some(since) = since {
            let (oldest_seq, next_seq) = self.core.store.event_range(scope).await?;
            next = since.saturating_add(1);
            if next < oldest_seq || next > next_seq {
                next = oldest_seq;
                resync = Some(StreamItem::Resync { oldest_seq, latest_seq: next_seq - 1 });
            }
        }
        Ok(EventStream {
            events: self.clone(),
            feed,
            receiver,
            next,
            live_from,
            backlog: VecDeque::new(),
            memory: None,
            resync,
        })
    }

    /// Reads events above `since` and below `before`, for an observer that repeats a request, and the memory that they
    /// take until they are written.
    pub async fn read_between(
        &self,
        scope: WorkspaceScope,
        since: EventSeq,
        before: EventSeq,
    ) -> EngineResult<(Vec<LogEvent>, ByteLease)> {
        let (mut events, memory) = self.read_held(scope, since, CATCH_UP_PAGE.min(before - since - 1)).await?;
        events.retain(|event| event.seq < before);
        Ok((events, memory))
    }

    /// Reads the next events above `since` and holds the memory that they take.
    async fn read_held(
        &self,
        scope: WorkspaceScope,
        since: EventSeq,
        events: i64,
    ) -> EngineResult<(Vec<LogEvent>, ByteLease)> {
        // All of it, because the size of the events is known only after the read.
        let mut memory = self.core.reserve_answer(scope, PAGE_MEMORY).await?;
        let events = self.events_after(scope, since, events).await?;
        memory.shrink_to(events.iter().filter_map(LogEvent::payload).map(|payload| payload.get().len()).sum());
        Ok((events, memory))
    }

    /// Waits for the memory of an event that is too large to be kept, until it is written. `None` for others.
    pub async fn reserve_large(&self, scope: WorkspaceScope, event: &LogEvent) -> EngineResult<Option<ByteLease>> {
        if event.payload.is_some() {
            return Ok(None);
        }
        Ok(Some(self.core.reserve_answer(scope, LARGE_EVENT_BYTES).await?))
    }

    /// Returns the frame of an event without its number.
    ///
    /// # Errors
    /// When retention has dropped it.
    pub async fn payload(&self, scope: WorkspaceScope, event: &LogEvent) -> EngineResult<Arc<RawValue>> {
        if let Some(payload) = &event.payload {
            return Ok(Arc::clone(payload));
        }
        let large = &self.large_frames;
        if let Some(payload) = large.get(&(scope, event.seq)) {
            return Ok(payload);
        }
        let found = self.events_after(scope, event.seq - 1, 1).await?;
        let payload = found.into_iter().find(|found| found.seq == event.seq).and_then(|found| found.payload);
        let payload = payload.ok_or(EngineError::NotFound(Missing::Message))?;
        large.insert((scope, event.seq), Arc::clone(&payload));
        Ok(payload)
    }

    /// Returns the frame of an event for sockets: with its number, as `seq` and as the `agent_seq` that some clients
    /// resume from.
    pub async fn text(&self, scope: WorkspaceScope, event: &LogEvent) -> EngineResult<Bytes> {
        if let Some(text) = event.text.get() {
            return Ok(text.clone());
        }
        let payload = self.payload(scope, event).await?;
        // A frame is an object with fields, so it begins with a brace.
        let (seq, rest) = (event.seq, payload.get().strip_prefix('{').unwrap_or("}"));
        let text = Bytes::from(format!(r#"{{"seq":{seq},"agent_seq":{seq},{rest}"#));
        // A large one is not cached, since the feed would keep it for slow readers.
        if event.payload.is_some() { Ok(event.text.get_or_init(|| text).clone()) } else { Ok(text) }
    }
}

impl EventStream {
    /// Number of the next event.
    #[must_use]
    pub const fn position(&self) -> EventSeq {
        self.next
    }

    /// Waits for the next item. Cancellation loses nothing.
    pub async fn next(&mut self) -> EngineResult<StreamItem> {
        if let Some(resync) = self.resync.take() {
            return Ok(resync);
        }
        loop {
            while let Some(event) = self.backlog.pop_front() {
                if event.seq >= self.next {
                    self.next = event.seq + 1;
                    return Ok(StreamItem::Event(event));
                }
            }
            self.memory = None;
            if self.next < self.live_from {
                self.catch_up().await?;
                continue;
            }
            match self.receiver.recv().await {
                // An event before it was missed: Postgres has it.
                Ok(event) if event.seq > self.next => self.live_from = event.seq + 1,
                Ok(event) => self.backlog.push_back(event),
                Err(RecvError::Lagged(_)) => return Ok(StreamItem::TooSlow),
                // The feed lives as long as its last stream, so this cannot come first.
                Err(RecvError::Closed) => return Ok(StreamItem::TooSlow),
            }
        }
    }

    /// Returns the next item if it is in memory.
    pub fn try_next(&mut self) -> Option<StreamItem> {
        // `next` has to read first, or to return memory.
        let is_behind = self.next < self.live_from || self.memory.is_some();
        if self.resync.is_some() || !self.backlog.is_empty() || is_behind {
            return None;
        }
        match self.receiver.try_recv() {
            Ok(event) if event.seq == self.next => {
                self.next += 1;
                Some(StreamItem::Event(event))
            }
            Ok(event) => {
                if event.seq > self.next {
                    self.live_from = event.seq + 1;
                }
                None
            }
            Err(TryRecvError::Lagged(_)) => Some(StreamItem::TooSlow),
            Err(TryRecvError::Empty | TryRecvError::Closed) => None,
        }
    }

    async fn catch_up(&mut self) -> EngineResult<()> {
        let (events, memory) = self.events.read_held(self.feed.scope, self.next - 1, CATCH_UP_PAGE).await?;
        if events.is_empty() {
            // Retention has dropped the missing events.
            self.next = self.next.max(self.live_from);
        }
        self.memory = Some(memory);
        self.backlog.extend(events.into_iter().map(Arc::new));
        if self.receiver.len() as u64 > CATCH_UP_PAGE.unsigned_abs() {
            // The feed must not disconnect an observer for events that it reads from Postgres anyway.
            (self.receiver, self.live_from) = self.feed.subscribe();
        }
        Ok(())
    }
}
