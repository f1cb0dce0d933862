//! Response of the message trace route.

use serde::Serialize;
use utoipa::ToSchema;

use crate::{field::Timestamp, words};

/// Trace of a message: every step of its deliveries.
#[derive(Debug, Serialize, ToSchema)]
pub struct MessageTrace {
    /// Id of the message.
    pub message_id: String,
    /// Time of acceptance.
    pub accepted_at: Timestamp,
    /// Traces of the deliveries, by recipient; the first 1000.
    pub deliveries: Vec<DeliveryTrace>,
}

/// Trace of one delivery.
#[derive(Debug, Serialize, ToSchema)]
pub struct DeliveryTrace {
    /// Id of the recipient.
    pub agent_id: String,
    /// Name of the recipient.
    pub agent_name: String,
    /// Position in the recipient's mailbox.
    pub seq: i64,
    /// Id of the recipient's node at acceptance.
    pub node_id: String,
    /// queued, delivered, acked, failed or dead_lettered.
    #[schema(value_type = words::DeliveryStatus)]
    pub status: &'static str,
    /// Time at which it becomes a dead letter unless it is settled.
    pub expires_at: Timestamp,
    /// Steps in order.
    pub steps: Vec<TraceStep>,
}

/// Step of a delivery.
#[derive(Debug, Serialize, ToSchema)]
pub struct TraceStep {
    /// accepted, sent, attempted, acked, failed, deferred or dead_lettered. `sent` is a write to a socket; `attempted`
    /// is a request to an http_push node's endpoint, of which the newest 10 of the last 7 days are shown.
    pub step: &'static str,
    /// Time of the step; for an attempt, its start. Acks over a socket are recorded to the second. Null for `sent`,
    /// whose time is not recorded.
    pub at: Option<Timestamp>,
    /// Reason: that of the delivery, the error of an attempt, the recipient's report, or the dead letter reason.
    pub reason: Option<String>,
    /// HTTP status of an attempt, if there was an answer.
    pub status: Option<i16>,
    /// Duration of an attempt in milliseconds.
    pub latency_ms: Option<i32>,
}
