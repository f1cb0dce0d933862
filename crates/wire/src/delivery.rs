//! Bodies of the delivery routes.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::field::Timestamp;

/// `GET /v1/deliveries`.
#[derive(Debug, Default, Deserialize)]
pub struct DeliveriesQuery {
    /// Absent: queued and delivered ones.
    #[serde(default)]
    pub status: Option<String>,
    /// How many at most.
    #[serde(default)]
    pub limit: Option<String>,
}

/// `POST /v1/deliveries/:id/fail`.
#[derive(Debug, Default, Deserialize)]
pub struct FailBody {
    /// Why.
    #[serde(default)]
    pub error: Option<String>,
    /// Whether trying again could help.
    #[serde(default)]
    pub retryable: Option<bool>,
}

/// `POST /v1/deliveries/:id/defer`.
#[derive(Debug, Deserialize)]
pub struct DeferBody {
    /// Until when: ISO 8601 with a zone.
    pub available_at: DateTime<Utc>,
    /// Why.
    #[serde(default)]
    pub reason: Option<String>,
}

/// A delivery.
#[derive(Debug, Serialize)]
pub struct Delivery {
    /// `del_…`
    pub id: String,
    /// Its message.
    pub message_id: String,
    /// The message's channel.
    pub channel_id: Option<String>,
    /// The recipient.
    pub agent_id: String,
    /// queued, delivered, acked, failed or dead_lettered.
    pub status: &'static str,
    /// Its position in the recipient's mailbox.
    pub seq: i64,
    /// via_node or self_connected.
    pub location_type: &'static str,
    /// Where the recipient was.
    pub location_node_id: Option<String>,
    /// The same, for routing.
    pub route_node_id: Option<String>,
    /// The node's kind.
    pub route_node_kind: Option<String>,
    /// The node's role.
    pub route_node_role: Option<String>,
    /// How deliveries reach the node.
    pub delivery_adapter: Option<String>,
    /// How often it was written to the node, as far as known.
    pub dispatch_attempts: i32,
    /// For nodes that are pushed to.
    pub next_attempt_at: Option<Timestamp>,
    /// For nodes that are pushed to.
    pub last_dispatch_error: Option<String>,
    /// immediate or next-tool-call.
    pub mode: &'static str,
    /// Why the recipient gets it, or why it deferred it.
    pub reason: Option<String>,
    /// `normal`.
    pub priority: &'static str,
    /// Whether trying again could help.
    pub retryable: Option<bool>,
    /// Why it failed.
    pub error: Option<String>,
    /// Until when it was deferred.
    pub available_at: Option<Timestamp>,
    /// Nothing sets one yet.
    pub deadline: Option<Timestamp>,
    /// When it becomes a dead letter.
    pub expires_at: Option<Timestamp>,
    /// Not recorded for sockets.
    pub delivered_at: Option<Timestamp>,
    /// When it was acknowledged, to the second.
    pub acked_at: Option<Timestamp>,
    /// When it became a dead letter.
    pub dead_lettered_at: Option<Timestamp>,
    /// When it was accepted.
    pub created_at: Timestamp,
    /// When its recipient last reported on it.
    pub updated_at: Option<Timestamp>,
    /// What is delivered.
    pub message: Option<DeliveredMessage>,
}

/// The message of a delivery.
#[derive(Debug, Serialize)]
pub struct DeliveredMessage {
    /// The message.
    pub id: String,
    /// Its channel.
    pub channel_id: String,
    /// Its author.
    pub agent_id: Option<String>,
    /// The author's name.
    pub agent_name: Option<String>,
    /// Its text.
    pub text: String,
    /// The root of its thread.
    pub thread_id: Option<String>,
    /// When it was accepted.
    pub created_at: Timestamp,
}
