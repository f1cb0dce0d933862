//! Agent served on a connection: its mailbox stream, and the start of that stream.

use std::time::Duration;

use relay_domain::mailboxes::stream::{MailboxStream, Seq};
use relay_engine::mailboxes::serving::MailboxPosition;
use tokio::time::Instant;

use super::{delayed_acks::DelayedAcks, outbound::OutgoingFrame};

/// Time that a broker has to report its position; silence counts as no position.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum tombstones that a broker without a position is replayed from seq 1 (ADR 0002).
const REPLAY_FROM_ONE: Seq = 100_000;

/// Start of a mailbox stream on this connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// After the ack floor.
    AckFloor,
    /// After this floor, which a reply on this connection contained.
    ReportedFloor(Seq),
    /// After the position that the broker reports.
    Probe,
    /// The same, even if nothing was acked: the database was restored, and the broker may have received more.
    ProbeAlways,
}

/// Outcome of the answer to a position probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PositionAnswer {
    /// The stream is open.
    Opened,
    /// The broker reported a seq that was not sent since the database was restored, which must be verified first.
    AboveSent,
    /// No probe is outstanding.
    Unexpected,
}

/// Position probe, and the mailbox's position when it started.
struct Probe {
    /// None until there was room to send it.
    sent: Option<Instant>,
    position: MailboxPosition,
    /// The answer lies above what was sent and is being verified.
    verifying: bool,
}

pub(super) struct ServedAgent {
    pub(super) name: String,
    pub(super) stream: MailboxStream<OutgoingFrame>,
    /// Ack floor when the stream opened; rows at or below it are tombstones.
    pub(super) floor: Seq,
    /// Highest seq sent on earlier connections: no `delivery.accepted` up to it.
    pub(super) sent_before: Seq,
    /// Already queued for the next round of sending.
    pub(super) queued: bool,
    /// Time when the connection started to serve the agent.
    pub(super) adopted: Instant,
    /// Set for clients whose acks are stored with a delay.
    pub(super) delayed_acks: Option<DelayedAcks>,
    /// Time when a copy has last put the location into doubt, while the stream is suspended.
    suspended_at: Option<Instant>,
    /// Boxed, since it ends soon.
    probe: Option<Box<Probe>>,
    /// Frame whose ack latency is being measured.
    ack_timer: Option<(Seq, Instant)>,
    /// Next seq that [`Self::take_next_change`] has returned.
    reported_next: Seq,
}

impl ServedAgent {
    pub(super) fn new(name: String, now: Instant, delayed_acks: Option<DelayedAcks>) -> Self {
        Self {
            name,
            stream: MailboxStream::gated(),
            floor: 0,
            sent_before: 0,
            queued: false,
            adopted: now,
            delayed_acks,
            suspended_at: None,
            probe: None,
            ack_timer: None,
            reported_next: 0,
        }
    }

    /// Opens the stream, at once or after a probe. Returns whether a probe is due.
    pub(super) fn open(&mut self, start: Start, position: &MailboxPosition) -> bool {
        // Named again, as in each inventory: an open stream knows its position, and only the head may be news.
        if self.stream.is_open() {
            self.stream.on_head(position.next_seq - 1);
            return false;
        }
        // The answer that is awaited decides where the stream starts.
        if self.probe.is_some() {
            return false;
        }
        match start {
            Start::AckFloor => self.open_at(position.ack_floor + 1, position),
            Start::ReportedFloor(floor) => self.open_at(floor + 1, position),
            // Nothing was acknowledged, so every answer would lead to seq 1.
            Start::Probe if position.ack_floor == 0 => self.open_at(1, position),
            Start::Probe | Start::ProbeAlways => {
                self.probe = Some(Box::new(Probe { sent: None, position: position.clone(), verifying: false }));
                return true;
            }
        }
        false
    }

    fn open_at(&mut self, start: Seq, position: &MailboxPosition) {
        self.floor = position.ack_floor;
        self.sent_before = position.sent_seq;
        if let Some(acks) = &mut self.delayed_acks {
            acks.open_at(start - 1);
        }
        // The settled floor may be above all that was sent, since rows are settled over REST and expire as well. A
        // broker that was given it as its position acks it, and that ack must not be clamped.
        let sent = position.sent_seq.max(position.settled_floor.min(start - 1));
        self.stream.open(start, position.next_seq - 1, sent, position.ack_floor);
        // A copy of a moved agent came while the stream was gated: the list that is being read decides.
        if self.suspended_at.is_some() {
            self.stream.suspend();
        }
    }

    /// Handles the first ack after the probe. `may_be_above` says whether the broker may know more than the database.
    pub(super) fn on_probe_answer(&mut self, acked: Seq, may_be_above: bool) -> PositionAnswer {
        // Before the probe has left, and while an answer is verified, an ack answers nothing.
        let Some(probe) = self.probe.as_mut().filter(|probe| probe.sent.is_some() && !probe.verifying) else {
            return PositionAnswer::Unexpected;
        };
        if may_be_above && acked > probe.position.sent_seq {
            probe.verifying = true;
            return PositionAnswer::AboveSent;
        }
        let position = probe.position.clone();
        self.open_at_reported(acked, &position);
        PositionAnswer::Opened
    }

    /// Opens the stream after verification: `position` is the mailbox's current position, `acked` the broker's.
    pub(super) fn on_position_verified(&mut self, acked: Seq, position: &MailboxPosition) {
        if self.probe.as_ref().is_some_and(|probe| probe.verifying) {
            self.open_at_reported(acked, position);
        }
    }

