//! Bodies of the workspace routes.

use relay_domain::WorkspaceId;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::field::{Timestamp, present};

/// `POST /v1/workspaces`.
#[derive(Debug, Deserialize)]
pub struct CreateWorkspaceBody {
    /// The name; not unique.
    pub name: String,
    /// What clients keep there.
    #[serde(default)]
    pub metadata: Option<Map<String, Value>>,
    /// When it ends by itself: 60 to 2592000 seconds from now.
    #[serde(default)]
    pub expires_in_seconds: Option<i64>,
    /// Who makes it.
    #[serde(default)]
    pub provenance: Option<Provenance>,
}

/// Who makes a workspace.
#[derive(Debug, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the words are the documentation")]
pub enum Classification {
    Internal,
    External,
    Unknown,
}

/// Answer to `POST /v1/workspaces`.
#[derive(Debug, Serialize)]
pub struct CreatedWorkspace {
    /// The workspace.
    pub workspace_id: WorkspaceId,
    /// Its key, shown to its maker and its owner.
    pub api_key: String,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
}

/// Answer to `GET /v1/workspaces/by-name/:name`.
#[derive(Debug, Serialize)]
pub struct WorkspaceName {
    /// The workspace.
    pub id: WorkspaceId,
    /// Its name.
    pub name: String,
    /// When it was made.
    pub created_at: Timestamp,
}

/// Answer to `GET` and `PATCH /v1/workspace`.
#[derive(Debug, Serialize)]
pub struct Workspace {
    /// The workspace.
    pub id: WorkspaceId,
    /// Its name.
    pub name: String,
    /// free, pro or enterprise.
    pub plan: String,
    /// What agents are told first.
    pub system_prompt: Option<String>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it ends.
    pub expires_at: Option<Timestamp>,
    /// What clients keep there.
    pub metadata: Value,
    /// Who made it.
    pub provenance: Option<Value>,
    /// Always empty: some clients insist on the field.
    pub api_key_hash: &'static str,
}

/// `PATCH /v1/workspace`.
#[derive(Debug, Deserialize)]
pub struct UpdateWorkspaceBody {
    /// The name.
    #[serde(default)]
    pub name: Option<String>,
    /// What agents are told first; null clears it.
    #[serde(default, deserialize_with = "present")]
    pub system_prompt: Option<Option<String>>,
    /// Merged key by key; a null deletes its key.
    #[serde(default)]
    pub metadata: Option<Map<String, Value>>,
}
