//! Announcements after the commit: events to observers and to agents' sockets.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use relay_domain::{MessageId, events::EventSeq, messages::Message};
use relay_store::events::{Event, EventBody, RecordedEvents};
use relay_stream::EventRecord;
use relay_tasks::spawn_isolated;
use relay_wire::events::observer_frame;
use tokio::sync::{Semaphore, mpsc};

use super::{PublishedEvent, PublishedRecord, announcement::Announcement, fan_out};
use crate::{Engine, EngineResult, Inner};

/// Bound of the records that JetStream has not acknowledged.
const IN_FLIGHT: usize = 256;

/// Announces records in commit order until the engine is dropped.
pub(crate) async fn run(engine: Weak<Inner>, mut queue: mpsc::Receiver<Announcement>) {
    let in_flight = Arc::new(Semaphore::new(IN_FLIGHT));
    while let Some(Announcement { recorded, messages, to_sockets }) = queue.recv().await {
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        if to_sockets {
            fan_out::notify_sockets(&engine, &recorded).await;
        }
        // Nothing reads the live copy of a record that is not watched, and without NATS feeds read Postgres.
        if !recorded.watched || !engine.inner.stream.is_up() {
            continue;
        }
        // JetStream has stalled: observers read Postgres.
        let Ok(permit) = Arc::clone(&in_flight).try_acquire_owned() else { continue };
        let scope = recorded.scope;
        let first_seq = recorded.first_seq;
        let last_seq = first_seq + i64::try_from(recorded.events.len()).unwrap_or(1) - 1;
        // Its messages cannot be read now: feeds read the record from Postgres.
        let Ok(body) = encode(&engine, recorded, messages).await else { continue };
        match engine.inner.stream.publish_events(scope, EventRecord { first_seq, last_seq, body: body.into() }).await {
            Ok(stored) => {
                // Apart from the loop, which has sent the record: the next one must not wait for this
                // acknowledgement.
                spawn_isolated("publish", async move {
                    if let Err(error) = stored.await {
                        tracing::debug!(error = &error as &dyn std::error::Error, "jetstream did not store events");
                    }
                    drop(permit);
                });
            }
            Err(error) => tracing::debug!(error = &error as &dyn std::error::Error, "failed to publish events"),
        }
    }
}

async fn encode(
    engine: &Engine,
    recorded: RecordedEvents,
    messages: HashMap<MessageId, Message>,
) -> EngineResult<Vec<u8>> {
    // Messages in memory are those just posted, so their events refer to the same version.
    let at_hand = |event: &Event| matches!(&event.body, EventBody::Message(id) if messages.contains_key(id));
    let message_events = message_events(std::slice::from_ref(&recorded), |_, event| !at_hand(event));
    let read = engine.store().messages_of_events(recorded.scope, &message_events).await?;
    let events = (recorded.first_seq..).zip(&recorded.events).map(|(seq, event)| {
        let message = read.get(&seq).or_else(|| message_of(event, &messages));
        PublishedEvent::new(event, observer_frame::encode(event, message, recorded.created_at))
    });
    let record = PublishedRecord { at: recorded.created_at, events: events.collect() };
    // Strings, numbers and JSON values always encode.
    Ok(serde_json::to_vec(&record).unwrap_or_default())
}

fn message_of<'a>(event: &Event, messages: &'a HashMap<MessageId, Message>) -> Option<&'a Message> {
    match event.body {
        EventBody::Message(id) => messages.get(&id),
        EventBody::Data(_) => None,
    }
}

/// Lists the message events among these records that pass `wanted`: the events' numbers and the messages'.
pub(crate) fn message_events(
    records: &[RecordedEvents],
    wanted: impl Fn(EventSeq, &Event) -> bool,
) -> Vec<(EventSeq, MessageId)> {
    let numbered = records.iter().flat_map(|record| (record.first_seq..).zip(&record.events));
    numbered
        .filter(|(seq, event)| wanted(*seq, event))
        .filter_map(|(seq, event)| match event.body {
            EventBody::Message(id) => Some((seq, id)),
            EventBody::Data(_) => None,
        })
        .collect()
}
