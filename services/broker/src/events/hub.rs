//! [`Hub`]: where events are published and subscribed to.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use serde::Serialize;
use tokio::sync::watch;

use super::{lane::Lane, ring::Ring};
use crate::{
    api::types::{Event, EventFrame, ReplayGap},
    clock,
};

/// Maximum number of concurrent subscribers.
const MAX_SUBSCRIBERS: usize = 64;
/// Durable events that one read of the ring takes.
const PAGE: usize = 128;

/// All events of the broker. Shared by everything that publishes.
#[derive(Debug)]
pub(crate) struct Hub {
    ring: Mutex<Ring>,
    newest: watch::Sender<u64>,
    lanes: Mutex<Vec<Arc<Lane>>>,
    subscriber_count: AtomicUsize,
}

/// Answer to a request for events that were missed.
#[derive(Debug)]
pub(crate) struct Replay {
    pub(crate) events: Vec<Arc<str>>,
    pub(crate) gap: bool,
    pub(crate) oldest_available: u64,
}

impl Hub {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            ring: Mutex::default(),
            newest: watch::Sender::new(0),
            lanes: Mutex::default(),
            subscriber_count: AtomicUsize::new(0),
        })
    }

    /// Publishes an event about an agent.
    pub(crate) fn publish(&self, name: &str, event: &Event) {
        let timestamp = clock::unix_ms();
        let text_of = |seq| encode(&EventFrame { event, name, timestamp, seq });
        if let Some(output_bytes) = ephemeral_bytes(event) {
            let (name, text): (Arc<str>, Arc<str>) = (name.into(), text_of(None).into());
            // Held, so that no durable event gets between the number and the lanes.
            let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
            // The only place that holds both locks, so their order cannot lead to a deadlock.
            let lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
            lanes.iter().for_each(|lane| lane.push(ring.newest(), &name, &text, output_bytes));
            return;
        }
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = ring.push(|seq| text_of(Some(seq)));
        // Under the lock, so that the announced numbers only rise.
        self.newest.send_replace(newest);
    }

    /// All kept durable events behind `seq`.
    pub(crate) fn replay(&self, seq: u64) -> Replay {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        Replay { events: ring.events_after(seq, usize::MAX), gap: ring.has_gap(seq), oldest_available: ring.oldest() }
    }

    /// Subscribes to the durable events behind `seq` and to ephemeral ones from now on. `None` if there are too many
    /// subscribers.
    pub(crate) fn subscribe(self: &Arc<Self>, seq: u64) -> Option<Subscription> {
        // Count and check in one step, so that two subscribers do not both take the last place.
        let counted = self
            .subscriber_count
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| (count < MAX_SUBSCRIBERS).then_some(count + 1));
        counted.ok()?;
        let lane = Arc::<Lane>::default();
        // The lane first: output between this and the position below waits in it.
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner).push(lane.clone());
        let (gap, position) = {
            let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
            let gap = ring
                .has_gap(seq)
                .then(|| encode(&ReplayGap { requested_since_seq: seq, oldest_available: ring.oldest() }));
            // Numbers of an earlier broker are above ours; the reader continues with the next event.
            (gap, if ring.has_gap(seq) { ring.oldest() - 1 } else { seq.min(ring.newest()) })
        };
        let newest = self.newest.subscribe();
        Some(Subscription { hub: self.clone(), lane, newest, position, gap })
    }

    /// Bytes of ephemeral events that wait for subscribers.
    pub(crate) fn waiting_bytes(&self) -> usize {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|lane| lane.bytes()).sum()
    }

    /// Number of subscribers.
    pub(crate) fn subscriber_count(&self) -> usize {
        self.subscriber_count.load(Ordering::Relaxed)
    }
}

/// Events are structs of strings, numbers and JSON values: each has a text.
fn encode(frame: &impl Serialize) -> String {
    serde_json::to_string(frame).unwrap_or_default()
}

/// Bytes of output in an event that is not kept; `None` for the durable kinds.
fn ephemeral_bytes(event: &Event) -> Option<usize> {
    if let Event::WorkerStream { chunk, .. } = event {
        return Some(chunk.len());
    }
    matches!(event, Event::DeliveryActive { .. }).then_some(0)
}

