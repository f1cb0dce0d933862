//! Bodies of the delivery routes.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{field::Timestamp, words};

/// `GET /v1/deliveries`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct DeliveriesQuery {
    /// Absent: queued and delivered ones.
    #[serde(default)]
    pub status: Option<String>,
    /// How many at most.
    #[serde(default)]
    #[param(value_type = Option<i64>, minimum = 1)]
    pub limit: Option<String>,
}

/// `POST /v1/deliveries/:id/fail`.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct FailBody {
    /// Why.
    #[serde(default)]
    pub error: Option<String>,
    /// Whether trying again could help: it is sent again then, and a dead letter if not. Absent, it is only recorded.
    #[serde(default)]
    pub retryable: Option<bool>,
}

/// `POST /v1/deliveries/:id/defer`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct DeferBody {
    /// Until when: ISO 8601 with a zone.
    #[schema(value_type = Timestamp)]
    pub available_at: DateTime<Utc>,
    /// Why.
    #[serde(default)]
    pub reason: Option<String>,
}

/// A delivery.
#[derive(Debug, Serialize, ToSchema)]
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
    #[schema(value_type = words::DeliveryStatus)]
    pub status: &'static str,
    /// Its position in the recipient's mailbox.
    pub seq: i64,
    /// via_node or self_connected.
    #[schema(value_type = words::LocationType)]
    pub location_type: &'static str,
    /// Where the recipient was.
    pub location_node_id: Option<String>,
    /// The same, for routing.
    pub route_node_id: Option<String>,
    /// The node's kind.
    #[schema(value_type = Option<words::NodeKind>)]
    pub route_node_kind: Option<String>,
    /// The node's role.
    #[schema(value_type = Option<words::NodeRole>)]
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
    #[schema(value_type = words::DeliveryMode)]
    pub mode: &'static str,
    /// Why the recipient gets it, or why it deferred it.
    pub reason: Option<String>,
    /// `normal`.
    #[schema(value_type = words::Priority)]
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
    /// The delivery that has taken its place, if it was sent again.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub redriven_as: Option<String>,
    /// What is delivered.
    pub message: Option<DeliveredMessage>,
}

/// `POST /v1/deliveries/claim`.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct ClaimBody {
    /// How many at most: 1 to 200, 10 when absent.
    #[serde(default)]
    pub limit: Option<i64>,
    /// How long to wait for the first one, in milliseconds: up to 30000, none when absent.
    #[serde(default)]
    pub wait_ms: Option<u64>,
    /// How long they are the caller's own, in milliseconds: 1000 to 43200000, 60000 when absent.
    #[serde(default)]
    pub lease_ms: Option<u64>,
}

/// A delivery that is the caller's own for a while.
#[derive(Debug, Serialize, ToSchema)]
pub struct ClaimedDelivery {
    /// The delivery.
    #[serde(flatten)]
    pub delivery: Delivery,
    /// Nobody else gets it before this.
    pub leased_until: Timestamp,
    /// How often it was claimed, this time included.
    pub claim_count: i32,
}

/// A try to hand a delivery over to an endpoint.
#[derive(Debug, Serialize, ToSchema)]
pub struct DeliveryAttempt {
    /// Its id; later ones are higher.
    pub id: String,
    /// Where it went.
    pub node_id: String,
    /// When it began.
    pub attempted_at: Timestamp,
    /// How long it took.
    pub latency_ms: i32,
    /// The HTTP status; none when no answer came.
    pub status: Option<i16>,
    /// What went wrong.
    pub error: Option<String>,
    /// What began the answer, 1 KiB at most.
    pub answer: Option<String>,
}

/// The message of a delivery.
#[derive(Debug, Serialize, ToSchema)]
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