    fn open_at_reported(&mut self, acked: Seq, position: &MailboxPosition) {
        self.probe = None;
        let floor = position.ack_floor;
        let start = match acked {
            // Not behind a gap, which a broker does not accept; frames that it has are acked at once and do no harm
            // (ADR 0002).
            1.. => acked.min(floor) + 1,
            // No position: every version accepts 1 as the first seq, and tombstones lead it to the floor.
            _ if floor <= REPLAY_FROM_ONE => 1,
            _ => floor + 1,
        };
        self.open_at(start, position);
    }

    /// Stops the stream, because the agent may have moved.
    pub(super) fn suspend(&mut self, now: Instant) {
        self.suspended_at = Some(now);
        self.stream.suspend();
    }

    /// Resumes the stream after the location was read again, at or after `asked`. An earlier read does not end the
    /// doubt: it may show the location before the move.
    pub(super) fn resume(&mut self, asked: Instant) {
        if self.suspended_at.take_if(|since| *since <= asked).is_some() {
            self.stream.resume();
        }
    }

    /// Returns whether delayed acks leave room for another frame.
    pub(super) fn may_send(&self) -> bool {
        self.delayed_acks.as_ref().is_none_or(|acks| acks.has_room(self.stream.next() - 1))
    }

    pub(super) const fn is_probing(&self) -> bool {
        self.probe.is_some()
    }

    pub(super) fn probe_is_late(&self, now: Instant) -> bool {
        let unanswered = self.probe.as_ref().filter(|probe| !probe.verifying);
        unanswered.and_then(|probe| probe.sent).is_some_and(|since| now - since >= PROBE_TIMEOUT)
    }

    /// Returns whether the probe is still to be sent.
    pub(super) fn wants_probe(&self) -> bool {
        self.probe.as_ref().is_some_and(|probe| probe.sent.is_none())
    }

    /// Records that the probe was sent.
    pub(super) fn probe_sent(&mut self, now: Instant) {
        if let Some(probe) = &mut self.probe {
            probe.sent = Some(now);
        }
    }

    /// Returns the seq that leaves next if it has changed since the last call.
    pub(super) fn take_next_change(&mut self) -> Option<Seq> {
        let next = self.stream.next();
        (std::mem::replace(&mut self.reported_next, next) != next).then_some(next)
    }

    /// Starts to measure the ack latency of a frame, one frame at a time.
    pub(super) fn start_ack_timer(&mut self, seq: Seq, now: Instant) {
        self.ack_timer.get_or_insert((seq, now));
    }

    /// Returns the ack latency if the ack covers the measured frame.
    pub(super) fn take_ack_latency(&mut self, floor: Seq, now: Instant) -> Option<Duration> {
        self.ack_timer.take_if(|(seq, _)| *seq <= floor).map(|(_, since)| now - since)
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::{AgentId, NodeId, WorkspaceId, WorkspaceScope};

    use super::*;

    /// Mailbox with rows up to 20.
    fn position(ack_floor: Seq) -> MailboxPosition {
        MailboxPosition {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(7)),
            agent_id: AgentId::new(2),
            agent_name: "bob".to_owned(),
            node_id: NodeId::new("n1"),
            provider: None,
            next_seq: 21,
            sent_seq: 15,
            ack_floor,
            settled_floor: ack_floor,
        }
    }

    fn agent() -> ServedAgent {
        ServedAgent::new("bob".to_owned(), Instant::now(), None)
    }

    #[test]
    fn a_stream_opens_behind_the_floor_or_waits_for_the_broker() {
        for (start, ack_floor, opens_at) in [
            (Start::AckFloor, 10, Some(11)),
            (Start::ReportedFloor(12), 10, Some(13)),
            (Start::Probe, 0, Some(1)),
            (Start::Probe, 10, None),
            (Start::ProbeAlways, 0, None),
        ] {
            let mut bob = agent();
            let probes = bob.open(start, &position(ack_floor));
            assert_eq!((probes, bob.is_probing()), (opens_at.is_none(), opens_at.is_none()), "{start:?}");
            assert_eq!(bob.stream.is_open().then(|| bob.stream.next()), opens_at, "{start:?} {ack_floor}");
        }
    }

    #[test]
    fn a_broker_resumes_where_it_says_but_never_beyond_what_was_acked() {
        for (reported, may_be_above, expected, next) in [
            (7, false, PositionAnswer::Opened, Some(8)),
            (14, false, PositionAnswer::Opened, Some(11)),
            // Without a position, tombstones tell it everything up to the floor.
            (0, false, PositionAnswer::Opened, Some(1)),
            (30, false, PositionAnswer::Opened, Some(11)),
            (14, true, PositionAnswer::Opened, Some(11)),
            // The numbers up to 20 were assigned again since the restore.
            (18, true, PositionAnswer::AboveSent, None),
            (30, true, PositionAnswer::AboveSent, None),
        ] {
            let mut bob = agent();
            bob.open(Start::ProbeAlways, &position(10));
            assert_eq!(bob.on_probe_answer(reported, may_be_above), PositionAnswer::Unexpected, "it was not sent yet");
            bob.probe_sent(Instant::now());
            assert_eq!(bob.on_probe_answer(reported, may_be_above), expected, "{reported}");
            assert_eq!(bob.stream.is_open().then(|| bob.stream.next()), next, "{reported}");
        }
    }

    #[test]
    fn an_answer_above_the_head_opens_the_stream_once_storage_has_confirmed_it() {
        let mut bob = agent();
        bob.open(Start::ProbeAlways, &position(10));
        bob.probe_sent(Instant::now());
        bob.on_probe_answer(30, true);
        assert!(!bob.probe_is_late(Instant::now() + PROBE_TIMEOUT), "the broker has answered");
        assert_eq!(bob.on_probe_answer(31, true), PositionAnswer::Unexpected);
        bob.on_position_verified(30, &position(30));
        assert_eq!((bob.stream.is_open(), bob.stream.next()), (true, 31));
    }
}
