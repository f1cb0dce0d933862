//! Bodies of the operator routes.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{field::Timestamp, words};

/// What a workspace may use.
#[derive(Debug, Serialize, ToSchema)]
pub struct Quotas {
    /// Its plan.
    #[schema(value_type = words::Plan)]
    pub plan: &'static str,
    /// What differs from the plan.
    #[schema(value_type = Object, example = json!({ "requests_per_minute": 600 }))]
    pub own: Value,
    /// What counts; null is no ceiling.
    #[schema(value_type = Object, example = json!({ "requests_per_minute": 600, "agents": null }))]
    pub limits: Value,
}

/// `PUT /v1/operator/workspaces/:id/quotas`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetQuotasBody {
    /// The plan; absent: as it is.
    #[serde(default)]
    #[schema(value_type = Option<words::Plan>)]
    pub plan: Option<String>,
    /// What differs from the plan, replaced as a whole: requests_per_minute, agents, channels, nodes, webhooks,
    /// subscriptions, observer_tokens, file_bytes, mailbox_depth, message_days.
    #[serde(default)]
    #[schema(value_type = Option<Object>, example = json!({ "requests_per_minute": 600 }))]
    pub own: Option<Map<String, Value>>,
}

/// A key that signs observer tokens.
#[derive(Debug, Serialize, ToSchema)]
pub struct SigningKey {
    /// Its name in token headers.
    #[schema(example = "3f2c9a1be07d4c58")]
    pub kid: String,
    /// Ed25519, 32 bytes in hex.
    #[schema(example = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")]
    pub public_key: String,
    /// Whether its private half is sealed at rest.
    pub sealed: bool,
    /// Whether the gateway that answers signs with it.
    pub signs: bool,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was retired: tokens that it signed are dead.
    pub retired_at: Option<Timestamp>,
}
