//! An agent served on a connection: its session, and how it gets to its first frame.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use axum::extract::ws::Utf8Bytes;
use futures::stream::AbortHandle;
use relay_domain::session::{Seq, Session};
use relay_engine::mailbox::Position;

use super::held::HeldAcks;

/// How long a broker has to tell its position; silence counts as none.
const PROBE_WAIT: Duration = Duration::from_secs(2);
/// A broker without a position is replayed to from seq 1 up to this many tombstones (ADR 0002).
const REPLAY_FROM_ONE: Seq = 100_000;

/// Traced frames of an agent whose acks are waited for; of further ones the trace ends with the frame.
const TRACED: usize = 64;

/// A frame on its way out.
pub(super) struct Outgoing {
    pub(super) body: Utf8Bytes,
    /// Of a delivery; none for a tombstone.
    pub(super) delivery_id: Option<String>,
    pub(super) traceparent: Option<String>,
    pub(super) live: bool,
}

/// Where a mailbox's first frame on this connection comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// Behind the ack floor.
    AckFloor,
    /// Behind this floor: a reply on this connection has told it.
    Told(Seq),
    /// The broker is asked first.
    Probe,
    /// The same even for a mailbox of which nothing was acknowledged: the database was restored, and the broker may know more.
    ProbeAnyhow,
}

/// What the answer to a probe leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answered {
    /// The session is open.
    Open,
    /// The broker has had more than the mailbox holds: whether that can be is asked first.
    Above,
    /// Nothing was asked, or the answer is there already.
    Nothing,
}

/// A broker that is asked for an agent's position, and where its mailbox stood then.
struct Probe {
    /// None until there was room for it.
    sent: Option<Instant>,
    position: Position,
    /// The answer lies above the mailbox's head and is being looked into.
    looked_into: bool,
}

/// An agent on a connection.
pub(super) struct Served {
    pub(super) name: String,
    pub(super) session: Session<Outgoing>,
    /// The ack floor when the session opened: what lies below is a tombstone.
    pub(super) floor: Seq,
    /// Sent on earlier connections up to here: no `delivery.accepted` for those.
    pub(super) sent_before: Seq,
    /// Already queued for the next pump.
    pub(super) queued: bool,
    /// When the connection began to serve it.
    pub(super) adopted: Instant,
    /// Acks that are stored later, for clients that need it.
    pub(super) held: Option<HeldAcks>,
    probe: Option<Probe>,
    /// Traced frames that are not acknowledged, oldest first.
    traced: VecDeque<(Seq, String)>,
    /// A frame whose ack is timed.
    timed: Option<(Seq, Instant)>,
    tail: AbortHandle,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.tail.abort();
    }
}

impl Served {
    pub(super) fn new(name: String, tail: AbortHandle) -> Self {
        Self {
            name,
            session: Session::gated(),
            floor: 0,
            sent_before: 0,
            queued: false,
            adopted: Instant::now(),
            held: None,
            probe: None,
            traced: VecDeque::new(),
            timed: None,
            tail,
        }
    }

    /// Opens the session, at once or after asking the broker. Returns whether a probe is due.
    pub(super) fn open(&mut self, start: Start, position: &Position) -> bool {
        if self.session.is_open() {
            self.session.on_head(position.next_seq - 1);
            return false;
        }
        if self.probe.is_some() {
            return false;
        }
        match start {
            Start::AckFloor => self.open_at(position.ack_floor + 1, position),
            Start::Told(floor) => self.open_at(floor + 1, position),
            Start::Probe if position.ack_floor == 0 => self.open_at(1, position),
            Start::Probe | Start::ProbeAnyhow => {
                self.probe = Some(Probe { sent: None, position: position.clone(), looked_into: false });
                return true;
            }
        }
        false
    }

    fn open_at(&mut self, start: Seq, position: &Position) {
        self.floor = position.ack_floor;
        self.sent_before = position.sent_seq;
        if let Some(held) = &mut self.held {
            held.open_at(start - 1);
        }
        let sent = position.sent_seq.max(position.settled_floor.min(start - 1));
        self.session.open(start, position.next_seq - 1, sent, position.ack_floor);
    }

    /// The broker told its position: `acked` is the first ack since the probe. `may_be_above` says whether the broker may
    /// know more than the database.
    pub(super) fn probe_answered(&mut self, acked: Seq, may_be_above: bool) -> Answered {
        let Some(probe) = self.probe.as_mut().filter(|probe| probe.sent.is_some() && !probe.looked_into) else {
            return Answered::Nothing;
        };
        if may_be_above && acked >= probe.position.next_seq {
            probe.looked_into = true;
            return Answered::Above;
        }
        let position = probe.position.clone();
        self.open_told(acked, &position);
        Answered::Open
    }

    /// What was looked into is settled: the mailbox stands there now, and the broker at `acked`.
    pub(super) fn looked_into(&mut self, acked: Seq, position: &Position) {
        if self.probe.as_ref().is_some_and(|probe| probe.looked_into) {
            self.open_told(acked, position);
        }
    }

    fn open_told(&mut self, acked: Seq, position: &Position) {
        self.probe = None;
        let floor = position.ack_floor;
        let start = match acked {
            1.. => acked.min(floor) + 1,
            _ if floor <= REPLAY_FROM_ONE => 1,
            _ => floor + 1,
        };
        self.open_at(start, position);
    }

    /// Whether held acks leave room for another frame.
    pub(super) fn may_send(&self) -> bool {
        self.held.as_ref().is_none_or(|held| held.has_room(self.session.next() - 1))
    }

    pub(super) const fn is_probing(&self) -> bool {
        self.probe.is_some()
    }

    pub(super) fn probe_is_late(&self) -> bool {
        let unanswered = self.probe.as_ref().filter(|probe| !probe.looked_into);
        unanswered.and_then(|probe| probe.sent).is_some_and(|since| since.elapsed() >= PROBE_WAIT)
    }

    /// Whether the broker is still to be asked.
    pub(super) fn wants_probe(&self) -> bool {
        self.probe.as_ref().is_some_and(|probe| probe.sent.is_none())
    }

    /// The probe has gone out.
    pub(super) fn probe_sent(&mut self) {
        if let Some(probe) = &mut self.probe {
            probe.sent = Some(Instant::now());
        }
    }

    /// Notes the span of a traced frame until its ack.
    pub(super) fn trace(&mut self, seq: Seq, span: String) {
        if self.traced.len() < TRACED {
            self.traced.push_back((seq, span));
        }
    }

    /// The spans of traced frames that an ack covers.
    pub(super) fn traced_until(&mut self, floor: Seq) -> Vec<String> {
        let covered = self.traced.iter().take_while(|(seq, _)| *seq <= floor).count();
        self.traced.drain(..covered).map(|(_, span)| span).collect()
    }

    /// Starts timing the ack of a frame, one at a time.
    pub(super) fn time(&mut self, seq: Seq) {
        self.timed.get_or_insert_with(|| (seq, Instant::now()));
    }

    /// The time from frame to ack, if the timed one is covered.
    pub(super) fn timed_until(&mut self, floor: Seq) -> Option<Duration> {
        self.timed.take_if(|(seq, _)| *seq <= floor).map(|(_, since)| since.elapsed())
    }
}
