//! Request and response bodies of the event subscription routes. Main types: [`SubscribeBody`], [`Subscription`], and
//! [`SubscriptionCall`], the body of a call.

use std::collections::BTreeMap;

use relay_domain::{AgentId, JsonEntries, SubscriptionId, WorkspaceId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::{
    field::{Id, Timestamp},
    words,
};

/// Body of `POST /v1/subscriptions`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct SubscribeBody {
    /// Kinds of events; `*` subscribes to all.
    #[schema(min_items = 1, max_items = 64, example = json!(["message.created"]))]
    pub events: Vec<String>,
    /// Filter on these events.
    #[serde(default)]
    pub filter: Option<FilterBody>,
    /// URL to call.
    #[schema(max_length = 2048, example = "https://example.org/hook")]
    pub url: String,
    /// Custom headers of the calls.
    #[serde(default)]
    pub headers: Option<BTreeMap<String, String>>,
    /// Secret for signing the calls.
    #[serde(default)]
    pub secret: Option<String>,
    /// Signature scheme: `relay` (default) or `standard-webhooks`.
    #[serde(default)]
    pub signature_scheme: Option<String>,
}

/// Filter on the subscribed events.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct FilterBody {
    /// Only events of this channel.
    #[serde(default)]
    pub channel: Option<String>,
    /// Only events that mention this agent.
    #[serde(default)]
    pub mentions: Option<String>,
}

/// Event subscription. Its secret is never shown.
#[derive(Debug, Serialize, ToSchema)]
pub struct Subscription {
    /// Id of the subscription.
    #[schema(value_type = String, example = "sub_243812004871278592")]
    pub id: SubscriptionId,
    /// Subscribed kinds of events.
    pub events: Vec<String>,
    /// Filter on these events.
    #[schema(value_type = Option<Object>)]
    pub filter: Option<Value>,
    /// URL to call.
    pub url: String,
    /// Names of the custom headers; the values are hidden.
    #[schema(value_type = Option<BTreeMap<String, String>>)]
    pub headers: Option<BTreeMap<String, &'static str>>,
    /// Signature scheme, if calls are signed.
    pub signature_scheme: Option<&'static str>,
    /// `true` while events are sent. Cleared when the URL answers 410 or keeps failing.
    pub is_active: bool,
    /// Reason for disabling: `gone` (the URL answered 410) or `failing`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = "failing")]
    pub disabled_reason: Option<&'static str>,
    /// Time of disabling.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub disabled_at: Option<Timestamp>,
    /// Time of creation.
    pub created_at: Timestamp,
    /// Id of the agent that created it; absent for the workspace key.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Id>, nullable = false)]
    pub created_by: Option<AgentId>,
}

/// Body of a call to a subscription's URL.
#[derive(Debug, Serialize)]
pub struct SubscriptionCall<'a> {
    /// Kind of the event.
    #[serde(rename = "type")]
    pub kind: &'a str,
    /// Id of the workspace.
    pub workspace_id: WorkspaceId,
    /// Time of the event.
    pub timestamp: Timestamp,
    /// Data of the event.
    pub data: JsonEntries,
}

/// Body of `POST /v1/subscriptions/:id/replay`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ReplayBody {
    /// Replays the events since this time, as far as they are retained.
    #[schema(value_type = String, format = DateTime, example = "2026-03-01T12:00:00Z")]
    pub since: chrono::DateTime<chrono::Utc>,
}

/// Query of `GET /v1/subscriptions/:id/deliveries`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct DeliveriesQuery {
    /// Status filter: pending, delivered or dead_letter; all when absent.
    #[serde(default)]
    pub status: Option<String>,
    /// Page size: 100 by default, at most 200.
    #[serde(default)]
    pub limit: Option<String>,
}

/// Delivery of an event to a subscription's URL.
#[derive(Debug, Serialize, ToSchema)]
pub struct SubscriptionDelivery {
    /// Id of the delivery.
    pub id: String,
    /// Id of the subscription.
    #[schema(value_type = String, example = "sub_243812004871278592")]
    pub subscription_id: SubscriptionId,
    /// Kind of the event.
    pub event_type: String,
    /// pending, delivered or dead_letter.
    #[schema(value_type = words::SubscriptionDeliveryStatus)]
    pub status: &'static str,
    /// Number of attempts so far.
    pub attempts: i32,
    /// HTTP status of the latest attempt, if there was an answer.
    pub last_status_code: Option<i16>,
    /// Error of the latest attempt.
    pub last_error: Option<String>,
    /// Time of the next attempt.
    pub next_attempt_at: Option<Timestamp>,
    /// Time of the event.
    pub created_at: Timestamp,
    /// Time of the latest attempt or replay.
    pub updated_at: Option<Timestamp>,
}
