//! Acks of a client that looks up what it was sent, stored a little later.
//!
//! `@relaycast/sdk` 5 acknowledges each frame at once, by itself. `@agent-relay/sdk` 9, which is built on it, is told of
//! a delivery by `delivery.accepted` and then lists the mailbox to find it. Were the ack stored at once, the delivery
//! would often be settled before the list is read, and its item never seen. So it stays listed for a while, and no
//! more is sent than one list shows.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use relay_domain::session::Seq;

/// Nodes of agents whose version begins so are on that client.
pub(super) const LOOKS_UP_VERSION: &str = "sdk-typescript/5.";
/// How long a delivery stays listed after its ack: ample for a list on a crowded machine.
const HELD_FOR: Duration = Duration::from_secs(3);
/// Frames sent whose acks are not stored: what a list shows when it is not asked for more.
const WINDOW: Seq = 100;

/// The acks of one mailbox that wait to be stored.
#[derive(Debug, Default)]
pub(super) struct HeldAcks {
    waiting: VecDeque<(Instant, Seq)>,
    stored: Seq,
    /// Under way to the store: what is due next waits for it.
    storing: bool,
}

impl HeldAcks {
    /// The mailbox is opened behind this floor.
    pub(super) const fn open_at(&mut self, floor: Seq) {
        self.stored = floor;
    }

    /// Whether a frame may follow the one that was sent last.
    pub(super) const fn has_room(&self, sent: Seq) -> bool {
        sent - self.stored < WINDOW
    }

    /// Everything up to here was acknowledged.
    pub(super) fn acked(&mut self, floor: Seq, now: Instant) {
        self.waiting.push_back((now + HELD_FOR, floor));
    }

    /// What is to be stored now, if anything.
    pub(super) fn due(&mut self, now: Instant) -> Option<Seq> {
        if self.storing {
            return None;
        }
        let mut floor = None;
        while let Some((_, seq)) = self.waiting.pop_front_if(|(at, _)| *at <= now) {
            floor = Some(seq);
        }
        self.storing = floor.is_some();
        floor
    }

    /// It is stored: no list shows it any more.
    pub(super) fn stored(&mut self, floor: Seq) {
        self.storing = false;
        self.stored = self.stored.max(floor);
    }

    /// When the next is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.waiting.front().filter(|_| !self.storing).map(|(at, _)| *at)
    }

    /// The last that waits, and when it is due. For a connection that ends.
    pub(super) fn last(&self) -> Option<(Instant, Seq)> {
        self.waiting.back().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acks_are_stored_after_a_while_and_make_room() {
        let start = Instant::now();
        let mut held = HeldAcks::default();
        held.open_at(7);
        assert!(held.has_room(7 + WINDOW - 1) && !held.has_room(7 + WINDOW));
        held.acked(50, start);
        held.acked(60, start + Duration::from_secs(1));
        assert_eq!(held.due(start + Duration::from_secs(2)), None);
        assert!(!held.has_room(7 + WINDOW), "what is not stored is still listed");
        assert_eq!((held.next(), held.due(start + HELD_FOR)), (Some(start + HELD_FOR), Some(50)));
        assert!(!held.has_room(7 + WINDOW) && held.due(start + HELD_FOR * 2).is_none(), "it is on its way");
        held.stored(50);
        assert!(held.has_room(50 + WINDOW - 1) && !held.has_room(50 + WINDOW));
        assert_eq!(held.last(), Some((start + Duration::from_secs(1) + HELD_FOR, 60)));
    }
}
