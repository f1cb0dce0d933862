//! Delivery stream of one agent on one connection: decides which frame leaves next.
//!
//! A [`MailboxStream`] is pure: live copies, rows read for repair, heads and acks go in; frames to write, repair
//! requests and the floor to store come out. It upholds invariant 4 of docs/architecture.md: frames leave in seq order,
//! without a gap, and none leaves twice. The gateway's connection task owns one per agent and performs the effects.

use std::collections::BTreeMap;

/// Position in one agent's mailbox. The first delivery is 1; 0 means "none yet".
pub type Seq = i64;

/// Maximum number of frames buffered per agent while an earlier one is missing or the socket is slow. Beyond it, the
/// farthest frame is dropped and read from the store later.
pub const EARLY_LIMIT: usize = 128;

/// Age of a gap at which the store is read, in milliseconds. Gateways that commit for the same agent send copies
/// independently, so live copies overtake each other: by a few milliseconds, and by several ten where each sends a
/// thousand at a time. Reading those costs more than their commit, and their late copies are dropped.
pub const REORDER_WAIT_MS: u64 = 100;

/// The same for a frame of which no live copy is expected, because it was not kept, or existed when the stream opened.
pub const NO_COPY_WAIT_MS: u64 = 20;

/// Permission of the agent's frames to leave on this connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The node has not listed the agent yet, or does not know of it.
    Gated,
    Flowing,
    /// A hint reported that the agent may have moved: nothing leaves until the binding is read again.
    Suspended,
}

/// Outcome of a live copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Buffered; [`MailboxStream::next_frame`] releases it in its turn.
    Kept,
    /// Already sent or already buffered.
    Duplicate,
    /// Dropped: the stream is not open, or its buffer is full. The frame is read from the store later.
    Deferred,
}

/// Ack that moves the floor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack {
    /// New ack floor.
    pub floor: Seq,
    /// `true` if the node acknowledged more than was sent to it.
    pub clamped: bool,
}

/// Delivery state of one agent on one connection. Releases frames in seq order without gaps.
#[derive(Debug)]
pub struct MailboxStream<F> {
    phase: Phase,
    /// Seq of the frame that leaves next.
    next: Seq,
    /// Highest seq known to exist.
    head: Seq,
    /// Highest seq known to exist when the stream opened.
    replay_end: Seq,
    /// Highest seq without a copy to come: it existed when the stream opened, or is known by its head only, or its
    /// frame was dropped.
    no_copy_until: Seq,
    /// Highest seq ever written for this agent, on this or an earlier connection.
    sent: Seq,
    acked: Seq,
    /// Frames from `next` on that wait for an earlier one or for room in the socket.
    early: BTreeMap<Seq, F>,
    /// `true` while a repair is in progress.
    repairing: bool,
    /// Time since which `next` is known to be missing, in the caller's milliseconds.
    gap_since: Option<u64>,
}

impl<F> Default for MailboxStream<F> {
    fn default() -> Self {
        Self::gated()
    }
}

impl<F> MailboxStream<F> {
    /// Creates a stream that releases nothing until [`MailboxStream::open`].
    #[must_use]
    pub const fn gated() -> Self {
        Self {
            phase: Phase::Gated,
            next: 1,
            head: 0,
            replay_end: 0,
            no_copy_until: 0,
            sent: 0,
            acked: 0,
            early: BTreeMap::new(),
            repairing: false,
            gap_since: None,
        }
    }

    /// Opens the stream: the first frame to leave is `start`, the head of the mailbox is `head`, frames up to `sent`
    /// were sent to the node and frames up to `acked` were acknowledged.
    ///
    /// Opening again has no effect; a broker lists its agents every minute.
    pub fn open(&mut self, start: Seq, head: Seq, sent: Seq, acked: Seq) {
        self.head = self.head.max(head);
        if self.phase != Phase::Gated {
            return;
        }
        self.phase = Phase::Flowing;
        self.replay_end = self.head;
        self.no_copy_until = self.head;
        self.next = start.max(1);
        self.sent = sent;
        self.acked = acked;
        let next = self.next;
        self.early.retain(|seq, _| *seq >= next);
    }

