//! After the commit: records to those who watch, and to agents' sockets.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use relay_store::{
    MessageRow,
    events::{EventBody, NewEvent, Recorded},
};
use relay_stream::EventRecord;
use tokio::sync::{Semaphore, mpsc};

use super::{Travelling, TravellingRecord, fan_out, frame::frame};
use crate::{Engine, EngineResult, Inner};

/// Records that may wait to be announced. Beyond it they are left for the feeds to find.
const QUEUE: usize = 4096;
/// Records whose acknowledgement by JetStream may be outstanding.
const IN_FLIGHT: usize = 256;

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
}

impl Announcer {
    pub(crate) fn new() -> (Self, mpsc::Receiver<Announcement>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        (Self { sender }, receiver)
    }
}

impl Engine {
    /// Tells those who watch, and agents' sockets, what was committed. Never waits.
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
            // Feeds find the record in Postgres within a second; agents' sockets miss it.
            metrics::counter!(relay_domain::metric_names::EVENTS_UNANNOUNCED)
                .increment(u64::try_from(kinds).unwrap_or(0));
        }
    }
}

/// Announces in commit order until the engine is gone.
pub(crate) async fn run(engine: Weak<Inner>, mut queue: mpsc::Receiver<Announcement>) {
    let in_flight = Arc::new(Semaphore::new(IN_FLIGHT));
    while let Some(Announcement { recorded, messages, sockets }) = queue.recv().await {
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        if sockets {
            fan_out::tell_sockets(&engine, &recorded).await;
        }
        if !recorded.watched || !engine.inner.stream.is_up() {
            continue;
        }
        // JetStream has stalled: watchers read Postgres.
        let Ok(permit) = Arc::clone(&in_flight).try_acquire_owned() else { continue };
        let scope = recorded.scope;
        let first_seq = recorded.first_seq;
        let last_seq = first_seq + i64::try_from(recorded.events.len()).unwrap_or(1) - 1;
        let Ok(body) = encode(&engine, recorded, messages).await else { continue };
        match engine.inner.stream.publish_events(scope, EventRecord { first_seq, last_seq, body: body.into() }).await {
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

async fn encode(engine: &Engine, recorded: Recorded, messages: HashMap<i64, MessageRow>) -> EngineResult<Vec<u8>> {
    // What is at hand is what was posted, and so what its event tells.
    let at_hand = |event: &NewEvent| matches!(&event.body, EventBody::Message(id) if messages.contains_key(&id.get()));
    let told = told(std::slice::from_ref(&recorded), |_, event| !at_hand(event));
    let read = engine.store().messages_of_events(recorded.scope, &told).await?;
    let events = (recorded.first_seq..).zip(&recorded.events).map(|(seq, event)| {
        let message = read.get(&seq).or_else(|| message_of(event, &messages));
        Travelling::new(event, frame(event, message, recorded.created_at))
    });
    let record = TravellingRecord { at: recorded.created_at, events: events.collect() };
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
pub(crate) fn told(records: &[Recorded], wanted: impl Fn(i64, &NewEvent) -> bool) -> Vec<(i64, i64)> {
    let numbered = records.iter().flat_map(|record| (record.first_seq..).zip(&record.events));
    numbered
        .filter(|(seq, event)| wanted(*seq, event))
        .filter_map(|(seq, event)| match event.body {
            EventBody::Message(id) => Some((seq, id.get())),
            EventBody::Data(_) => None,
        })
        .collect()
}
