//! Dead letters: reasons for giving up a delivery, and limits of redrives.

use std::time::Duration;

/// Maximum number of redrives of a dead letter, its successors included.
pub const MAX_REDRIVES: i16 = 3;
/// Default and maximum rate of a redrive, in dead letters per second.
pub const REDRIVE_RATE: (i32, i32) = (100, 2000);
/// Minimum and maximum TTL of a delivery, as set by a workspace or a message.
pub const TTL_BOUNDS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(6 * 24 * 3600));

/// Reason for giving up a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::EnumString, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum DeadLetterReason {
    /// The TTL ran out.
    TtlExpired,
    /// The recipient was deleted.
    AgentDeleted,
    /// The recipient's session has ended and cannot be resumed.
    SessionGone,
    /// All allowed attempts failed.
    AttemptsExhausted,
    /// The recipient rejected it permanently.
    Rejected,
    /// It was accepted after the point that Postgres was restored to, and could not be recovered.
    LostInRestore,
}

crate::columns::stored_name!(DeadLetterReason);

impl DeadLetterReason {
    /// Returns the error text for the delivery and its sender when there is no more specific one.
    #[must_use]
    pub const fn default_error(self) -> &'static str {
        match self {
            Self::TtlExpired => "delivery TTL expired",
            Self::AgentDeleted => "the agent was deleted",
            Self::SessionGone => "the session is gone and cannot be resumed",
            Self::AttemptsExhausted => "all attempts failed",
            Self::Rejected => "the receiver refused it",
            Self::LostInRestore => "the database was restored to an older state",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_back() {
        for reason in DeadLetterReason::ALL.iter().copied() {
            assert_eq!(DeadLetterReason::parse(reason.as_str()), Some(reason));
        }
        assert_eq!(DeadLetterReason::parse("nonsense"), None);
    }
}
