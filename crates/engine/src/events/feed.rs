//! Feeds: the events of a workspace in one gap-free order, for all observers of this process.
//!
//! A feed exists as long as an observer holds it. It follows the live records, waits a moment for one that arrives out
//! of order, and reads missing ones from Postgres.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use relay_domain::{WorkspaceScope, events::EventSeq};
use relay_stream::{EventCopy, EventRecord, EventTail};
use relay_tasks::spawn_isolated;
use tokio::{
    sync::{Notify, broadcast},
    time::Instant,
};

use super::{Events, LogEvent, PublishedRecord};
use crate::{EngineResult, Inner, core::Core};

/// Bound of an observer's lag behind its feed. All observers of the feed share the buffer.
const FEED_BUFFER: usize = 1024;
/// Time that an early record waits for those before it.
const ORDER_WAIT: Duration = Duration::from_millis(50);
/// Bound of the early records; past it Postgres is read.
const MAX_EARLY: usize = 256;
/// Interval at which feeds are compared with their heads. A lost record is noticed at the second comparison.
const CHECK_EVERY: Duration = Duration::from_millis(500);
/// Time for which a workspace counts as watched.
const WATCHED_MINUTES: i32 = 10;
const WATCH_EVERY: Duration = Duration::from_secs(4 * 60);
const PAGE: i64 = 500;

#[derive(Debug, Default)]
pub(crate) struct Feeds {
    live: Mutex<HashMap<WorkspaceScope, Weak<Feed>>>,
    opening: tokio::sync::Mutex<()>,
}

impl Feeds {
    fn lock_live(&self) -> MutexGuard<'_, HashMap<WorkspaceScope, Weak<Feed>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, scope: WorkspaceScope) -> Option<Arc<Feed>> {
        self.lock_live().get(&scope).and_then(Weak::upgrade)
    }
}

#[derive(Debug)]
pub(super) struct Feed {
    pub(super) scope: WorkspaceScope,
    sender: broadcast::Sender<Arc<LogEvent>>,
    next: AtomicI64,
    repair_requested: Notify,
}

impl Feed {
    /// Subscribes to all events from the returned number on.
    pub(super) fn subscribe(&self) -> (broadcast::Receiver<Arc<LogEvent>>, EventSeq) {
        // The receiver first: an event that is sent in between arrives, and is skipped if it is below the number.
        let receiver = self.sender.subscribe();
        (receiver, self.next_seq())
    }

    fn next_seq(&self) -> EventSeq {
        self.next.load(Ordering::SeqCst)
    }

    fn send(&self, event: LogEvent) {
        let next = event.seq + 1;
        // First the number: a subscriber in between reads the event from Postgres and drops the copy. The other way
        // round it would have the event from neither.
        self.next.store(next, Ordering::SeqCst);
        // No listener is fine.
        let _ = self.sender.send(Arc::new(event.without_large_frame()));
    }
}

impl Events {
    /// Returns the feed of a workspace, starting it if needed.
    pub(super) async fn feed(&self, scope: WorkspaceScope) -> EngineResult<Arc<Feed>> {
        let feeds = &self.feeds;
        if let Some(feed) = feeds.find(scope) {
            return Ok(feed);
        }
        // Without this lock two observers would each start a feed, and the second would replace the first in the map.
        let _one_at_a_time = feeds.opening.lock().await;
        if let Some(feed) = feeds.find(scope) {
            return Ok(feed);
        }
        // Watch first, then tail, then read the head: no event falls in between.
        self.core.watch_events(&[scope]).await?;
        let tail = self.stream.tail_events(scope).await?;
        let heads = self.core.store.event_heads(&[scope]).await?;
        let next = heads.first().map_or(1, |head| head.next_seq);
        let feed = Arc::new(Feed {
            scope,
            sender: broadcast::Sender::new(FEED_BUFFER),
            next: AtomicI64::new(next),
            repair_requested: Notify::new(),
        });
        feeds.lock_live().insert(scope, Arc::downgrade(&feed));
        spawn_isolated("feed", follow_feed(self.clone(), Arc::downgrade(&feed), tail));
        Ok(feed)
    }
}

impl Core {
    /// Marks these workspaces as watched.
    pub(crate) async fn watch_events(&self, scopes: &[WorkspaceScope]) -> EngineResult<()> {
        Ok(self.store.watch_events(scopes, WATCHED_MINUTES).await?)
    }
}

