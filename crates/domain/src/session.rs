//! One agent's live delivery on one connection: which frame leaves next.
//!
//! A [`Session`] is pure: live frames, rows read for repair, heads and acks go in; frames to write, a
//! wish to repair and the floor to store come out. It upholds invariant 4: frames leave in seq order
//! without a gap and none leaves twice. The gateway's connection task owns one per agent and performs
//! what it asks for.

use std::collections::BTreeMap;

/// A position in one agent's mailbox. The first delivery is 1; 0 means "none yet".
pub type Seq = i64;

/// Frames held back per agent while an earlier one is missing, or the socket is slow. Past it the
/// farthest is dropped and read again later: the store has it.
pub const EARLY_LIMIT: usize = 128;

/// How long a gap may stand before the store is asked, in milliseconds. Two gateways that commit for
/// one agent publish independently, so live frames overtake each other by a few milliseconds.
pub const REORDER_WAIT_MS: u64 = 20;

/// Whether the agent's frames may flow on this connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The node has not yet been told of, or has not yet listed, this agent.
    Gated,
    Flowing,
    /// A hint says that the agent may have moved: nothing leaves until the binding is read again.
    Suspended,
}

/// What became of a live frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Kept; [`Session::take`] will release it in its turn.
    Kept,
    /// Already sent or already held.
    Duplicate,
    /// Not kept: the session is not open, or its buffer is full. It will be read from the store.
    Deferred,
}

/// An ack that moves the floor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack {
    /// The new floor.
    pub floor: Seq,
    /// Whether the node acknowledged more than was ever sent to it.
    pub clamped: bool,
}

/// One agent's live delivery on one connection. Frames leave in seq order, without a gap.
#[derive(Debug)]
pub struct Session<F> {
    phase: Phase,
    /// The seq that leaves next.
    next: Seq,
    /// The highest seq known to exist.
    head: Seq,
    /// The highest seq known to exist when the session opened.
    resumed_to: Seq,
    /// The highest seq ever written for this agent, on this connection or before.
    sent: Seq,
    acked: Seq,
    /// Frames from `next` on, waiting for an earlier one or for room in the socket.
    early: BTreeMap<Seq, F>,
    /// A repair has been asked for and not answered.
    repairing: bool,
    /// Since when `next` is known to be missing, in the caller's milliseconds.
    gap_since: Option<u64>,
}

impl<F> Default for Session<F> {
    fn default() -> Self {
        Self::gated()
    }
}

impl<F> Session<F> {
    /// A session that lets nothing out until [`Session::open`].
    #[must_use]
    pub const fn gated() -> Self {
        Self {
            phase: Phase::Gated,
            next: 1,
            head: 0,
            resumed_to: 0,
            sent: 0,
            acked: 0,
            early: BTreeMap::new(),
            repairing: false,
            gap_since: None,
        }
    }

    /// Opens the session: the next frame to leave is `start`, the mailbox reaches to `head`, the node
    /// has been sent up to `sent` and has acknowledged up to `acked`.
    ///
    /// Opening again (a broker lists its agents every minute) changes nothing.
    pub fn open(&mut self, start: Seq, head: Seq, sent: Seq, acked: Seq) {
        self.head = self.head.max(head);
        if self.phase != Phase::Gated {
            return;
        }
        self.phase = Phase::Flowing;
        self.resumed_to = self.head;
        self.next = start.max(1);
        self.sent = sent;
        self.acked = acked;
        let next = self.next;
        self.early.retain(|seq, _| *seq >= next);
    }

    /// A frame from the live tail.
    pub fn on_live(&mut self, seq: Seq, frame: F) -> Arrival {
        self.head = self.head.max(seq);
        if self.phase == Phase::Gated {
            return Arrival::Deferred;
        }
        if seq < self.next || self.early.contains_key(&seq) {
            return Arrival::Duplicate;
        }
        if self.early.len() >= EARLY_LIMIT {
            match self.early.last_key_value() {
                Some((farthest, _)) if *farthest > seq => {
                    self.early.pop_last();
                }
                _ => return Arrival::Deferred,
            }
        }
        self.early.insert(seq, frame);
        Arrival::Kept
    }

    /// The mailbox is known to reach to `head`, from a hint or from the silence check.
    pub fn on_head(&mut self, head: Seq) {
        self.head = self.head.max(head);
    }

