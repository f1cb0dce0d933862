//! Dead letters: why a delivery was given up, and how often it may be sent again.

use std::time::Duration;

/// How often a letter may be redriven, its successors included.
pub const MAX_REDRIVES: i16 = 3;
/// Letters a second that a redrive sends unless told otherwise, and at most.
pub const REDRIVE_RATE: (i32, i32) = (100, 2000);
/// How long a delivery lives at least and at most: what a workspace or a message may ask for.
pub const TTL_BOUNDS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(6 * 24 * 3600));

/// Why a delivery was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeadReason {
    /// Its time was over.
    TtlExpired,
    /// Its agent was deleted.
    AgentDeleted,
    /// The session that it was for has ended and cannot be resumed.
    SessionGone,
    /// Tried as often as was allowed.
    AttemptsExhausted,
    /// Its receiver refused it for good.
    Rejected,
    /// It was accepted after the state that Postgres was restored to, and could not be recovered.
    LostInRestore,
}

impl DeadReason {
    /// All reasons.
    pub const ALL: [Self; 6] = [
        Self::TtlExpired,
        Self::AgentDeleted,
        Self::SessionGone,
        Self::AttemptsExhausted,
        Self::Rejected,
        Self::LostInRestore,
    ];

    /// The word on the wire and in storage.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::TtlExpired => "ttl_expired",
            Self::AgentDeleted => "agent_deleted",
            Self::SessionGone => "session_gone",
            Self::AttemptsExhausted => "attempts_exhausted",
            Self::Rejected => "rejected",
            Self::LostInRestore => "lost_in_restore",
        }
    }

    /// Reads the word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.as_str() == word)
    }

    /// What the delivery and its sender are told unless there is something more exact.
    #[must_use]
    pub const fn error(self) -> &'static str {
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
        for reason in DeadReason::ALL {
            assert_eq!(DeadReason::parse(reason.as_str()), Some(reason));
        }
        assert_eq!(DeadReason::parse("nonsense"), None);
    }
}
