//! Delivery states and their derivation.
//!
//! A delivery row is written once. Its state is *derived* from the floors of its mailbox and, for rows that were
//! settled or deferred one by one, from a [`Settlement`]: see [`derive_state`].

use std::{fmt, str::FromStr};

use super::stream::Seq;

/// State of a delivery, the `status` that clients see.
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

/// State of one recipient's row apart from the floors of its mailbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "sqlx", derive(sqlx::Type))]
#[repr(i16)]
pub enum Settlement {
    /// Acknowledged individually, over REST.
    Acked = 1,
    /// Reported as failed, over REST.
    Failed = 2,
    /// Deferred by its recipient. Not settled: the row still counts as queued.
    Deferred = 3,
    /// Expired, or dropped with its agent.
    DeadLettered = 4,
}

/// Requested injection mode of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "sqlx", derive(sqlx::Type))]
#[repr(i16)]
pub enum Mode {
    /// Inject when the recipient is ready.
    #[default]
    Wait = 0,
    /// Inject at once, interrupting the recipient.
    Steer = 1,
}

/// Reason for which the recipient gets a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "sqlx", derive(sqlx::Type))]
#[repr(i16)]
pub enum Reason {
    /// A message in a channel of the recipient.
    Message = 0,
    /// A channel message that names the recipient.
    Mention = 1,
    /// A message in a one-to-one or group conversation.
    Dm = 2,
    ThreadReply = 3,
    /// The outcome of an action that the recipient invoked.
    ActionResult = 4,
    /// A notice of the engine.
    Notification = 5,
}

/// Kind of a delivery's source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "sqlx", derive(sqlx::Type))]
#[repr(i16)]
pub enum SourceKind {
    /// A message of an agent.
    Message = 0,
    /// The outcome of an action.
    ActionResult = 1,
    /// A notice of the engine.
    Notice = 2,
}

/// Error for a code or name without a meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a known {what}")]
pub struct UnknownValue {
    /// Kind of value that was expected.
    pub what: &'static str,
}

