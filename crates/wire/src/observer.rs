//! Bodies of the observer token routes.

use chrono::{DateTime, Utc};
use relay_domain::{ObserverTokenId, observer::ScopeSet};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    field::{Timestamp, present},
    words,
};

/// `POST /v1/observer-tokens`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CreateObserverTokenBody {
    /// The name, unique among the workspace's active tokens.
    pub name: String,
    /// What the token may read: at least one of `stream:read`, `messages:read`, ….
    #[schema(value_type = Vec<words::ObserverScope>, min_items = 1, example = json!(["stream:read", "messages:read"]))]
    pub scopes: ScopeSet,
    /// What it is for.
    #[serde(default)]
    pub description: Option<String>,
    /// Which part of the data it may read; unknown keys are refused.
    #[serde(default)]
    #[schema(value_type = Option<ObserverFilters>)]
    pub filters: Option<Map<String, Value>>,
    /// When it ends by itself; in the future.
    #[serde(default)]
    #[schema(value_type = Option<String>, format = DateTime, example = "2999-01-01T00:00:00.000Z")]
    pub expires_at: Option<DateTime<Utc>>,
}

/// `PATCH /v1/observer-tokens/:id`. What is absent stays.
#[derive(Debug, Deserialize, ToSchema)]
pub struct UpdateObserverTokenBody {
    /// The name.
    #[serde(default)]
    pub name: Option<String>,
    /// What the token may read.
    #[serde(default)]
    #[schema(value_type = Option<Vec<words::ObserverScope>>, min_items = 1, example = json!(["stream:read"]))]
    pub scopes: Option<ScopeSet>,
    /// What it is for; null clears it.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>)]
    pub description: Option<Option<String>>,
    /// Which part of the data it may read, replaced as a whole; null clears it.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<ObserverFilters>)]
    pub filters: Option<Option<Map<String, Value>>>,
    /// When it ends by itself; null: never.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>, format = DateTime, example = "2999-01-01T00:00:00.000Z")]
    pub expires_at: Option<Option<DateTime<Utc>>>,
}

/// An observer token.
#[derive(Debug, Serialize, ToSchema)]
pub struct ObserverToken {
    /// The token.
    #[schema(value_type = String, example = "ot_243812500000000001")]
    pub id: ObserverTokenId,
    /// Its name.
    pub name: String,
    /// What it is for.
    pub description: Option<String>,
    /// What it may read.
    #[schema(value_type = Vec<words::ObserverScope>, example = json!(["stream:read", "messages:read"]))]
    pub scopes: Vec<String>,
    /// Which part of the data it may read.
    #[schema(value_type = ObserverFilters)]
    pub filters: Value,
    /// active or revoked.
    #[schema(value_type = words::ObserverTokenStatus)]
    pub status: &'static str,
    /// When it ends by itself.
    pub expires_at: Option<Timestamp>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was last changed or rotated.
    pub updated_at: Option<Timestamp>,
    /// When it was revoked.
    pub revoked_at: Option<Timestamp>,
    /// When it was last used, to half a minute.
    pub last_used_at: Option<Timestamp>,
    /// Its text, shown when it is made and when it is rotated.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = "ot_live_eyJhbGciOiJFZERTQSJ9.eyJqdGkiOiJvdF8xIn0.c2lnbmF0dXJl")]
    pub token: Option<String>,
}

/// Which part of the data an observer may read. What is absent limits nothing; lists have 1 to 100 entries.
///
/// The type describes; `relay_domain::observer` reads.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ObserverFilters {
    /// Channels by id. A channel passes if this or `channel_names` lists it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, min_items = 1, max_items = 100, example = json!(["243812004871278600"]))]
    pub channel_ids: Option<Vec<String>>,
    /// Channels by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, min_items = 1, max_items = 100, example = json!(["general"]))]
    pub channel_names: Option<Vec<String>>,
    /// Whether direct messages are shown; they need the scope `dms:read` besides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = true)]
    pub include_dms: Option<bool>,
    /// Conversations; means nothing unless `include_dms` is true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, min_items = 1, max_items = 100, example = json!(["dm_5f0c1a9be7d24c3688aa01f2"]))]
    pub dm_conversation_ids: Option<Vec<String>>,
    /// Authors: what nobody, or somebody else, wrote is hidden.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, min_items = 1, max_items = 100, example = json!(["243812050000000000"]))]
    pub agent_ids: Option<Vec<String>>,
    /// Kinds of events; concerns the stream and the event log only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, min_items = 1, max_items = 100, example = json!(["message.created"]))]
    pub event_types: Option<Vec<String>>,
    /// Whatever was created before is hidden.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, format = DateTime, example = "2026-03-01T12:00:00.000Z")]
    pub created_after: Option<String>,
}
