//! Delays storing acks for clients that re-read a delivery over REST after acking it.
//!
//! `@relaycast/sdk` 5 acks each frame by itself at once. `@agent-relay/sdk` 9 is built on it: it learns of a delivery
//! from `delivery.accepted` and then lists the mailbox to find it. An ack stored at once would often settle the
//! delivery before the list is read, and the client would never see the item. So acks are stored after [`ACK_DELAY`],
//! and at most one list page of deliveries is sent ahead of the stored floor. Used by `flow`.

use std::{collections::VecDeque, time::Duration};

use relay_domain::mailboxes::stream::Seq;
use tokio::time::Instant;

/// Version prefix of nodes that use this client.
pub(super) const REREADING_CLIENT_VERSION: &str = "sdk-typescript/5.";
/// Time that a delivery stays listed after its ack: ample for a list call on a busy machine.
const ACK_DELAY: Duration = Duration::from_secs(3);
/// Maximum frames above the stored floor: the default page of a list call.
const WINDOW: Seq = 100;

/// Acks of one mailbox that are not stored yet.
#[derive(Debug, Default)]
pub(super) struct DelayedAcks {
    waiting: VecDeque<(Instant, Seq)>,
    stored: Seq,
    /// A store is in progress; the next due ack waits for it.
    storing: bool,
}

impl DelayedAcks {
    /// Starts at this floor.
    pub(super) const fn open_at(&mut self, floor: Seq) {
        self.stored = floor;
    }

    /// Returns whether a frame may follow the last one sent.
    pub(super) const fn has_room(&self, sent: Seq) -> bool {
        sent - self.stored < WINDOW
    }

    /// Adds an ack of everything up to `floor`.
    pub(super) fn add(&mut self, floor: Seq, now: Instant) {
        self.waiting.push_back((now + ACK_DELAY, floor));
    }

    /// Returns the floor to store now, if any, and marks it as in progress.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<Seq> {
        if self.storing {
            return None;
        }
        let mut floor = None;
        // Acks are cumulative, so the last one that is due covers those before it.
        while let Some((_, seq)) = self.waiting.pop_front_if(|(at, _)| *at <= now) {
            floor = Some(seq);
        }
        self.storing = floor.is_some();
        floor
    }

    /// Records that `floor` is stored: a list call no longer returns these deliveries.
    pub(super) fn mark_stored(&mut self, floor: Seq) {
        self.storing = false;
        self.stored = self.stored.max(floor);
    }

    /// Time when the next ack is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.waiting.front().filter(|_| !self.storing).map(|(at, _)| *at)
    }

    /// Returns the last pending ack and its due time. Used when the connection ends.
    pub(super) fn last_pending(&self) -> Option<(Instant, Seq)> {
        self.waiting.back().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acks_are_stored_after_the_delay_and_make_room() {
        let start = Instant::now();
        let mut acks = DelayedAcks::default();
        acks.open_at(7);
        assert!(acks.has_room(7 + WINDOW - 1) && !acks.has_room(7 + WINDOW));
        acks.add(50, start);
        acks.add(60, start + Duration::from_secs(1));
        assert_eq!(acks.take_due(start + Duration::from_secs(2)), None);
        assert!(!acks.has_room(7 + WINDOW), "deliveries above the stored floor are still listed");
        assert_eq!((acks.next_due(), acks.take_due(start + ACK_DELAY)), (Some(start + ACK_DELAY), Some(50)));
        assert!(!acks.has_room(7 + WINDOW) && acks.take_due(start + ACK_DELAY * 2).is_none(), "a store is in progress");
        acks.mark_stored(50);
        assert!(acks.has_room(50 + WINDOW - 1) && !acks.has_room(50 + WINDOW));
        assert_eq!(acks.last_pending(), Some((start + Duration::from_secs(1) + ACK_DELAY, 60)));
    }
}
