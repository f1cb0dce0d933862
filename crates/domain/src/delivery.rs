//! What a delivery is and what may become of it.
//!
//! A delivery row is written once. Its state is *derived* from the position of its mailbox and, for
//! rows that were settled or parked one by one, from an [`Exception`]: see [`state_of`].

use std::{fmt, str::FromStr};

/// What a client sees as `status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeliveryState {
    /// Accepted; not written to a socket yet, or deferred.
    Queued,
    /// Written to the node's socket, not acknowledged yet.
    Delivered,
    /// Covered by the ack floor, or acknowledged by REST.
    Acked,
    /// Reported as failed by its recipient.
    Failed,
    /// Expired, or dropped with its agent.
    DeadLettered,
}

/// Why a single row departs from what the floors of its mailbox say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Exception {
    /// Acknowledged alone, by REST.
    Acked,
    /// Reported as failed, by REST.
    Failed,
    /// Put off by its recipient. Not settled: the row still counts as queued.
    Deferred,
    /// Expired, or dropped with its agent.
    DeadLettered,
}

/// How a message asks to be injected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Mode {
    /// When the recipient is ready for it.
    #[default]
    Wait,
    /// At once, interrupting.
    Steer,
}

/// Why the recipient gets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A message in a channel of the recipient.
    Message,
    /// A channel message that names the recipient.
    Mention,
    /// A message in a one-to-one or group conversation.
    Dm,
    /// A reply in a thread.
    ThreadReply,
    /// The outcome of an action that the recipient invoked.
    ActionResult,
    /// A notice of the engine itself.
    Notification,
}

/// What is delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceKind {
    /// A message.
    Message,
    /// The outcome of an action.
    ActionResult,
    /// A notice of the engine itself.
    Notice,
}

/// The code or word means nothing here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a known {what}")]
pub struct Unknown {
    /// What was expected.
    pub what: &'static str,
}

macro_rules! coded {
    ($name:ident, $what:literal, { $($variant:ident = $code:literal, $word:literal;)+ }) => {
        impl $name {
            /// Every value.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The number stored in Postgres.
            #[must_use]
            pub const fn code(self) -> i16 {
                match self { $(Self::$variant => $code),+ }
            }

            /// Reads a stored number.
            ///
            /// # Errors
            /// When the number stands for nothing.
            pub const fn from_code(code: i16) -> Result<Self, Unknown> {
                match code { $($code => Ok(Self::$variant),)+ _ => Err(Unknown { what: $what }) }
            }

            /// The word that clients see.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

coded!(Exception, "delivery exception", {
    Acked = 1, "acked";
    Failed = 2, "failed";
    Deferred = 3, "deferred";
    DeadLettered = 4, "dead_lettered";
});
coded!(Mode, "mode", {
    Wait = 0, "wait";
    Steer = 1, "steer";
});
coded!(Reason, "delivery reason", {
    Message = 0, "message";
    Mention = 1, "mention";
    Dm = 2, "dm";
    ThreadReply = 3, "thread-reply";
    ActionResult = 4, "action-result";
    Notification = 5, "notification";
});
coded!(SourceKind, "source kind", {
    Message = 0, "message";
    ActionResult = 1, "action_result";
    Notice = 2, "notice";
});

impl Mode {
    /// The word of a delivery row, which differs from the one on frames and messages.
    #[must_use]
    pub const fn row_word(self) -> &'static str {
        match self {
            Self::Wait => "immediate",
            Self::Steer => "next-tool-call",
        }
    }
}

impl FromStr for Mode {
    type Err = Unknown;

    fn from_str(word: &str) -> Result<Self, Unknown> {
        match word {
            "wait" => Ok(Self::Wait),
            "steer" => Ok(Self::Steer),
            _ => Err(Unknown { what: "mode" }),
        }
    }
}

impl DeliveryState {
    /// The word that clients see.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Delivered => "delivered",
            Self::Acked => "acked",
            Self::Failed => "failed",
            Self::DeadLettered => "dead_lettered",
        }
    }
}

impl FromStr for DeliveryState {
    type Err = Unknown;