macro_rules! stored_code {
    ($name:ident, { $($variant:ident = $word:literal;)+ }) => {
        impl $name {
            /// Every value, in code order.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// Returns the code stored in Postgres.
            #[must_use]
            pub const fn code(self) -> i16 {
                self as i16
            }

            /// Returns the name that clients see.
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

stored_code!(Settlement, {
    Acked = "acked";
    Failed = "failed";
    Deferred = "deferred";
    DeadLettered = "dead_lettered";
});
stored_code!(Mode, {
    Wait = "wait";
    Steer = "steer";
});
stored_code!(Reason, {
    Message = "message";
    Mention = "mention";
    Dm = "dm";
    ThreadReply = "thread-reply";
    ActionResult = "action-result";
    Notification = "notification";
});
stored_code!(SourceKind, {
    Message = "message";
    ActionResult = "action_result";
    Notice = "notice";
});

impl Mode {
    /// Returns the name used in delivery rows, which differs from the one in frames and messages.
    #[must_use]
    pub const fn delivery_word(self) -> &'static str {
        match self {
            Self::Wait => "immediate",
            Self::Steer => "next-tool-call",
        }
    }
}

impl FromStr for Mode {
    type Err = UnknownValue;

    fn from_str(word: &str) -> Result<Self, UnknownValue> {
        match word {
            "wait" => Ok(Self::Wait),
            "steer" => Ok(Self::Steer),
            _ => Err(UnknownValue { what: "mode" }),
        }
    }
}

impl DeliveryState {
    /// Returns the name that clients see.
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
    type Err = UnknownValue;

    /// Parses a `status=` filter. The names of old engines, `accepted` and `deferred`, mean queued.
    fn from_str(word: &str) -> Result<Self, UnknownValue> {
        match word {
            "queued" | "accepted" | "deferred" => Ok(Self::Queued),
            "delivered" => Ok(Self::Delivered),
            "acked" => Ok(Self::Acked),
            "failed" => Ok(Self::Failed),
            "dead_lettered" => Ok(Self::DeadLettered),
            _ => Err(UnknownValue { what: "delivery status" }),
        }
    }
}

impl fmt::Display for DeliveryState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Settlement {
    /// Returns whether the recipient has nothing more to do for the row.
    #[must_use]
    pub const fn is_settled(self) -> bool {
        match self {
            Self::Acked | Self::Failed | Self::DeadLettered => true,
            Self::Deferred => false,
        }
    }
}

/// Derives the state of row `seq` in a mailbox whose frames were written up to `sent_seq` and acknowledged up to
/// `ack_floor`.
///
/// A dead letter and an acknowledged row keep their state whatever the floor does later. A failed row below the floor
/// counts as acknowledged, because its recipient acknowledged it in the end.
#[must_use]
pub const fn derive_state(seq: Seq, sent_seq: Seq, ack_floor: Seq, settlement: Option<Settlement>) -> DeliveryState {
    match settlement {
        Some(Settlement::DeadLettered) => DeliveryState::DeadLettered,
        Some(Settlement::Acked) => DeliveryState::Acked,
        _ if seq <= ack_floor => DeliveryState::Acked,
        Some(Settlement::Failed) => DeliveryState::Failed,
        Some(Settlement::Deferred) => DeliveryState::Queued,
        None if seq <= sent_seq => DeliveryState::Delivered,
        None => DeliveryState::Queued,
    }
}

/// Request of a recipient over REST.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettlementRequest {
    /// The row was handled.
    Ack,
    /// The row could not be handled.
    Fail,
    /// The row is wanted later.
    Defer,
}

/// Returns the settlement that a request leads to, or `None` when the row stays unchanged, which also succeeds.
///
/// A failed row below the settled floor cannot be deferred: that would be a redrive, with a new seq.
#[must_use]
pub const fn apply_request(
    state: DeliveryState,
    below_settled_floor: bool,
    request: SettlementRequest,
) -> Option<Settlement> {
    use DeliveryState::{Acked, DeadLettered, Delivered, Failed, Queued};
    match (state, request) {
        (Acked | DeadLettered, _) | (Failed, SettlementRequest::Fail) => None,
        (Queued | Delivered | Failed, SettlementRequest::Ack) => Some(Settlement::Acked),
        (Queued | Delivered, SettlementRequest::Fail) => Some(Settlement::Failed),
        (Queued | Delivered, SettlementRequest::Defer) => Some(Settlement::Deferred),
        (Failed, SettlementRequest::Defer) if below_settled_floor => None,
        (Failed, SettlementRequest::Defer) => Some(Settlement::Deferred),
    }
}

/// Extends a settled floor over the rows in `settled` (ascending, repeats allowed) that follow it without a gap.
#[must_use]
pub fn extend_floor(floor: Seq, settled: impl IntoIterator<Item = Seq>) -> Seq {
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
    fn the_state_follows_from_the_floors_and_the_settlement() {
        use DeliveryState as S;
        use Settlement as E;
        // (seq, sent_seq, ack_floor, settlement) → state
        let table = [
            (1, 0, 0, None, S::Queued),
            (1, 1, 0, None, S::Delivered),
            (1, 1, 1, None, S::Acked),
            (2, 1, 1, None, S::Queued),
            // The ack was stored before the sent position.
            (1, 0, 1, None, S::Acked),
            (2, 2, 0, Some(E::Acked), S::Acked),
            (2, 0, 0, Some(E::Failed), S::Failed),
            (2, 2, 2, Some(E::Failed), S::Acked),
            (2, 2, 0, Some(E::Deferred), S::Queued),
            (2, 2, 2, Some(E::Deferred), S::Acked),
            (2, 2, 0, Some(E::DeadLettered), S::DeadLettered),
            (2, 2, 2, Some(E::DeadLettered), S::DeadLettered),
        ];
        for (seq, sent, floor, settlement, expected) in table {
            assert_eq!(derive_state(seq, sent, floor, settlement), expected, "{seq} {sent} {floor} {settlement:?}");
        }
    }

    #[test]
    fn a_request_leads_to_the_documented_settlement() {
        use DeliveryState as S;
        use Settlement as E;
        let table = [
            (S::Queued, SettlementRequest::Ack, Some(E::Acked)),
            (S::Delivered, SettlementRequest::Ack, Some(E::Acked)),
            (S::Failed, SettlementRequest::Ack, Some(E::Acked)),
            (S::Acked, SettlementRequest::Ack, None),
            (S::DeadLettered, SettlementRequest::Ack, None),
            (S::Queued, SettlementRequest::Fail, Some(E::Failed)),
            (S::Delivered, SettlementRequest::Fail, Some(E::Failed)),
            (S::Failed, SettlementRequest::Fail, None),
            (S::Acked, SettlementRequest::Fail, None),
            (S::DeadLettered, SettlementRequest::Fail, None),
            (S::Queued, SettlementRequest::Defer, Some(E::Deferred)),
            (S::Delivered, SettlementRequest::Defer, Some(E::Deferred)),
            (S::Failed, SettlementRequest::Defer, Some(E::Deferred)),
            (S::Acked, SettlementRequest::Defer, None),
            (S::DeadLettered, SettlementRequest::Defer, None),
        ];
        for (state, request, expected) in table {
            assert_eq!(apply_request(state, false, request), expected, "{state} {request:?}");
        }
        assert_eq!(apply_request(S::Failed, true, SettlementRequest::Defer), None, "only a redrive does that");
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
    fn stored_codes_never_change() {
        assert_eq!(Settlement::ALL.iter().map(|value| value.code()).collect::<Vec<_>>(), [1, 2, 3, 4]);
        assert_eq!(Reason::ALL.iter().map(|value| value.code()).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
        assert_eq!(SourceKind::ALL.iter().map(|value| value.code()).collect::<Vec<_>>(), [0, 1, 2]);
        for mode in Mode::ALL {
            assert_eq!(mode.as_str().parse(), Ok(*mode));
        }
    }

    proptest! {
        /// Acknowledged and settled states survive any movement of the floors.
        #[test]
        fn a_settled_state_survives_moving_floors(
            seq in 1i64..50, sent in 0i64..50, floor in 0i64..50,
            more_sent in 0i64..50, more_floor in 0i64..50,
            settlement in prop::option::of(prop::sample::select(Settlement::ALL)),
        ) {
            let before = derive_state(seq, sent, floor, settlement);
            let after = derive_state(seq, sent + more_sent, floor + more_floor, settlement);
            match before {
                DeliveryState::Acked | DeliveryState::DeadLettered => prop_assert_eq!(before, after),
                DeliveryState::Failed => prop_assert!(matches!(after, DeliveryState::Failed | DeliveryState::Acked)),
                DeliveryState::Delivered => prop_assert!(matches!(after, DeliveryState::Delivered | DeliveryState::Acked)),
                DeliveryState::Queued => {}
            }
        }

        /// A repeated ack or fail request has no further effect.
        #[test]
        fn requests_are_idempotent(
            seq in 1i64..50, sent in 0i64..50, floor in 0i64..50,
            settlement in prop::option::of(prop::sample::select(Settlement::ALL)),
            request in prop::sample::select(vec![SettlementRequest::Ack, SettlementRequest::Fail]),
        ) {
            if let Some(new) = apply_request(derive_state(seq, sent, floor, settlement), false, request) {
                prop_assert_eq!(apply_request(derive_state(seq, sent, floor, Some(new)), false, request), None);
            }
        }

        /// The floor stops at the first unsettled row.
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
