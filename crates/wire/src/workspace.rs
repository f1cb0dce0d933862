//! Bodies of the workspace routes.

use relay_domain::{ObserverTokenId, WorkspaceId};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    field::{Id, Timestamp, present},
    words,
};

/// `POST /v1/workspaces`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CreateWorkspaceBody {
    /// The name; not unique.
    pub name: String,
    /// What clients keep there.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
    /// When it ends by itself: 60 to 2592000 seconds from now.
    #[serde(default)]
    #[schema(minimum = 60, maximum = 2_592_000)]
    pub expires_in_seconds: Option<i64>,
    /// Who makes it.
    #[serde(default)]
    pub provenance: Option<Provenance>,
}

/// Who makes a workspace.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Provenance {
    /// The kind of tool.
    pub source: ProvenanceSource,
    /// Its own id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin_id: Option<String>,
    /// Whose use this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classification: Option<Classification>,
}

/// The kinds of tools that make workspaces.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the words are the documentation")]
pub enum ProvenanceSource {
    Api,
    Sdk,
    Cli,
    Mcp,
    Ci,
    Relayflow,
    Dashboard,
    Other,
}

/// Whose use a workspace is.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the words are the documentation")]
pub enum Classification {
    Internal,
    External,
    Unknown,
}

/// Answer to `POST /v1/workspaces`.
#[derive(Debug, Serialize, ToSchema)]
pub struct CreatedWorkspace {
    /// The workspace.
    #[schema(value_type = Id)]
    pub workspace_id: WorkspaceId,
    /// Its key, shown to its maker and its owner.
    pub api_key: String,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub expires_at: Option<Timestamp>,
}

/// Answer to `GET /v1/workspaces/by-name/:name`.
#[derive(Debug, Serialize, ToSchema)]
pub struct WorkspaceName {
    /// The workspace.
    #[schema(value_type = Id)]
    pub id: WorkspaceId,
    /// Its name.
    pub name: String,
    /// When it was made.
    pub created_at: Timestamp,
}

/// Answer to `GET` and `PATCH /v1/workspace`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Workspace {
    /// The workspace.
    #[schema(value_type = Id)]
    pub id: WorkspaceId,
    /// Its name.
    pub name: String,
    /// free, pro or enterprise.
    #[schema(value_type = words::Plan)]
    pub plan: String,
    /// What agents are told first.
    pub system_prompt: Option<String>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it ends.
    pub expires_at: Option<Timestamp>,
    /// What clients keep there.
    #[schema(value_type = Object)]
    pub metadata: Value,
    /// Who made it.
    #[schema(value_type = Option<Provenance>)]
    pub provenance: Option<Value>,
    /// How long deliveries live, in seconds, unless a message says otherwise.
    pub delivery_ttl_seconds: i32,
    /// Always empty: some clients insist on the field.
    pub api_key_hash: &'static str,
    /// The caller's observer token, if it is an observer.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, nullable = false, example = "ot_243812500000000001")]
    pub observer_token_id: Option<ObserverTokenId>,
}

/// `PATCH /v1/workspace`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct UpdateWorkspaceBody {
    /// The name.
    #[serde(default)]
    pub name: Option<String>,
    /// What agents are told first; null clears it.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>)]
    pub system_prompt: Option<Option<String>>,
    /// How long deliveries live from now on, in seconds.
    #[serde(default)]
    #[schema(minimum = 60, maximum = 518_400)]
    pub delivery_ttl_seconds: Option<i32>,
    /// Merged key by key; a null deletes its key.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
}