    /// Reads a `status=` filter. The words of old engines, `accepted` and `deferred`, mean queued.
    fn from_str(word: &str) -> Result<Self, Unknown> {
        match word {
            "queued" | "accepted" | "deferred" => Ok(Self::Queued),
            "delivered" => Ok(Self::Delivered),
            "acked" => Ok(Self::Acked),
            "failed" => Ok(Self::Failed),
            "dead_lettered" => Ok(Self::DeadLettered),
            _ => Err(Unknown { what: "delivery status" }),
        }
    }
}

impl fmt::Display for DeliveryState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Exception {
    /// Whether the row needs nothing more from its recipient.
    #[must_use]
    pub const fn is_settled(self) -> bool {
        !matches!(self, Self::Deferred)
    }
}

/// The state of the row `seq` in a mailbox that has written up to `sent_seq` and is acknowledged up
/// to `ack_floor`.
///
/// A dead letter stays one whatever the floor says later, and an acknowledged row stays acknowledged;
/// a failed row below the floor counts as acknowledged, since its recipient did ack it in the end.
#[must_use]
pub const fn state_of(seq: i64, sent_seq: i64, ack_floor: i64, exception: Option<Exception>) -> DeliveryState {
    match exception {
        Some(Exception::DeadLettered) => DeliveryState::DeadLettered,
        Some(Exception::Acked) => DeliveryState::Acked,
        _ if seq <= ack_floor => DeliveryState::Acked,
        Some(Exception::Failed) => DeliveryState::Failed,
        Some(Exception::Deferred) => DeliveryState::Queued,
        None if seq <= sent_seq => DeliveryState::Delivered,
        None => DeliveryState::Queued,
    }
}

/// What a recipient asks for by REST.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// It is done with the row.
    Ack,
    /// It could not handle the row.
    Fail,
    /// It wants the row later.
    Defer,
}

/// What a request makes of a row; `None` when the row stays as it is, which is a success too.
///
/// A failed row that the settled floor has passed cannot be deferred: that would be a redrive, with
/// a seq of its own.
#[must_use]
pub const fn on_request(state: DeliveryState, below_settled_floor: bool, request: Request) -> Option<Exception> {
    use DeliveryState::{Acked, DeadLettered, Delivered, Failed, Queued};
    match (state, request) {
        (Acked | DeadLettered, _) | (Failed, Request::Fail) => None,
        (Queued | Delivered | Failed, Request::Ack) => Some(Exception::Acked),
        (Queued | Delivered, Request::Fail) => Some(Exception::Failed),
        (Queued | Delivered, Request::Defer) => Some(Exception::Deferred),
        (Failed, Request::Defer) if below_settled_floor => None,
        (Failed, Request::Defer) => Some(Exception::Deferred),
    }
}

