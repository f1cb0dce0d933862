//! Attempts to hand a delivery to the endpoint of an http_push node. Main types: [`PushAttempt`] and
//! [`AttemptOutcome`]; made by the worker's dispatcher, written by the store.

use chrono::{DateTime, Utc};

use super::mailbox::LeasedMailbox;
use crate::{
    AgentId, AttemptId, DeliveryId, NodeId,
    mailboxes::{MessageLocation, dead_letter::DeadLetterReason, stream::Seq},
};

/// One attempt to hand a delivery over, with its outcome.
#[derive(Debug, Clone)]
pub struct PushAttempt {
    /// The mailbox, as claimed.
    pub mailbox: LeasedMailbox,
    pub delivery_id: DeliveryId,
    /// Position of the delivery.
    pub seq: Seq,
    /// Where the message was posted; `None` for a delivery without a message.
    pub location: Option<MessageLocation>,
    /// The call and its answer.
    pub http: HttpAttempt,
    /// Meaning of its answer for the delivery.
    pub outcome: AttemptOutcome,
    /// New push position of the mailbox, where the floors do not imply it.
    pub pushed_seq: Option<Seq>,
    /// Sender of the message.
    pub sender: Option<AgentId>,
}

/// HTTP request of an attempt, and its answer.
#[derive(Debug, Clone)]
pub struct HttpAttempt {
    pub id: AttemptId,
    /// Time of the call.
    pub started_at: DateTime<Utc>,
    /// Duration of the call in milliseconds.
    pub latency_ms: i32,
    /// HTTP status, if the endpoint answered.
    pub status: Option<i16>,
    /// First bytes of the answer's body, at most `STORED_ANSWER_BYTES`.
    pub answer: Option<Vec<u8>>,
    /// Error text, if it failed.
    pub error: Option<String>,
}

/// Outcome of an attempt for its delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttemptOutcome {
    /// Handed over; not acknowledged yet.
    Delivered,
    /// Handed over and acknowledged.
    Acked,
    /// Deferred until `at`.
    Retry {
        /// Time of the next attempt.
        at: DateTime<Utc>,
        /// Failed attempts so far.
        retry_no: i16,
    },
    /// No further attempt.
    DeadLettered {
        /// Reason for giving it up.
        reason: DeadLetterReason,
    },
    /// The endpoint no longer exists. The delivery is due again when the agent is bound again.
    Disabled {
        /// Failed attempts so far.
        retry_no: i16,
        /// Answer of the endpoint.
        reason: String,
    },
}

/// Whether these attempts may have been written before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordingPass {
    /// No transaction has written them.
    First,
    /// An earlier transaction wrote the same attempts, and the outcome of its commit is unknown.
    Repeated,
}

/// One http_push attempt of a delivery.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct DeliveryAttempt {
    /// Ascends with time.
    pub attempt_id: AttemptId,
    pub node_id: NodeId,
    pub attempted_at: DateTime<Utc>,
    pub latency_ms: i32,
    /// HTTP status; `None` when no response arrived.
    pub status: Option<i16>,
    /// First bytes of the response; failures only.
    pub answer: Option<Vec<u8>>,
    /// `None` when the node accepted the delivery.
    pub error: Option<String>,
}
