//! Request and response bodies of the delivery routes.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{field::Timestamp, words};

/// Query of `GET /v1/deliveries`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct DeliveriesQuery {
    /// State filter; queued and delivered when absent.
    #[serde(default)]
    pub status: Option<String>,
    /// Maximum number of entries.
    #[serde(default)]
    #[param(value_type = Option<i64>, minimum = 1)]
    pub limit: Option<String>,
}

/// Body of `POST /v1/deliveries/:id/fail`.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct FailBody {
    /// Error text, if there is one.
    #[serde(default)]
    pub error: Option<String>,
    /// `true` redelivers it later, `false` makes it a dead letter; when absent, the failure is only recorded.
    #[serde(default)]
    pub retryable: Option<bool>,
}

/// Body of `POST /v1/deliveries/:id/defer`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct DeferBody {
    /// Time of redelivery: ISO 8601 with a zone.
    #[schema(value_type = Timestamp)]
    pub available_at: DateTime<Utc>,
    /// Reason of the recipient.
    #[serde(default)]
    pub reason: Option<String>,
}

/// Delivery of a message to one recipient.
#[derive(Debug, Serialize, ToSchema)]
pub struct Delivery {
    /// Id of the delivery, `del_…`.
    pub id: String,
    /// Id of the message.
    pub message_id: String,
    /// The message's channel.
    pub channel_id: Option<String>,
    /// Id of the recipient.
    pub agent_id: String,
    /// queued, delivered, acked, failed or dead_lettered.
    #[schema(value_type = words::DeliveryStatus)]
    pub status: &'static str,
    /// Position in the recipient's mailbox.
    pub seq: i64,
    /// via_node or self_connected.
    #[schema(value_type = words::LocationType)]
    pub location_type: &'static str,
    /// Id of the recipient's node at acceptance.
    pub location_node_id: Option<String>,
    /// Id of the node, as in `location_node_id`.
    pub route_node_id: Option<String>,
    /// Kind of the node.
    #[schema(value_type = Option<words::NodeKind>)]
    pub route_node_kind: Option<&'static str>,
    /// Role of the node.
    #[schema(value_type = Option<words::NodeRole>)]
    pub route_node_role: Option<&'static str>,
    /// Adapter of the node's deliveries.
    pub delivery_adapter: Option<String>,
    /// Number of known writes to the node.
    pub dispatch_attempts: i32,
    /// Time of the next attempt, for http_push nodes.
    pub next_attempt_at: Option<Timestamp>,
    /// Error of the latest attempt, for http_push nodes.
    pub last_dispatch_error: Option<String>,
    /// immediate or next-tool-call.
    #[schema(value_type = words::DeliveryMode)]
    pub mode: &'static str,
    /// Reason of the delivery, or the reason for which it was deferred.
    pub reason: Option<String>,
    /// Always `normal`.
    #[schema(value_type = words::Priority)]
    pub priority: &'static str,
    /// `true` if the recipient reported that a retry may succeed.
    pub retryable: Option<bool>,
    /// Error reported by the recipient.
    pub error: Option<String>,
    /// Time until which it is deferred.
    pub available_at: Option<Timestamp>,
    /// Always null.
    pub deadline: Option<Timestamp>,
    /// Time at which it becomes a dead letter.
    pub expires_at: Option<Timestamp>,
    /// Time of delivery; not recorded for sockets.
    pub delivered_at: Option<Timestamp>,
    /// Time of the ack, to the second.
    pub acked_at: Option<Timestamp>,
    /// Time at which it became a dead letter.
    pub dead_lettered_at: Option<Timestamp>,
    /// Time of acceptance.
    pub created_at: Timestamp,
    /// Time of the recipient's latest report.
    pub updated_at: Option<Timestamp>,
    /// Id of the delivery that replaced it in a redrive.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub redriven_as: Option<String>,
    /// The delivered message.
    pub message: Option<DeliveredMessage>,
}

/// Body of `POST /v1/deliveries/claim`.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct ClaimBody {
    /// Maximum number of deliveries: 1 to 200, 10 by default.
    #[serde(default)]
    pub limit: Option<i64>,
    /// Maximum wait for the first delivery in milliseconds: up to 30000, 0 by default.
    #[serde(default)]
    pub wait_ms: Option<u64>,
    /// Length of the lease in milliseconds: 1000 to 43200000, 60000 by default.
    #[serde(default)]
    pub lease_ms: Option<u64>,
}

/// Delivery that is leased to the caller.
#[derive(Debug, Serialize, ToSchema)]
pub struct ClaimedDelivery {
    /// The delivery itself.
    #[serde(flatten)]
    pub delivery: Delivery,
    /// Time at which the lease ends.
    pub leased_until: Timestamp,
    /// Number of claims, including this one.
    pub claim_count: i32,
}

/// Attempt to deliver to an endpoint.
#[derive(Debug, Serialize, ToSchema)]
pub struct DeliveryAttempt {
    /// Id of the attempt; later attempts have higher ids.
    pub id: String,
    /// Id of the node.
    pub node_id: String,
    /// Start of the attempt.
    pub attempted_at: Timestamp,
    /// Duration in milliseconds.
    pub latency_ms: i32,
    /// HTTP status; null without an answer.
    pub status: Option<i16>,
    /// Error text, if there is one.
    pub error: Option<String>,
    /// Beginning of the answer, at most 1 KiB.
    pub answer: Option<String>,
}

/// Message of a delivery.
#[derive(Debug, Serialize, ToSchema)]
pub struct DeliveredMessage {
    /// Id of the message.
    pub id: String,
    /// Id of the channel.
    pub channel_id: String,
    /// Id of the author.
    pub agent_id: Option<String>,
    /// Name of the author.
    pub agent_name: Option<String>,
    /// Address that reached the author when it wrote the message; of direct messages only.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = "ada@box")]
    pub from_address: Option<String>,
    /// Text of the message.
    pub text: String,
    /// Id of the message that the thread starts from; null outside of threads.
    pub thread_id: Option<String>,
    /// Time of acceptance.
    pub created_at: Timestamp,
}
