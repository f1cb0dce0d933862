//! Window of unconfirmed frames of a broker connection (ADR 0002).
//!
//! A broker's queue of outgoing acks holds 256; above about 600 frames acked at once it deadlocks for good. So a
//! barrier follows every 64 frames: a frame to a name that no agent can have, whose ack confirms that everything
//! before it was received.

use std::time::Duration;

use relay_wire::nodes::frame::encode_event_delivery;
use serde_json::{Map, Value};
use tokio::time::Instant;

/// Maximum unconfirmed frames.
// Half of the acks that the broker's queue holds.
const WINDOW: u32 = 128;
/// Frames between two barriers.
// Half of the window: one half is confirmed while the next is sent.
const BARRIER_EVERY: u32 = 64;
/// A broker that confirms nothing for this long is disconnected.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);
/// Agent name of barriers. Agent names never begin with a dot.
pub(super) const BARRIER_AGENT: &str = ".relay-barrier";
/// Version prefix of brokers that are paced and asked for positions. Other clients are bounded by their socket alone
/// and would not understand these frames.
pub(super) const BROKER_VERSION: &str = "relay-broker/";

/// Window of one broker connection.
#[derive(Debug, Default)]
pub(super) struct Pacing {
    unconfirmed: u32,
    since_barrier: u32,
    /// Number of frames that each outstanding barrier confirms.
    barriers: std::collections::VecDeque<u32>,
    barrier_no: u64,
    oldest: Option<Instant>,
}

impl Pacing {
    /// Returns whether another frame may be sent.
    pub(super) const fn has_room(&self) -> bool {
        self.unconfirmed < WINDOW
    }

    /// Counts a frame. Returns the barrier that must follow it, if one is due.
    pub(super) fn count_frame(&mut self, now: Instant) -> Option<String> {
        self.unconfirmed += 1;
        self.since_barrier += 1;
        self.oldest.get_or_insert(now);
        if self.since_barrier < BARRIER_EVERY {
            return None;
        }
        self.barriers.push_back(std::mem::take(&mut self.since_barrier));
        self.barrier_no += 1;
        Some(position_probe(BARRIER_AGENT, "ag_relay_barrier", &format!("barrier_{}", self.barrier_no)))
    }

    /// Handles the ack of a barrier.
    pub(super) fn on_barrier_ack(&mut self, now: Instant) {
        if let Some(frames) = self.barriers.pop_front() {
            self.unconfirmed = self.unconfirmed.saturating_sub(frames);
        }
        // The next barrier has its full time from now on, since its own time of sending is not kept.
        self.oldest = (!self.barriers.is_empty()).then_some(now);
    }

    /// Restarts the timeout. Called while the socket is not read, when acks cannot arrive.
    pub(super) fn restart_silence_timer(&mut self, now: Instant) {
        if let Some(oldest) = &mut self.oldest {
            *oldest = now;
        }
    }

    /// Returns whether the oldest barrier is overdue.
    pub(super) fn is_silent(&self, now: Instant) -> bool {
        // Frames are confirmed only by a barrier that follows them, so without one their age proves nothing.
        !self.barriers.is_empty() && self.oldest.is_some_and(|since| now - since > SILENCE_TIMEOUT)
    }
}

/// Builds a frame that a broker acks at once with its position of an agent, without showing it to anyone.
pub(super) fn position_probe(agent: &str, agent_id: &str, msg_id: &str) -> String {
    encode_event_delivery(agent_id, agent, msg_id, "delivery.position", &Value::Object(Map::new()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_more_than_the_window_is_unconfirmed() {
        let (now, mut pacing) = (Instant::now(), Pacing::default());
        let (mut sent, mut barriers) = (0, 0);
        while pacing.has_room() {
            barriers += u32::from(pacing.count_frame(now).is_some());
            sent += 1;
        }
        assert_eq!((sent, barriers), (WINDOW, WINDOW / BARRIER_EVERY));
        pacing.on_barrier_ack(now);
        let mut more = 0;
        while pacing.has_room() {
            pacing.count_frame(now);
            more += 1;
        }
        assert_eq!(more, BARRIER_EVERY);
    }
}
