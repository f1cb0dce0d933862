//! A workspace's events in one gap-free order, for all observers of this process.
//!
//! A feed lives as long as somebody holds it. It follows the live records, waits a moment for one that comes
//! out of order, and reads from Postgres what does not come at all.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use relay_domain::WorkspaceScope;
use relay_stream::{EventRecord, EventTail};
use tokio::{
    sync::{Notify, broadcast},
    time::Instant,
};

use super::{LogEvent, TravellingRecord};
use crate::{Engine, EngineResult, Inner};

/// Events that an observer may lag behind its feed. They are shared by all observers of the feed.
const RING: usize = 1024;
/// How long a record that comes too early waits for those before it.
const ORDER_WAIT: Duration = Duration::from_millis(50);
/// Records that may wait so at once; past it Postgres is read.
const EARLY: usize = 256;
/// How often feeds are compared with their heads. What was lost is noticed at the second look.
const CHECK_EVERY: Duration = Duration::from_millis(500);
/// For how long a look counts as watching.
const WATCHED_MINUTES: i32 = 10;
const WATCH_EVERY: Duration = Duration::from_secs(4 * 60);
/// Events of one read.
const PAGE: i64 = 500;

/// The feeds of this process.
#[derive(Debug, Default)]
pub(crate) struct Feeds {
    live: Mutex<HashMap<WorkspaceScope, Weak<Feed>>>,
    opening: tokio::sync::Mutex<()>,
}

impl Feeds {
    fn live(&self) -> MutexGuard<'_, HashMap<WorkspaceScope, Weak<Feed>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, scope: WorkspaceScope) -> Option<Arc<Feed>> {
        self.live().get(&scope).and_then(Weak::upgrade)
    }
}

/// The events of one workspace as they happen.
#[derive(Debug)]
pub(super) struct Feed {
    pub(super) scope: WorkspaceScope,
    sender: broadcast::Sender<Arc<LogEvent>>,
    /// The number that is sent next.
    next: AtomicI64,
    poke: Notify,
}

impl Feed {
    /// Everything from the returned number on.
    pub(super) fn subscribe(&self) -> (broadcast::Receiver<Arc<LogEvent>>, i64) {
        let receiver = self.sender.subscribe();
        (receiver, self.next())
    }

    fn next(&self) -> i64 {
        self.next.load(Ordering::SeqCst)
    }

    fn send(&self, event: LogEvent) {
        let next = event.seq + 1;
        // Nobody listening is fine.
        let _ = self.sender.send(Arc::new(event.trimmed()));
        self.next.store(next, Ordering::SeqCst);
    }
}

impl Engine {
    /// The feed of a workspace, started if need be.
    pub(super) async fn feed(&self, scope: WorkspaceScope) -> EngineResult<Arc<Feed>> {
        let feeds = &self.inner.feeds;
        if let Some(feed) = feeds.find(scope) {
            return Ok(feed);
        }
        let _one_at_a_time = feeds.opening.lock().await;
        if let Some(feed) = feeds.find(scope) {
            return Ok(feed);
        }
        // Watch first, then tail, then look where the log stands: nothing falls between.
        self.watch_events(&[scope]).await?;
        let tail = self.inner.stream.tail_events(scope).await?;
        let heads = self.store().event_heads(&[scope]).await?;
        let next = heads.first().map_or(1, |head| head.next_seq);
        let feed = Arc::new(Feed {
            scope,
            sender: broadcast::Sender::new(RING),
            next: AtomicI64::new(next),
            poke: Notify::new(),
        });
        feeds.live().insert(scope, Arc::downgrade(&feed));
        tokio::spawn(follow(Arc::downgrade(&self.inner), Arc::downgrade(&feed), tail));
        Ok(feed)
    }

    /// Says that somebody looks at these workspaces' events.
    pub(crate) async fn watch_events(&self, scopes: &[WorkspaceScope]) -> EngineResult<()> {
        Ok(self.store().watch_events(scopes, WATCHED_MINUTES).await?)
    }
}

