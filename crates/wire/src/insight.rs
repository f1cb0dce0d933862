//! The way of a message.

use serde::Serialize;
use utoipa::ToSchema;

use crate::{field::Timestamp, words};

/// Every step of every delivery of a message.
#[derive(Debug, Serialize, ToSchema)]
pub struct MessageTrace {
    /// The message.
    pub message_id: String,
    /// When it was accepted.
    pub accepted_at: Timestamp,
    /// Its deliveries, by recipient; the first 1000.
    pub deliveries: Vec<DeliveryTrace>,
}

/// The way of one delivery.
#[derive(Debug, Serialize, ToSchema)]
pub struct DeliveryTrace {
    /// The recipient.
    pub agent_id: String,
    /// Its name.
    pub agent_name: String,
    /// Its place in the recipient's mailbox.
    pub seq: i64,
    /// Where the recipient was when it was written.
    pub node_id: String,
    /// queued, delivered, acked, failed or dead_lettered.
    #[schema(value_type = words::DeliveryStatus)]
    pub status: &'static str,
    /// When it becomes a dead letter unless it is settled.
    pub expires_at: Timestamp,
    /// What happened, in order.
    pub steps: Vec<TraceStep>,
}

/// Something that happened to a delivery.
#[derive(Debug, Serialize, ToSchema)]
pub struct TraceStep {
    /// accepted, sent, attempted, acked, failed, deferred or dead_lettered. Sent is written to a socket; attempted is one
    /// call of an http_push node's endpoint, of which the newest 10 of the last 7 days are shown.
    pub step: &'static str,
    /// When; a try: when it began. An ack over a socket is known to the second. Of a frame sent over a socket no time is
    /// kept: it is null.
    pub at: Option<Timestamp>,
    /// Why: what made it a delivery, what went wrong with a try, what the recipient said, or why it died.
    pub reason: Option<String>,
    /// Of a try: the HTTP status, unless no answer came.
    pub status: Option<i16>,
    /// Of a try: how long it took.
    pub latency_ms: Option<i32>,
}