/// Keeps a feed going until its last observer drops it.
async fn follow_feed(events: Events, feed: Weak<Feed>, mut tail: EventTail) {
    let mut out_of_order: BTreeMap<EventSeq, EventRecord> = BTreeMap::new();
    let mut patience: Option<Instant> = None;
    // An unverified message asks for a read, no sooner than an early record does.
    let mut doubted = false;
    loop {
        // Wakes up regularly to notice that the feed was dropped.
        let until = patience.unwrap_or_else(|| Instant::now() + Duration::from_secs(1));
        let read_postgres = {
            let Some(feed) = feed.upgrade() else { return };
            tokio::select! {
                received = tail.next() => match received {
                    // The NATS client was closed, as at the end of the process.
                    None => return,
                    Some(EventCopy::Record(record)) => accept_record(&feed, &mut out_of_order, record),
                    Some(EventCopy::WakeUp) => {
                        doubted = true;
                        false
                    }
                },
                () = feed.repair_requested.notified() => true,
                () = tokio::time::sleep_until(until) => patience.is_some(),
            }
        };
        let Some(feed) = feed.upgrade() else { return };
        if read_postgres || out_of_order.len() > MAX_EARLY {
            if let Err(error) = repair(&events, &feed).await {
                // The next check repairs again.
                tracing::debug!(error = &error as &dyn std::error::Error, "failed to read missing events, will retry");
            }
            // Records that the read has covered are dropped. The others are sent if they are next, or wait again.
            let waiting = std::mem::take(&mut out_of_order);
            for record in waiting.into_values() {
                accept_record(&feed, &mut out_of_order, record);
            }
            patience = None;
            doubted = false;
        }
        patience =
            (doubted || !out_of_order.is_empty()).then(|| patience.unwrap_or_else(|| Instant::now() + ORDER_WAIT));
    }
}

/// Sends a record's events if they are next, and then those that waited for them. Returns true if Postgres must be
/// read.
fn accept_record(feed: &Feed, out_of_order: &mut BTreeMap<EventSeq, EventRecord>, record: EventRecord) -> bool {
    let mut record = record;
    loop {
        if record.first_seq > feed.next_seq() {
            out_of_order.insert(record.first_seq, record);
            return false;
        }
        if record.last_seq >= feed.next_seq() && !send_record(feed, &record) {
            return true;
        }
        match out_of_order.first_key_value() {
            Some((first, _)) if *first <= feed.next_seq() => {
                let Some((_, next)) = out_of_order.pop_first() else { return false };
                record = next;
            }
            _ => return false,
        }
    }
}

/// Sends a record's events. Returns false when the record was published without them.
fn send_record(feed: &Feed, record: &EventRecord) -> bool {
    let Ok(travelled) = serde_json::from_slice::<PublishedRecord>(&record.body) else { return false };
    for (seq, event) in (record.first_seq..=record.last_seq).zip(travelled.events) {
        // A read of Postgres may have covered the first events of the record.
        if seq == feed.next_seq() {
            feed.send(event.into_log_event(seq, travelled.at));
        }
    }
    true
}

/// Sends the missing events from Postgres.
async fn repair(log: &Events, feed: &Feed) -> EngineResult<()> {
    loop {
        let events = log.events_after(feed.scope, feed.next_seq() - 1, PAGE).await?;
        if events.is_empty() {
            return Ok(());
        }
        metrics::counter!(relay_domain::metric_names::EVENTS_REPAIRED)
            .increment(u64::try_from(events.len()).unwrap_or(0));
        for event in events {
            // Retention may have passed an idle feed: it continues with the oldest kept event.
            if event.seq >= feed.next_seq() {
                feed.send(event);
            }
        }
    }
}

/// Compares the feeds with their heads, and keeps their workspaces watched, until the engine is dropped.
pub(crate) async fn check_feeds(engine: Weak<Inner>) {
    let mut seen: HashMap<WorkspaceScope, EventSeq> = HashMap::new();
    let mut watched_at = Instant::now();
    loop {
        tokio::time::sleep(CHECK_EVERY).await;
        let Some(inner) = engine.upgrade() else { return };
        let events = &inner.events;
        let feeds: Vec<Arc<Feed>> = {
            let mut live = events.feeds.lock_live();
            live.retain(|_, feed| feed.strong_count() > 0);
            live.values().filter_map(Weak::upgrade).collect()
        };
        metrics::gauge!(relay_domain::metric_names::EVENT_FEEDS)
            .set(f64::from(u32::try_from(feeds.len()).unwrap_or(u32::MAX)));
        let scopes: Vec<WorkspaceScope> = feeds.iter().map(|feed| feed.scope).collect();
        if scopes.is_empty() {
            seen.clear();
            continue;
        }
        // A failure leaves the time as it is, so the next check tries again.
        if watched_at.elapsed() > WATCH_EVERY && events.core.watch_events(&scopes).await.is_ok() {
            watched_at = Instant::now();
        }
        let Ok(heads) = events.core.store.event_heads(&scopes).await else { continue };
        let heads: HashMap<_, _> = heads.into_iter().map(|head| (head.scope, head.next_seq)).collect();
        for feed in feeds {
            // Still behind the head of the previous comparison: lost, not late.
            if seen.get(&feed.scope).is_some_and(|head| feed.next_seq() < *head) {
                feed.repair_requested.notify_one();
            }
        }
        seen = heads;
    }
}