/// Keeps a feed going until nobody holds it.
async fn follow(engine: Weak<Inner>, feed: Weak<Feed>, mut tail: EventTail) {
    let mut early: BTreeMap<i64, EventRecord> = BTreeMap::new();
    let mut patience: Option<Instant> = None;
    loop {
        // Wakes up now and then to notice its end.
        let until = patience.unwrap_or_else(|| Instant::now() + Duration::from_secs(1));
        let read_postgres = {
            let Some(feed) = feed.upgrade() else { return };
            tokio::select! {
                record = tail.next() => {
                    let Some(record) = record else { return };
                    take(&feed, &mut early, record)
                }
                () = feed.poke.notified() => true,
                () = tokio::time::sleep_until(until) => patience.is_some(),
            }
        };
        let (Some(feed), Some(inner)) = (feed.upgrade(), engine.upgrade()) else { return };
        if read_postgres || early.len() > EARLY {
            if let Err(error) = repair(&Engine { inner }, &feed).await {
                // The next check asks again.
                tracing::debug!(error = &error as &dyn std::error::Error, "events wait for postgres");
            }
            let waiting = std::mem::take(&mut early);
            for record in waiting.into_values() {
                take(&feed, &mut early, record);
            }
            patience = None;
        }
        patience = (!early.is_empty()).then(|| patience.unwrap_or_else(|| Instant::now() + ORDER_WAIT));
    }
}

/// Sends a record's events if it is their turn, and then those that waited for it. True when only Postgres
/// has them.
fn take(feed: &Feed, early: &mut BTreeMap<i64, EventRecord>, record: EventRecord) -> bool {
    let mut record = record;
    loop {
        if record.first_seq > feed.next() {
            early.insert(record.first_seq, record);
            return false;
        }
        if record.last_seq >= feed.next() && !send(feed, &record) {
            return true;
        }
        match early.first_key_value() {
            Some((first, _)) if *first <= feed.next() => {
                let Some((_, next)) = early.pop_first() else { return false };
                record = next;
            }
            _ => return false,
        }
    }
}

/// False when the record travelled without its events.
fn send(feed: &Feed, record: &EventRecord) -> bool {
    let Ok(travelled) = serde_json::from_slice::<TravellingRecord>(&record.body) else { return false };
    for (seq, event) in (record.first_seq..=record.last_seq).zip(travelled.events) {
        if seq == feed.next() {
            feed.send(event.arrived(seq, travelled.at));
        }
    }
    true
}

/// Reads from Postgres whatever is next, to the end.
async fn repair(engine: &Engine, feed: &Feed) -> EngineResult<()> {
    loop {
        let events = engine.events_after(feed.scope, feed.next() - 1, PAGE).await?;
        if events.is_empty() {
            return Ok(());
        }
        metrics::counter!(relay_domain::metric_names::EVENTS_REPAIRED)
            .increment(u64::try_from(events.len()).unwrap_or(0));
        for event in events {
            // Retention may have passed a feed that stood still: it goes on with what there is.
            if event.seq >= feed.next() {
                feed.send(event);
            }
        }
    }
}

/// Compares the feeds with their heads, and goes on saying that they are watched, until the engine is gone.
pub(crate) async fn check(engine: Weak<Inner>) {
    let mut seen: HashMap<WorkspaceScope, i64> = HashMap::new();
    let mut watched_at = Instant::now();
    loop {
        tokio::time::sleep(CHECK_EVERY).await;
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        let feeds: Vec<Arc<Feed>> = {
            let mut live = engine.inner.feeds.live();
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
        if watched_at.elapsed() > WATCH_EVERY && engine.watch_events(&scopes).await.is_ok() {
            watched_at = Instant::now();
        }
        let Ok(heads) = engine.store().event_heads(&scopes).await else { continue };
        let heads: HashMap<_, _> = heads.into_iter().map(|head| (head.scope, head.next_seq)).collect();
        for feed in feeds {
            // Behind where the head stood at the last look: not late, lost.
            if seen.get(&feed.scope).is_some_and(|head| feed.next() < *head) {
                feed.poke.notify_one();
            }
        }
        seen = heads;
    }
}
