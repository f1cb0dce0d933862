//! Bodies of the routes for event subscriptions.

use std::collections::BTreeMap;

use relay_domain::SubscriptionId;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::{field::Timestamp, words};

/// `POST /v1/subscriptions`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct SubscribeBody {
    /// The kinds of events; `*` is all of them.
    #[schema(min_items = 1, max_items = 64, example = json!(["message.created"]))]
    pub events: Vec<String>,
    /// Which of these.
    #[serde(default)]
    pub filter: Option<FilterBody>,
    /// Where they go.
    #[schema(max_length = 2048, example = "https://example.org/hook")]
    pub url: String,
    /// Headers that are sent along.
    #[serde(default)]
    pub headers: Option<BTreeMap<String, String>>,
    /// What calls are signed with.
    #[serde(default)]
    pub secret: Option<String>,
    /// How calls are signed: `relay` when absent, or `standard-webhooks`.
    #[serde(default)]
    pub signature_scheme: Option<String>,
}

/// Which events of the kinds asked for.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct FilterBody {
    /// Only those of this channel.
    #[serde(default)]
    pub channel: Option<String>,
    /// Only those that mention this agent.
    #[serde(default)]
    pub mentions: Option<String>,
}

/// A subscription. Its secret is never shown.
#[derive(Debug, Serialize, ToSchema)]
pub struct Subscription {
    /// The subscription.
    #[schema(value_type = String, example = "sub_243812004871278592")]
    pub id: SubscriptionId,
    /// The kinds of events.
    pub events: Vec<String>,
    /// Which of these.
    #[schema(value_type = Option<Object>)]
    pub filter: Option<Value>,
    /// Where they go.
    pub url: String,
    /// Headers that are sent along; their values are not shown.
    #[schema(value_type = Option<BTreeMap<String, String>>)]
    pub headers: Option<BTreeMap<String, &'static str>>,
    /// How calls are signed, if they are.
    pub signature_scheme: Option<String>,
    /// Whether events are sent. Not after it was switched off because its address is gone or keeps failing.
    pub is_active: bool,
    /// Why it was switched off: `gone` (it answered 410) or `failing`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = "failing")]
    pub disabled_reason: Option<String>,
    /// When it was switched off.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub disabled_at: Option<Timestamp>,
    /// When it was made.
    pub created_at: Timestamp,
}

/// `POST /v1/subscriptions/:id/replay`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ReplayBody {
    /// What was missed since then is sent, as far as events are kept.
    #[schema(value_type = String, format = DateTime, example = "2026-03-01T12:00:00Z")]
    pub since: chrono::DateTime<chrono::Utc>,
}

/// The query of `GET /v1/subscriptions/:id/deliveries`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct DeliveriesQuery {
    /// pending, delivered or dead_letter; all when absent.
    #[serde(default)]
    pub status: Option<String>,
    /// How many at most: 100 unless given, never more than 200.
    #[serde(default)]
    pub limit: Option<String>,
}

/// An event on its way to a subscription's address.
#[derive(Debug, Serialize, ToSchema)]
pub struct SubscriptionDelivery {
    /// Its id.
    pub id: String,
    /// The subscription.
    #[schema(value_type = String, example = "sub_243812004871278592")]
    pub subscription_id: SubscriptionId,
    /// The kind of event.
    pub event_type: String,
    /// pending, delivered or dead_letter.
    #[schema(value_type = words::SubscriptionDeliveryStatus)]
    pub status: String,
    /// How often it was tried.
    pub attempts: i32,
    /// The HTTP status of the last try, if it got one.
    pub last_status_code: Option<i16>,
    /// What went wrong at the last try.
    pub last_error: Option<String>,
    /// When it is tried next.
    pub next_attempt_at: Option<Timestamp>,
    /// When the event happened.
    pub created_at: Timestamp,
    /// When it was last tried or replayed.
    pub updated_at: Option<Timestamp>,
}
