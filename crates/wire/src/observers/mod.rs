//! Request and response bodies of the observer token routes. Main types: [`CreateObserverTokenBody`],
//! [`ObserverToken`], [`ObserverFilters`].

use chrono::{DateTime, Utc};
use relay_domain::{ObserverTokenId, observers::ScopeSet};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    field::{Timestamp, present},
    words,
};

/// Body of `POST /v1/observer-tokens`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CreateObserverTokenBody {
    /// Name of the token, unique among the workspace's active tokens.
    pub name: String,
    /// Readable kinds of data: at least one of `stream:read`, `messages:read`, ….
    #[schema(value_type = Vec<words::ObserverScope>, min_items = 1, example = json!(["stream:read", "messages:read"]))]
    pub scopes: ScopeSet,
    /// Purpose of the token.
    #[serde(default)]
    pub description: Option<String>,
    /// Filters on the readable data; unknown keys are refused.
    #[serde(default)]
    #[schema(value_type = Option<ObserverFilters>)]
    pub filters: Option<Map<String, Value>>,
    /// Time of expiry, in the future.
    #[serde(default)]
    #[schema(value_type = Option<String>, format = DateTime, example = "2999-01-01T00:00:00.000Z")]
    pub expires_at: Option<DateTime<Utc>>,
}

/// Body of `PATCH /v1/observer-tokens/:id`. Absent fields keep their value.
#[derive(Debug, Deserialize, ToSchema)]
pub struct UpdateObserverTokenBody {
    /// Name of the token.
    #[serde(default)]
    pub name: Option<String>,
    /// Readable kinds of data.
    #[serde(default)]
    #[schema(value_type = Option<Vec<words::ObserverScope>>, min_items = 1, example = json!(["stream:read"]))]
    pub scopes: Option<ScopeSet>,
    /// Purpose of the token; null clears it.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>)]
    pub description: Option<Option<String>>,
    /// Filters, replaced as a whole; null removes them.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<ObserverFilters>)]
    pub filters: Option<Option<Map<String, Value>>>,
    /// Time of expiry; null for none.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>, format = DateTime, example = "2999-01-01T00:00:00.000Z")]
    pub expires_at: Option<Option<DateTime<Utc>>>,
}

/// Observer token.
#[derive(Debug, Serialize, ToSchema)]
pub struct ObserverToken {
    /// Id of the token.
    #[schema(value_type = String, example = "ot_243812500000000001")]
    pub id: ObserverTokenId,
    /// Name of the token.
    pub name: String,
    /// Purpose of the token.
    pub description: Option<String>,
    /// Readable kinds of data.
    #[schema(value_type = Vec<words::ObserverScope>, example = json!(["stream:read", "messages:read"]))]
    pub scopes: Vec<String>,
    /// Filters on the readable data.
    #[schema(value_type = ObserverFilters)]
    pub filters: Value,
    /// active or revoked.
    #[schema(value_type = words::ObserverTokenStatus)]
    pub status: &'static str,
    /// Time of expiry; null for none.
    pub expires_at: Option<Timestamp>,
    /// Time of creation.
    pub created_at: Timestamp,
    /// Time of the last change or rotation.
    pub updated_at: Option<Timestamp>,
    /// Time of revocation.
    pub revoked_at: Option<Timestamp>,
    /// Time of the last use, with a precision of half a minute.
    pub last_used_at: Option<Timestamp>,
    /// Text of the token, shown when it is created and when it is rotated.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = "ot_live_eyJhbGciOiJFZERTQSJ9.eyJqdGkiOiJvdF8xIn0.c2lnbmF0dXJl")]
    pub token: Option<String>,
}

/// Completes stored filters for an answer: direct messages are hidden unless the filters show them.
#[must_use]
pub fn show_filters(mut stored: Value) -> Value {
    if let Value::Object(filters) = &mut stored {
        filters.entry("include_dms").or_insert(Value::Bool(false));
    }
    stored
}

/// Filters of an observer. Absent filters do not limit; lists have 1 to 100 entries.
///
/// Only describes the schema; `relay_domain::observers` parses filters.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ObserverFilters {
    /// Channels by id. A channel passes if this list or `channel_names` contains it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, min_items = 1, max_items = 100, example = json!(["243812004871278600"]))]
    pub channel_ids: Option<Vec<String>>,
    /// Channels by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, min_items = 1, max_items = 100, example = json!(["general"]))]
    pub channel_names: Option<Vec<String>>,
    /// `true` shows direct messages; the scope `dms:read` is required in addition.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = true)]
    pub include_dms: Option<bool>,
    /// Conversations; without effect unless `include_dms` is true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, min_items = 1, max_items = 100, example = json!(["dm_5f0c1a9be7d24c3688aa01f2"]))]
    pub dm_conversation_ids: Option<Vec<String>>,
    /// Authors: data of other authors or without an author is hidden.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, min_items = 1, max_items = 100, example = json!(["243812050000000000"]))]
    pub agent_ids: Option<Vec<String>>,
    /// Kinds of events; applies to the stream and the event log only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, min_items = 1, max_items = 100, example = json!(["message.created"]))]
    pub event_types: Option<Vec<String>>,
    /// Lower bound of the creation time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, format = DateTime, example = "2026-03-01T12:00:00.000Z")]
    pub created_after: Option<String>,
}
