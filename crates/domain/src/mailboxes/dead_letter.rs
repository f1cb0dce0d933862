//! Dead letters: reasons for giving up a delivery, and limits of redrives.

use std::time::Duration;

use chrono::{DateTime, Utc};

use super::stream::Seq;
use crate::{AgentId, ChannelId, DeliveryId, NodeId, RedriveId, SourceId};

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

/// Dead letter with its delivery.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct DeadLetter {
    pub agent_id: AgentId,
    /// Name of the recipient; `None` if it was deleted and removed.
    pub agent_name: Option<String>,
    pub seq: Seq,
    /// Id of the message, action result or notice.
    pub source_id: SourceId,
    /// Earlier redrives of the message to this agent.
    pub redrive_no: i16,
    pub channel_id: Option<ChannelId>,
    /// Node of the agent when the delivery was created.
    pub node_id: NodeId,
    pub reason: DeadLetterReason,
    pub error: Option<String>,
    /// Time of dead-lettering.
    pub at: DateTime<Utc>,
    /// Creation of the delivery.
    pub created_at: DateTime<Utc>,
    pub expires_at: DateTime<Utc>,
    pub sender_name: Option<String>,
    /// Seq of the delivery that replaced it.
    pub redriven_seq: Option<Seq>,
    pub redriven_at: Option<DateTime<Utc>>,
}

impl DeadLetter {
    #[must_use]
    pub const fn delivery_id(&self) -> DeliveryId {
        DeliveryId { source: self.source_id, agent: self.agent_id, redrive_no: self.redrive_no }
    }
}

/// Redrive by filter.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct Redrive {
    pub redrive_id: RedriveId,
    /// Dead letters per second.
    pub rate: i32,
    /// Dead letters that matched when it began.
    pub matched: i64,
    pub redriven: i64,
    /// Dead letters that cannot be redriven.
    pub refused: i64,
    pub created_at: DateTime<Utc>,
    pub finished_at: Option<DateTime<Utc>>,
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