/// How far a settled floor reaches when the rows `settled` (ascending, repeats allowed) are settled
/// one by one.
#[must_use]
pub fn extend_floor(floor: i64, settled: impl IntoIterator<Item = i64>) -> i64 {
    let mut floor = floor;
    for seq in settled {
        if seq > floor + 1 {
            break;
        }
        floor = floor.max(seq);
    }
    floor
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_state_follows_from_the_floors_and_the_exception() {
        use DeliveryState as S;
        use Exception as E;
        // (seq, sent_seq, ack_floor, exception) → state
        let table = [
            (1, 0, 0, None, S::Queued),
            (1, 1, 0, None, S::Delivered),
            (1, 1, 1, None, S::Acked),
            (2, 1, 1, None, S::Queued),
            // An ack reaches Postgres before the record of what was sent.
            (1, 0, 1, None, S::Acked),
            (2, 2, 0, Some(E::Acked), S::Acked),
            (2, 0, 0, Some(E::Failed), S::Failed),
            (2, 2, 2, Some(E::Failed), S::Acked),
            (2, 2, 0, Some(E::Deferred), S::Queued),
            (2, 2, 2, Some(E::Deferred), S::Acked),
            (2, 2, 0, Some(E::DeadLettered), S::DeadLettered),
            (2, 2, 2, Some(E::DeadLettered), S::DeadLettered),
        ];
        for (seq, sent, floor, exception, expected) in table {
            assert_eq!(state_of(seq, sent, floor, exception), expected, "{seq} {sent} {floor} {exception:?}");
        }
    }

    #[test]
    fn a_request_moves_a_row_as_the_contract_says() {
        use DeliveryState as S;
        use Exception as E;
        let table = [
            (S::Queued, Request::Ack, Some(E::Acked)),
            (S::Delivered, Request::Ack, Some(E::Acked)),
            (S::Failed, Request::Ack, Some(E::Acked)),
            (S::Acked, Request::Ack, None),
            (S::DeadLettered, Request::Ack, None),
            (S::Queued, Request::Fail, Some(E::Failed)),
            (S::Delivered, Request::Fail, Some(E::Failed)),
            (S::Failed, Request::Fail, None),
            (S::Acked, Request::Fail, None),
            (S::DeadLettered, Request::Fail, None),
            (S::Queued, Request::Defer, Some(E::Deferred)),
            (S::Delivered, Request::Defer, Some(E::Deferred)),
            (S::Failed, Request::Defer, Some(E::Deferred)),
            (S::Acked, Request::Defer, None),
            (S::DeadLettered, Request::Defer, None),
        ];
        for (state, request, expected) in table {
            assert_eq!(on_request(state, false, request), expected, "{state} {request:?}");
        }
        assert_eq!(on_request(S::Failed, true, Request::Defer), None, "that would be a redrive");
    }

    #[test]
    fn a_floor_extends_over_contiguous_rows_only() {
        for (floor, settled, expected) in [
            (0, vec![], 0),
            (0, vec![1], 1),
            (0, vec![2, 3], 0),
            (4, vec![1, 5, 6, 8], 6),
            (4, vec![5, 5, 6], 6),
            (4, vec![2, 3], 4),
        ] {
            assert_eq!(extend_floor(floor, settled.iter().copied()), expected, "{floor} {settled:?}");
        }
    }

    #[test]
    fn codes_read_back() {
        for e in Exception::ALL {
            assert_eq!(Exception::from_code(e.code()), Ok(*e));
        }
        for r in Reason::ALL {
            assert_eq!(Reason::from_code(r.code()), Ok(*r));
        }
        for k in SourceKind::ALL {
            assert_eq!(SourceKind::from_code(k.code()), Ok(*k));
        }
        for m in Mode::ALL {
            assert_eq!((Mode::from_code(m.code()), m.as_str().parse()), (Ok(*m), Ok(*m)));
        }
        assert!(Exception::from_code(0).is_err() && Reason::from_code(6).is_err());
    }

    proptest! {
        /// Whatever is acked or settled stays so when the positions move on.
        #[test]
        fn a_settled_state_never_comes_undone_by_moving_floors(
            seq in 1i64..50, sent in 0i64..50, floor in 0i64..50,
            more_sent in 0i64..50, more_floor in 0i64..50,
            exception in prop::option::of(prop::sample::select(Exception::ALL)),
        ) {
            let before = state_of(seq, sent, floor, exception);
            let after = state_of(seq, sent + more_sent, floor + more_floor, exception);
            match before {
                DeliveryState::Acked | DeliveryState::DeadLettered => prop_assert_eq!(before, after),
                DeliveryState::Failed => prop_assert!(matches!(after, DeliveryState::Failed | DeliveryState::Acked)),
                DeliveryState::Delivered => prop_assert!(matches!(after, DeliveryState::Delivered | DeliveryState::Acked)),
                DeliveryState::Queued => {}
            }
        }

        /// A request either leaves the row alone or leads to a state from which repeating it does nothing.
        #[test]
        fn requests_are_idempotent(
            seq in 1i64..50, sent in 0i64..50, floor in 0i64..50,
            exception in prop::option::of(prop::sample::select(Exception::ALL)),
            request in prop::sample::select(vec![Request::Ack, Request::Fail]),
        ) {
            if let Some(new) = on_request(state_of(seq, sent, floor, exception), false, request) {
                prop_assert_eq!(on_request(state_of(seq, sent, floor, Some(new)), false, request), None);
            }
        }

        /// The floor reaches exactly the last row below which everything is settled.
        #[test]
        fn the_floor_never_passes_an_unsettled_row(
            floor in 0i64..20, settled in prop::collection::btree_set(1i64..60, 0..60),
        ) {
            let reached = extend_floor(floor, settled.iter().copied());
            prop_assert!(reached >= floor);
            prop_assert!((floor + 1..=reached).all(|seq| settled.contains(&seq)));
            prop_assert!(!settled.contains(&(reached + 1)));
        }
    }
}
