//! Request and response bodies of the operator routes.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{field::Timestamp, words};

/// Plan and limits of a workspace.
#[derive(Debug, Serialize, ToSchema)]
pub struct Quotas {
    /// Plan of the workspace.
    #[schema(value_type = words::Plan)]
    pub plan: &'static str,
    /// Overrides of the plan's limits.
    #[schema(value_type = Object, example = json!({ "requests_per_minute": 600 }))]
    pub own: Value,
    /// Effective limits; a quota of null is unlimited.
    #[schema(value_type = Object, example = json!({ "requests_per_minute": 600, "agents": null }))]
    pub limits: Value,
}

/// Body of `PUT /v1/operator/workspaces/:id/quotas`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetQuotasBody {
    /// New plan; keeps the current one when absent.
    #[serde(default)]
    #[schema(value_type = Option<words::Plan>)]
    pub plan: Option<String>,
    /// Overrides of the plan's limits, replaced as a whole: requests_per_minute, agents, channels, nodes, webhooks,
    /// subscriptions, observer_tokens, file_bytes, child_workspaces, mailbox_depth, message_days.
    #[serde(default)]
    #[schema(value_type = Option<Object>, example = json!({ "requests_per_minute": 600 }))]
    pub own: Option<Map<String, Value>>,
}

/// Signing key of observer tokens.
#[derive(Debug, Serialize, ToSchema)]
pub struct SigningKey {
    /// Key id in token headers.
    #[schema(example = "3f2c9a1be07d4c58")]
    pub kid: String,
    /// Ed25519 public key, 32 bytes in hex.
    #[schema(example = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")]
    pub public_key: String,
    /// `true` if the private key is encrypted at rest.
    pub sealed: bool,
    /// `true` if the answering gateway signs with it.
    pub signs: bool,
    /// Time of creation.
    pub created_at: Timestamp,
    /// Time of retirement; tokens signed with the key are invalid since then.
    pub retired_at: Option<Timestamp>,
}