    /// Handles a live copy.
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
                    self.no_copy_until = self.no_copy_until.max(*farthest);
                    self.early.pop_last();
                }
                _ => {
                    self.no_copy_until = self.no_copy_until.max(seq);
                    return Arrival::Deferred;
                }
            }
        }
        self.early.insert(seq, frame);
        Arrival::Kept
    }

    /// Handles a head reported by a hint or by the silence check.
    pub fn on_head(&mut self, head: Seq) {
        self.head = self.head.max(head);
        self.no_copy_until = self.no_copy_until.max(head);
    }

    /// Handles the rows of a repair, in ascending order from the requested seq.
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
        // Where one copy was missing, those of later pages are likely to be.
        self.no_copy_until = self.no_copy_until.max(self.head);
    }

    /// Drops buffered frames to free their memory. They are read from the store again.
    pub fn drop_frames(&mut self, is_dropped: impl Fn(&F) -> bool) {
        let no_copy_until = &mut self.no_copy_until;
        self.early.retain(|seq, frame| {
            let is_kept = !is_dropped(frame);
            if !is_kept {
                *no_copy_until = (*no_copy_until).max(*seq);
            }
            is_kept
        });
    }

    /// Handles a failed repair. It will be requested again.
    pub fn on_repair_failed(&mut self) {
        // `gap_since` stays: the frame has been missing for long enough, so the next request need not wait again.
        self.repairing = false;
    }

    /// Returns the frame that would leave now, without taking it.
    #[must_use]
    pub fn ready_frame(&self) -> Option<&F> {
        if self.phase == Phase::Flowing { self.early.get(&self.next) } else { None }
    }

    /// Returns the frame that may leave now, or `None` if there is none or the stream is suspended.
    pub fn next_frame(&mut self) -> Option<(Seq, F)> {
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

    /// Returns the seq from which to read the store if a repair is due: the next frame exists, is not buffered, and has
    /// been missing for [`REORDER_WAIT_MS`] or [`NO_COPY_WAIT_MS`]. Marks the repair as in progress.
    pub fn request_repair(&mut self, now_ms: u64) -> Option<Seq> {
        let missing = self.phase == Phase::Flowing
            && !self.repairing
            && self.next <= self.head
            && !self.early.contains_key(&self.next);
        if !missing {
            return None;
        }
        // Later frames suggest a reordering that resolves itself; without any, the frame is lost.
        if !self.early.is_empty() {
            let since = *self.gap_since.get_or_insert(now_ms);
            let wait = if self.next <= self.no_copy_until { NO_COPY_WAIT_MS } else { REORDER_WAIT_MS };
            if now_ms.saturating_sub(since) < wait {
                return None;
            }
        }
        self.repairing = true;
        Some(self.next)
    }

    /// Returns whether a frame is missing, so that the caller checks [`MailboxStream::request_repair`] again soon.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.phase == Phase::Flowing && self.next <= self.head
    }

    /// Returns whether the next frame is buffered and only waits for room in the socket.
    #[must_use]
    pub fn has_ready(&self) -> bool {
        self.phase == Phase::Flowing && self.early.contains_key(&self.next)
    }

    /// Handles an ack of everything up to `up_to`. Returns `None` when the floor does not move.
    ///
    /// The ack is clamped to the highest seq sent on this or an earlier connection, so that a faulty client cannot
    /// acknowledge unsent deliveries.
    pub fn on_ack(&mut self, up_to: Seq) -> Option<Ack> {
        // Also taken while suspended: the frames were sent here, and the write is fenced by the agent's location.
        let floor = up_to.min(self.sent);
        if self.phase == Phase::Gated || floor <= self.acked {
            return None;
        }
        self.acked = floor;
        Some(Ack { floor, clamped: floor < up_to })
    }

    /// Stops the release of frames until [`MailboxStream::resume`], because the agent may have moved.
    pub fn suspend(&mut self) {
        if self.phase == Phase::Flowing {
            self.phase = Phase::Suspended;
        }
    }

    /// Resumes after the binding was read again and still names this node and provider.
    pub fn resume(&mut self) {
        if self.phase == Phase::Suspended {
            self.phase = Phase::Flowing;
        }
    }

    /// Returns whether the stream has been opened.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.phase != Phase::Gated
    }

    /// Returns the head at the time of opening. Frames up to it that come from the store are replays; later ones are
    /// repairs, because a live copy was expected.
    #[must_use]
    pub const fn replay_end(&self) -> Seq {
        self.replay_end
    }

    /// Returns the highest seq written for this agent.
    #[must_use]
    pub const fn sent(&self) -> Seq {
        self.sent
    }

    /// Returns the seq that leaves next.
    #[must_use]
    pub const fn next(&self) -> Seq {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drain(stream: &mut MailboxStream<Seq>) -> Vec<Seq> {
        std::iter::from_fn(|| stream.next_frame().map(|(seq, _)| seq)).collect()
    }

    #[test]
    fn nothing_leaves_before_the_stream_opens() {
        let mut stream = MailboxStream::gated();
        assert_eq!(stream.on_live(1, 1), Arrival::Deferred);
        assert_eq!(stream.next_frame(), None);
        stream.open(1, 0, 0, 0);
        assert_eq!(stream.request_repair(0), Some(1), "early frames are read from the store");
    }

    #[test]
    fn a_small_reorder_waits_before_a_repair() {
        let mut stream = MailboxStream::gated();
        stream.open(1, 0, 0, 0);
        stream.on_live(2, 2);
        assert_eq!(stream.request_repair(100), None);
        assert_eq!(stream.request_repair(100 + REORDER_WAIT_MS - 1), None);
        assert_eq!(stream.request_repair(100 + REORDER_WAIT_MS), Some(1));
        assert_eq!(stream.request_repair(1000), None, "one repair at a time");
    }

    #[test]
    fn a_frame_without_a_copy_to_come_waits_shorter() {
        let gap = |prepare: fn(&mut MailboxStream<Seq>)| {
            let mut stream = MailboxStream::gated();
            stream.open(1, 0, 0, 0);
            prepare(&mut stream);
            stream.on_live(200, 200);
            assert_eq!(stream.request_repair(100), None);
            stream.request_repair(100 + NO_COPY_WAIT_MS)
        };
        assert_eq!(gap(|_| {}), None, "its copy may come");
        assert_eq!(gap(|stream| stream.on_head(1)), Some(1), "known by its head");
        let dropped = |stream: &mut MailboxStream<Seq>| {
            stream.on_live(1, 1);
            stream.drop_frames(|_| true);
        };
        assert_eq!(gap(dropped), Some(1), "dropped");
        let deferred = |stream: &mut MailboxStream<Seq>| {
            (2..).take(EARLY_LIMIT).for_each(|seq| assert_eq!(stream.on_live(seq, seq), Arrival::Kept));
            assert_eq!(stream.on_live(199, 199), Arrival::Deferred);
        };
        assert_eq!(gap(deferred), Some(1), "the buffer was full");

        let mut stream = MailboxStream::gated();
        stream.open(1, 1, 0, 0);
        stream.on_live(2, 2);
        assert_eq!(stream.request_repair(100), None);
        assert_eq!(stream.request_repair(100 + NO_COPY_WAIT_MS), Some(1), "it was there before");
    }

    #[test]
    fn a_lost_last_message_is_repaired_at_once_when_the_head_moves() {
        let mut stream: MailboxStream<Seq> = MailboxStream::gated();
        stream.open(4, 3, 3, 3);
        stream.on_head(4);
        assert_eq!(stream.request_repair(0), Some(4));
    }

    #[test]
    fn a_replay_ends_at_the_head_at_the_time_of_opening() {
        let mut stream = MailboxStream::gated();
        stream.on_live(7, 7);
        stream.open(1, 5, 0, 0);
        assert_eq!(stream.replay_end(), 7, "early frames count as replay");
        stream.on_live(9, 9);
        stream.on_head(12);
        stream.open(1, 20, 0, 0);
        stream.suspend();
        stream.resume();
        assert_eq!(stream.replay_end(), 7, "it was opened once");
    }

    #[test]
    fn an_ack_is_monotonic_and_clamped_to_the_sent_position() {
        let mut stream = MailboxStream::gated();
        stream.open(3, 5, 2, 1);
        assert_eq!(stream.on_ack(9), Some(Ack { floor: 2, clamped: true }));
        assert_eq!(stream.on_ack(2), None);
        assert_eq!(stream.on_ack(1), None);
        stream.on_rows([(3, 3)]);
        assert_eq!(drain(&mut stream), [3]);
        assert_eq!(stream.on_ack(3), Some(Ack { floor: 3, clamped: false }));
    }

    #[test]
    fn a_suspended_stream_buffers_frames() {
        let mut stream = MailboxStream::gated();
        stream.open(1, 0, 0, 0);
        stream.suspend();
        assert_eq!(stream.on_live(1, 1), Arrival::Kept);
        assert_eq!(stream.next_frame(), None);
        stream.resume();
        assert_eq!(drain(&mut stream), [1]);
    }

    /// Events of a stream, in any order.
    #[derive(Debug, Clone)]
    enum Event {
        Live(Seq),
        Head,
        Take,
        /// Requests a repair; the store returns a page of this size, or fails (0).
        Repair(usize),
        /// Drops the frames whose seq is a multiple of this.
        Drop(Seq),
        Suspend,
        Resume,
    }

    fn event(last: Seq) -> impl Strategy<Value = Event> {
        prop_oneof![
            6 => (1..=last).prop_map(Event::Live),
            1 => Just(Event::Head),
            4 => Just(Event::Take),
            3 => (0..60usize).prop_map(Event::Repair),
            1 => (1..5i64).prop_map(Event::Drop),
            1 => Just(Event::Suspend),
            1 => Just(Event::Resume),
        ]
    }

    proptest! {
        /// Frames leave in the order start, start+1, … without a gap or a repeat, and all of them leave in the end,
        /// however live copies are lost, repeated or reordered.
        #[test]
        fn frames_leave_in_order_exactly_once(
            start in 1..20i64,
            events in proptest::collection::vec(event(400), 0..600),
        ) {
            const LAST: Seq = 400;
            let mut stream = MailboxStream::gated();
            stream.open(start, 0, start - 1, start - 1);
            let mut out = Vec::new();
            let mut now = 0;
            for event in events {
                now += 7;
                match event {
                    Event::Live(seq) => { stream.on_live(seq, seq); }
                    Event::Head => stream.on_head(LAST),
                    Event::Take => out.extend(stream.next_frame().map(|(seq, _)| seq)),
                    Event::Repair(page) => if let Some(from) = stream.request_repair(now) {
                        if page == 0 { stream.on_repair_failed() } else {
                            stream.on_rows((from..=LAST).take(page).map(|seq| (seq, seq)));
                        }
                    },
                    Event::Drop(nth) => stream.drop_frames(|seq| seq % nth == 0),
                    Event::Suspend => stream.suspend(),
                    Event::Resume => stream.resume(),
                }
                prop_assert!(stream.early.len() <= EARLY_LIMIT);
            }
            stream.resume();
            stream.on_head(LAST);
            stream.on_repair_failed();
            while stream.is_behind() {
                now += 7;
                out.extend(drain(&mut stream));
                if let Some(from) = stream.request_repair(now) {
                    stream.on_rows((from..=LAST).take(50).map(|seq| (seq, seq)));
                }
            }
            prop_assert_eq!(out, (start..=LAST).collect::<Vec<_>>());
        }

        /// Acks only move the floor up, and never beyond the sent position.
        #[test]
        fn the_ack_floor_only_rises(acks in proptest::collection::vec(0..60i64, 0..60), upto in 1..50i64) {
            let mut stream = MailboxStream::gated();
            stream.open(1, 0, 0, 0);
            stream.on_rows((1..=upto).map(|seq| (seq, seq)));
            drain(&mut stream);
            let mut floor = 0;
            for ack in acks {
                if let Some(moved) = stream.on_ack(ack) {
                    prop_assert!(moved.floor > floor && moved.floor <= upto);
                    floor = moved.floor;
                }
            }
        }
    }
}