    /// The answer to a repair: rows in ascending order, beginning with the seq that was asked for.
    pub fn on_rows(&mut self, rows: impl IntoIterator<Item = (Seq, F)>) {
        self.repairing = false;
        self.gap_since = None;
        for (seq, frame) in rows {
            self.head = self.head.max(seq);
            if seq >= self.next {
                self.early.entry(seq).or_insert(frame);
            }
        }
        while self.early.len() > EARLY_LIMIT {
            self.early.pop_last();
        }
    }

    /// The repair could not be made; it will be wanted again.
    pub fn on_repair_failed(&mut self) {
        self.repairing = false;
    }

    /// The frame that may leave now, if any. `None` also while suspended.
    pub fn take(&mut self) -> Option<(Seq, F)> {
        if self.phase != Phase::Flowing {
            return None;
        }
        let frame = self.early.remove(&self.next)?;
        let seq = self.next;
        self.next += 1;
        self.sent = self.sent.max(seq);
        self.gap_since = None;
        Some((seq, frame))
    }

    /// From which seq the store must be read, if it must: the next frame exists, is not here, and has
    /// been missing for [`REORDER_WAIT_MS`]. Asking marks the repair as under way.
    pub fn wants_repair(&mut self, now_ms: u64) -> Option<Seq> {
        let missing = self.phase == Phase::Flowing
            && !self.repairing
            && self.next <= self.head
            && !self.early.contains_key(&self.next);
        if !missing {
            return None;
        }
        // With later frames in hand the missing one is probably on its way; with none, it is not.
        if !self.early.is_empty() {
            let since = *self.gap_since.get_or_insert(now_ms);
            if now_ms.saturating_sub(since) < REORDER_WAIT_MS {
                return None;
            }
        }
        self.repairing = true;
        Some(self.next)
    }

