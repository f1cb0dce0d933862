//! After the commit: to agents' sockets, and, once numbered, to those who watch.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use relay_domain::WorkspaceScope;
use relay_store::{
    MessageRow,
    event_numbers::Numbered,
    events::{EventBody, LogRecord, NewEvent, Recorded},
};
use relay_stream::EventRecord;
use tokio::{
    sync::{Semaphore, mpsc},
    time::Instant,
};

use super::{Travelling, TravellingRecord, fan_out, frame::frame};
use crate::{Engine, EngineResult, Inner, recovery::Standing};

/// Records that may wait to be announced. Beyond it they are left for the sweep and the feeds to find.
const QUEUE: usize = 4096;
/// Records that are announced together.
const AT_ONCE: usize = 256;
/// Between two rounds of numbering: what is committed meanwhile gets its numbers together. Observers
/// tolerate 50 ms.
const ROUND: Duration = Duration::from_millis(10);
/// Records whose acknowledgement by JetStream may be outstanding.
const IN_FLIGHT: usize = 256;
/// How often a process looks for records that nobody has numbered: whose process died after the commit,
/// or whose numbering failed.
const SWEEP_EVERY: Duration = Duration::from_millis(500);
/// A record without a number is nobody's after so many seconds.
const NOBODYS_AFTER: f64 = 0.5;
/// Workspaces of one sweep.
const SWEPT_AT_ONCE: i64 = 200;

/// A record with the messages that its events speak of, as far as they are at hand.
pub(crate) struct Announcement {
    recorded: Recorded,
    messages: HashMap<i64, MessageRow>,
    /// Whether agents' sockets are told too.
    sockets: bool,
}

/// The way to those who observe.
#[derive(Debug, Clone)]
pub(crate) struct Announcer {
    sender: mpsc::Sender<Announcement>,
    in_flight: Arc<Semaphore>,
}

impl Announcer {
    pub(crate) fn new() -> (Self, mpsc::Receiver<Announcement>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        (Self { sender, in_flight: Arc::new(Semaphore::new(IN_FLIGHT)) }, receiver)
    }
}

impl Engine {
    /// Tells agents' sockets, and those who watch, what was committed. Never waits.
    pub(crate) fn announce(&self, recorded: Recorded) {
        self.announce_with(recorded, HashMap::new());
    }

    /// The same, with the messages that the events speak of.
    pub(crate) fn announce_with(&self, recorded: Recorded, messages: HashMap<i64, MessageRow>) {
        self.queue(Announcement { recorded, messages, sockets: true });
    }

    /// Tells those who watch only: what sockets have said themselves is no news to them.
    pub(crate) fn announce_to_observers(&self, recorded: Recorded) {
        self.queue(Announcement { recorded, messages: HashMap::new(), sockets: false });
    }

    fn queue(&self, announcement: Announcement) {
        let kinds = announcement.recorded.events.len();
        if kinds == 0 {
            return;
        }
        if self.inner.announcer.sender.try_send(announcement).is_err() {
            // The sweep numbers the record within a second; agents' sockets miss it.
            metrics::counter!(relay_domain::metric_names::EVENTS_UNANNOUNCED)
                .increment(u64::try_from(kinds).unwrap_or(0));
        }
    }

    /// Numbers what was committed in a workspace before the call: whoever reads the log finds what it has done.
    pub(crate) async fn settle_events(&self, scope: WorkspaceScope) -> EngineResult<()> {
        if self.store().has_unnumbered_events(scope).await? {
            self.number_events(&[scope], &HashMap::new()).await?;
        }
        Ok(())
    }

    /// Numbers what waits in these workspaces, and publishes what somebody may be looking at.
    async fn number_events(&self, scopes: &[WorkspaceScope], messages: &HashMap<i64, MessageRow>) -> EngineResult<()> {
        loop {
            let batch = self.store().number_events(scopes).await?;
            for Numbered { record, watched } in batch.records {
                if watched && self.inner.stream.is_up() {
                    self.publish_events(record, messages).await;
                }
            }
            if !batch.more {
                return Ok(());
            }
        }
    }

