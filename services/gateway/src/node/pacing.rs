//! How many frames a broker may have unconfirmed (ADR 0002).
//!
//! The brokers' own queue of outgoing acks holds 256; past about 600 frames that are acknowledged at
//! once they lock up for good. So after each 64 frames a barrier goes out, a frame to a name that no
//! agent can have, whose ack proves that everything before it was taken in.

use std::time::{Duration, Instant};

use serde_json::json;

/// Unconfirmed frames at most.
const WINDOW: u32 = 128;
/// A barrier follows each so many frames.
const BARRIER_EVERY: u32 = 64;
/// A broker that confirms nothing for this long is closed.
const SILENT: Duration = Duration::from_secs(30);
/// The barrier's agent. Agent names never begin with a dot.
pub(super) const BARRIER_AGENT: &str = ".relay-barrier";
/// Brokers whose version begins so are paced and asked for their positions; other clients are bounded by
/// their socket alone and would not know what to make of such frames.
pub(super) const BROKER_VERSION: &str = "relay-broker/";

/// The window of one broker connection.
#[derive(Debug, Default)]
pub(super) struct Pacing {
    unconfirmed: u32,
    since_barrier: u32,
    /// How many frames each outstanding barrier confirms.
    barriers: std::collections::VecDeque<u32>,
    barrier_no: u64,
    oldest: Option<Instant>,
}

impl Pacing {
    /// Whether another frame may go out.
    pub(super) const fn has_room(&self) -> bool {
        self.unconfirmed < WINDOW
    }

    /// Counts a frame; returns the barrier that must follow it, if it is time for one.
    pub(super) fn sent(&mut self) -> Option<String> {
        self.unconfirmed += 1;
        self.since_barrier += 1;
        self.oldest.get_or_insert_with(Instant::now);
        if self.since_barrier < BARRIER_EVERY {
            return None;
        }
        self.barriers.push_back(std::mem::take(&mut self.since_barrier));
        self.barrier_no += 1;
        Some(position_probe(BARRIER_AGENT, "ag_relay_barrier", &format!("barrier_{}", self.barrier_no)))
    }

    /// A barrier came back.
    pub(super) fn confirmed(&mut self) {
        if let Some(frames) = self.barriers.pop_front() {
            self.unconfirmed = self.unconfirmed.saturating_sub(frames);
        }
        self.oldest = (!self.barriers.is_empty()).then(Instant::now);
    }

    /// What it has answered was not read: its time begins anew.
    pub(super) fn excuse(&mut self) {
        if let Some(oldest) = &mut self.oldest {
            *oldest = Instant::now();
        }
    }

    /// Whether the oldest barrier has been out for too long.
    pub(super) fn is_silent(&self) -> bool {
        !self.barriers.is_empty() && self.oldest.is_some_and(|since| since.elapsed() > SILENT)
    }
}

/// A frame that a broker acknowledges at once with the position it has for an agent, and shows nobody.
pub(super) fn position_probe(agent: &str, agent_id: &str, msg_id: &str) -> String {
    json!({
        "v": 1, "type": "deliver", "delivery_id": msg_id, "agent_id": agent_id, "agent": agent,
        "msg_id": msg_id, "seq": 0, "mode": "wait", "payload": { "type": "delivery.position", "data": {} },
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_more_than_the_window_is_unconfirmed() {
        let mut pacing = Pacing::default();
        let (mut sent, mut barriers) = (0, 0);
        while pacing.has_room() {
            barriers += u32::from(pacing.sent().is_some());
            sent += 1;
        }
        assert_eq!((sent, barriers), (WINDOW, WINDOW / BARRIER_EVERY));
        pacing.confirmed();
        let mut more = 0;
        while pacing.has_room() {
            pacing.sent();
            more += 1;
        }
        assert_eq!(more, BARRIER_EVERY);
    }
}