    /// Whether something is missing, so that [`Session::wants_repair`] should be asked again soon.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.phase == Phase::Flowing && self.next <= self.head
    }

    /// Whether the next frame is here and waits for room in the socket only.
    #[must_use]
    pub fn has_ready(&self) -> bool {
        self.phase == Phase::Flowing && self.early.contains_key(&self.next)
    }

    /// The node acknowledges everything up to `up_to`. `None` when the floor does not move.
    ///
    /// Nobody can acknowledge what was never sent: the ack is clamped to the highest seq written on
    /// this connection or recorded as sent before.
    pub fn on_ack(&mut self, up_to: Seq) -> Option<Ack> {
        let floor = up_to.min(self.sent);
        if self.phase == Phase::Gated || floor <= self.acked {
            return None;
        }
        self.acked = floor;
        Some(Ack { floor, clamped: floor < up_to })
    }

    /// Lets nothing out until [`Session::resume`]: the agent may have moved.
    pub fn suspend(&mut self) {
        if self.phase == Phase::Flowing {
            self.phase = Phase::Suspended;
        }
    }

    /// The binding was read again and still names this node and provider.
    pub fn resume(&mut self) {
        if self.phase == Phase::Suspended {
            self.phase = Phase::Flowing;
        }
    }

    /// Whether the session has been opened.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.phase != Phase::Gated
    }

    /// Up to here the mailbox reached when the session opened: what is read from the store is a replay. Beyond it
    /// there should have been a live frame.
    #[must_use]
    pub const fn resumed_to(&self) -> Seq {
        self.resumed_to
    }

    /// The highest seq written for this agent.
    #[must_use]
    pub const fn sent(&self) -> Seq {
        self.sent
    }

    /// The seq that leaves next.
    #[must_use]
    pub const fn next(&self) -> Seq {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drain(session: &mut Session<Seq>) -> Vec<Seq> {
        std::iter::from_fn(|| session.take().map(|(seq, _)| seq)).collect()
    }

    #[test]
    fn nothing_leaves_before_the_session_opens() {
        let mut session = Session::gated();
        assert_eq!(session.on_live(1, 1), Arrival::Deferred);
        assert_eq!(session.take(), None);
        session.open(1, 0, 0, 0);
        assert_eq!(session.wants_repair(0), Some(1), "what came too early is read from the store");
    }

    #[test]
    fn a_small_reorder_waits_before_it_asks_the_store() {
        let mut session = Session::gated();
        session.open(1, 0, 0, 0);
        session.on_live(2, 2);
        assert_eq!(session.wants_repair(100), None);
        assert_eq!(session.wants_repair(100 + REORDER_WAIT_MS), Some(1));
        assert_eq!(session.wants_repair(1000), None, "one repair at a time");
    }

    #[test]
    fn a_lost_last_message_is_wanted_at_once_when_the_head_tells() {
        let mut session: Session<Seq> = Session::gated();
        session.open(4, 3, 3, 3);
        session.on_head(4);
        assert_eq!(session.wants_repair(0), Some(4));
    }

    #[test]
    fn a_replay_reaches_to_where_the_mailbox_did_at_the_opening() {
        let mut session = Session::gated();
        session.on_live(7, 7);
        session.open(1, 5, 0, 0);
        assert_eq!(session.resumed_to(), 7, "what came too early is read as well");
        session.on_live(9, 9);
        session.on_head(12);
        session.open(1, 20, 0, 0);
        session.suspend();
        session.resume();
        assert_eq!(session.resumed_to(), 7, "it was opened once");
    }

    #[test]
    fn an_ack_is_monotonic_and_never_passes_what_was_sent() {
        let mut session = Session::gated();
        session.open(3, 5, 2, 1);
        assert_eq!(session.on_ack(9), Some(Ack { floor: 2, clamped: true }));
        assert_eq!(session.on_ack(2), None);
        assert_eq!(session.on_ack(1), None);
        session.on_rows([(3, 3)]);
        assert_eq!(drain(&mut session), [3]);
        assert_eq!(session.on_ack(3), Some(Ack { floor: 3, clamped: false }));
    }

    #[test]
    fn a_suspended_session_keeps_frames_and_sends_none() {
        let mut session = Session::gated();
        session.open(1, 0, 0, 0);
        session.suspend();
        assert_eq!(session.on_live(1, 1), Arrival::Kept);
        assert_eq!(session.take(), None);
        session.resume();
        assert_eq!(drain(&mut session), [1]);
    }

    /// What can happen to a session, in any order.
    #[derive(Debug, Clone)]
    enum Event {
        Live(Seq),
        Head,
        Take,
        /// Ask for a repair; the store answers with a page of this size, or fails (0).
        Repair(usize),
        Suspend,
        Resume,
    }

    fn event(last: Seq) -> impl Strategy<Value = Event> {
        prop_oneof![
            6 => (1..=last).prop_map(Event::Live),
            1 => Just(Event::Head),
            4 => Just(Event::Take),
            3 => (0..60usize).prop_map(Event::Repair),
            1 => Just(Event::Suspend),
            1 => Just(Event::Resume),
        ]
    }

    proptest! {
        /// Whatever the tail loses, repeats or reorders: what leaves is start, start+1, … without a
        /// gap or a repeat, and in the end everything has left.
        #[test]
        fn frames_leave_in_order_exactly_once(
            start in 1..20i64,
            events in proptest::collection::vec(event(400), 0..600),
        ) {
            const LAST: Seq = 400;
            let mut session = Session::gated();
            session.open(start, 0, start - 1, start - 1);
            let mut out = Vec::new();
            let mut now = 0;
            for event in events {
                now += 7;
                match event {
                    Event::Live(seq) => { session.on_live(seq, seq); }
                    Event::Head => session.on_head(LAST),
                    Event::Take => out.extend(session.take().map(|(seq, _)| seq)),
                    Event::Repair(page) => if let Some(from) = session.wants_repair(now) {
                        if page == 0 { session.on_repair_failed() } else {
                            session.on_rows((from..=LAST).take(page).map(|seq| (seq, seq)));
                        }
                    },
                    Event::Suspend => session.suspend(),
                    Event::Resume => session.resume(),
                }
                prop_assert!(session.early.len() <= EARLY_LIMIT);
            }
            session.resume();
            session.on_head(LAST);
            session.on_repair_failed();
            while session.is_behind() {
                now += 7;
                out.extend(drain(&mut session));
                if let Some(from) = session.wants_repair(now) {
                    session.on_rows((from..=LAST).take(50).map(|seq| (seq, seq)));
                }
            }
            prop_assert_eq!(out, (start..=LAST).collect::<Vec<_>>());
        }

        /// Acks only ever rise, and never pass what was sent.
        #[test]
        fn the_floor_only_rises(acks in proptest::collection::vec(0..60i64, 0..60), upto in 1..50i64) {
            let mut session = Session::gated();
            session.open(1, 0, 0, 0);
            session.on_rows((1..=upto).map(|seq| (seq, seq)));
            drain(&mut session);
            let mut floor = 0;
            for ack in acks {
                if let Some(moved) = session.on_ack(ack) {
                    prop_assert!(moved.floor > floor && moved.floor <= upto);
                    floor = moved.floor;
                }
            }
        }
    }
}