    /// Best-effort: feeds read from Postgres what does not come.
    async fn publish_events(&self, record: LogRecord, messages: &HashMap<i64, MessageRow>) {
        // JetStream has stalled: watchers read Postgres.
        let Ok(permit) = Arc::clone(&self.inner.announcer.in_flight).try_acquire_owned() else { return };
        let (scope, first_seq, last_seq) = (record.scope, record.first_seq, record.last_seq());
        let Ok(body) = encode(self, record, messages).await else { return };
        match self.inner.stream.publish_events(scope, EventRecord { first_seq, last_seq, body: body.into() }).await {
            Ok(stored) => {
                tokio::spawn(async move {
                    if let Err(error) = stored.await {
                        tracing::debug!(error = &error as &dyn std::error::Error, "events were not stored");
                    }
                    drop(permit);
                });
            }
            Err(error) => tracing::debug!(error = &error as &dyn std::error::Error, "events were not published"),
        }
    }
}

/// Announces what this process commits until the engine is gone.
pub(crate) async fn run(engine: Weak<Inner>, mut queue: mpsc::Receiver<Announcement>) {
    let mut round: Vec<Announcement> = Vec::with_capacity(AT_ONCE);
    while queue.recv_many(&mut round, AT_ONCE).await > 0 {
        let Some(inner) = engine.upgrade() else { return };
        let (engine, next_round) = (Engine { inner }, Instant::now() + ROUND);
        let scopes: Vec<WorkspaceScope> = round.iter().map(|one| one.recorded.scope).collect();
        let messages = round.iter_mut().flat_map(|one| std::mem::take(&mut one.messages)).collect();
        let told = async {
            for one in round.iter().filter(|one| one.sockets) {
                fan_out::tell_sockets(&engine, &one.recorded).await;
            }
        };
        let (numbered, ()) = tokio::join!(engine.number_events(&scopes, &messages), told);
        if let Err(error) = numbered {
            tracing::debug!(error = &error as &dyn std::error::Error, "events wait for their numbers");
        }
        round.clear();
        drop(engine);
        tokio::time::sleep_until(next_round).await;
    }
}

/// Numbers what nobody else does, until the engine is gone.
pub(crate) async fn sweep(engine: Weak<Inner>) {
    loop {
        tokio::time::sleep(SWEEP_EVERY).await;
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        if !matches!(engine.standing(), Standing::Open(_)) {
            // The counters of a restored database are raised first.
            continue;
        }
        let swept = async {
            let scopes = engine.store().unnumbered_workspaces(NOBODYS_AFTER, SWEPT_AT_ONCE).await?;
            if scopes.is_empty() { Ok(()) } else { engine.number_events(&scopes, &HashMap::new()).await }
        };
        if let Err(error) = swept.await {
            tracing::debug!(error = &error as &dyn std::error::Error, "events wait for their numbers");
        }
    }
}

async fn encode(engine: &Engine, record: LogRecord, messages: &HashMap<i64, MessageRow>) -> EngineResult<Vec<u8>> {
    // What is at hand is what was posted, and so what its event tells.
    let at_hand = |event: &NewEvent| matches!(&event.body, EventBody::Message(id) if messages.contains_key(&id.get()));
    let told = told(std::slice::from_ref(&record), |_, event| !at_hand(event));
    let read = engine.store().messages_of_events(record.scope, &told).await?;
    let events = (record.first_seq..).zip(&record.events).map(|(seq, event)| {
        let message = read.get(&seq).or_else(|| message_of(event, messages));
        Travelling::new(event, frame(event, message, record.created_at))
    });
    let record = TravellingRecord { at: record.created_at, events: events.collect() };
    // Strings, numbers and JSON values always encode.
    Ok(serde_json::to_vec(&record).unwrap_or_default())
}

fn message_of<'a>(event: &NewEvent, messages: &'a HashMap<i64, MessageRow>) -> Option<&'a MessageRow> {
    match event.body {
        EventBody::Message(id) => messages.get(&id.get()),
        EventBody::Data(_) => None,
    }
}

/// The events of messages among these records that pass `wanted`: their numbers, and the messages'.
pub(crate) fn told(records: &[LogRecord], wanted: impl Fn(i64, &NewEvent) -> bool) -> Vec<(i64, i64)> {
    let numbered = records.iter().flat_map(|record| (record.first_seq..).zip(&record.events));
    numbered
        .filter(|(seq, event)| wanted(*seq, event))
        .filter_map(|(seq, event)| match event.body {
            EventBody::Message(id) => Some((seq, id.get())),
            EventBody::Data(_) => None,
        })
        .collect()
}