/// One reader of events. Dropping it ends the subscription.
#[derive(Debug)]
pub(crate) struct Subscription {
    hub: Arc<Hub>,
    lane: Arc<Lane>,
    newest: watch::Receiver<u64>,
    /// `seq` of the last durable event that was read.
    position: u64,
    gap: Option<String>,
}

/// Result of waiting for events.
#[derive(Debug)]
pub(crate) enum Next {
    /// Texts to send, in order.
    Events(Vec<Arc<str>>),
    /// The reader was slower than the ring; it has to come back with its position.
    FellBehind,
}

impl Subscription {
    /// Waits for the next events. Safe to cancel.
    pub(crate) async fn next(&mut self) -> Next {
        loop {
            if let Some(gap) = self.gap.take() {
                return Next::Events(vec![gap.into()]);
            }
            // Before the ring is read: an event that comes after the read ends the wait below.
            self.newest.mark_unchanged();
            let page = {
                let ring = self.hub.ring.lock().unwrap_or_else(PoisonError::into_inner);
                if ring.has_gap(self.position) {
                    return Next::FellBehind;
                }
                // Output goes out between the durable events that it was published between.
                match self.lane.next_after() {
                    Some(after) if after <= self.position => Vec::new(),
                    Some(after) => ring
                        .events_after(self.position, usize::try_from(after - self.position).unwrap_or(PAGE).min(PAGE)),
                    None => ring.events_after(self.position, PAGE),
                }
            };
            if !page.is_empty() {
                self.position += page.len() as u64;
                return Next::Events(page);
            }
            if let Some(event) = self.lane.pop(clock::unix_ms()) {
                return Next::Events(vec![event]);
            }
            tokio::select! {
                // Both are kept until they are waited for, so none is missed between the reads above and here.
                () = self.lane.arrived.notified() => {}
                // The sender lives as long as the hub, which this subscription holds.
                _ = self.newest.changed() => {}
            }
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut lanes = self.hub.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        lanes.retain(|lane| !Arc::ptr_eq(lane, &self.lane));
        self.hub.subscriber_count.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    async fn next(subscription: &mut Subscription) -> Vec<Value> {
        match subscription.next().await {
            Next::Events(events) => events.iter().map(|event| serde_json::from_str(event).expect("JSON")).collect(),
            Next::FellBehind => panic!("fell behind"),
        }
    }

    fn released() -> Event {
        Event::AgentReleased { reason: Some("done".into()) }
    }

    #[tokio::test]
    async fn a_reader_gets_kept_events_and_live_ones() {
        let hub = Hub::new();
        hub.publish("ada", &released());
        let mut reader = hub.subscribe(0).expect("a subscription");
        let first = next(&mut reader).await;
        assert_eq!((first[0]["kind"].as_str(), first[0]["seq"].as_u64()), (Some("agent_released"), Some(1)));
        hub.publish("ada", &Event::WorkerStream { stream: "stdout", chunk: "hi".into() });
        let output = next(&mut reader).await;
        assert_eq!((output[0]["chunk"].as_str(), output[0].get("seq")), (Some("hi"), None));
        hub.publish("ada", &released());
        assert_eq!(next(&mut reader).await[0]["seq"], 2);
        hub.publish("ada", &Event::WorkerStream { stream: "stdout", chunk: "last".into() });
        hub.publish("ada", &released());
        assert_eq!(next(&mut reader).await[0]["chunk"], "last");
        assert_eq!(next(&mut reader).await[0]["seq"], 3);
        drop(reader);
        assert_eq!(hub.subscriber_count(), 0);
    }

    #[tokio::test]
    async fn lost_events_are_reported_once_and_slow_readers_leave() {
        let hub = Hub::new();
        let mut slow = hub.subscribe(0).expect("a subscription");
        for _ in 0..1002 {
            hub.publish("ada", &released());
        }
        assert!(matches!(slow.next().await, Next::FellBehind));
        let mut late = hub.subscribe(1).expect("a subscription");
        let gap = next(&mut late).await;
        assert_eq!((&gap[0]["kind"], &gap[0]["oldestAvailable"]), (&json!("replay_gap"), &json!(3)));
        assert_eq!(next(&mut late).await[0]["seq"], 3);
        // A position of an earlier broker.
        let mut stranger = hub.subscribe(5000).expect("a subscription");
        hub.publish("ada", &released());
        assert_eq!(next(&mut stranger).await[0]["seq"], 1003);
    }
}
