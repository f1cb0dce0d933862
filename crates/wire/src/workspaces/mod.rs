//! Request and response bodies of the workspace routes. Main types: [`CreateWorkspaceBody`], [`CreatedWorkspace`],
//! [`Workspace`].

pub mod activity;
pub mod health;
pub mod operator;
pub mod usage;

use relay_domain::{
    ObserverTokenId, WorkspaceId,
    access::rights::{RightChanges, RightSettings},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    field::{Id, Timestamp, not_null, present},
    rights::Rights,
    words,
};

/// Body of `POST /v1/workspaces`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CreateWorkspaceBody {
    /// Name of the workspace; not unique.
    pub name: String,
    /// Free-form data of clients: at most 100 keys and 16 KiB, without credentials. Not null.
    #[serde(default, deserialize_with = "not_null")]
    #[schema(value_type = Option<Object>, nullable = false)]
    pub metadata: Option<Map<String, Value>>,
    /// Lifetime: 60 to 2592000 seconds from now; unlimited when absent.
    #[serde(default)]
    #[schema(minimum = 60, maximum = 2_592_000)]
    pub expires_in_seconds: Option<i64>,
    /// Origin of the request.
    #[serde(default)]
    pub provenance: Option<Provenance>,
}

/// Origin of a workspace.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Provenance {
    /// Kind of tool.
    pub source: ProvenanceSource,
    /// Id within the tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin_id: Option<String>,
    /// Classification of the use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classification: Option<Classification>,
}

/// Client that creates a workspace, as its request headers name it.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct Origin {
    /// `X-Relaycast-Origin-Client`.
    #[serde(rename = "origin_client", skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = "@relaycast/sdk")]
    pub client: Option<String>,
    /// `X-Relaycast-Origin-Version`, otherwise `X-SDK-Version`.
    #[serde(rename = "origin_version", skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = "6.0.2")]
    pub version: Option<String>,
    /// `X-Relaycast-Origin-Actor`, in lower case.
    #[serde(rename = "origin_actor", skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub actor: Option<String>,
    /// `X-Agent-Relay-Distinct-Id`.
    #[serde(rename = "origin_distinct_id", skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub distinct_id: Option<String>,
}

/// Origin of a workspace: the declared one with the client that created it.
#[derive(Debug, Serialize, ToSchema)]
pub struct Attribution {
    #[serde(flatten)]
    declared: Provenance,
    #[serde(flatten)]
    origin: Origin,
}

impl Attribution {
    /// Combines a declared provenance with the client of the request; `None` if there is neither. A client that
    /// declares nothing is an SDK: only those send the headers.
    #[must_use]
    pub fn of_request(declared: Option<Provenance>, origin: Origin) -> Option<Self> {
        let is_named = origin.client.is_some() || origin.actor.is_some() || origin.distinct_id.is_some();
        let by_headers =
            || is_named.then_some(Provenance { source: ProvenanceSource::Sdk, origin_id: None, classification: None });
        declared.or_else(by_headers).map(|declared| Self { declared, origin })
    }
}

/// Kind of tool that creates workspaces.
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

/// Classification of a workspace's use.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the words are the documentation")]
pub enum Classification {
    Internal,
    External,
    Unknown,
}

/// Response of `POST /v1/workspaces`.
#[derive(Debug, Serialize, ToSchema)]
pub struct CreatedWorkspace {
    /// Id of the workspace.
    #[schema(value_type = Id)]
    pub workspace_id: WorkspaceId,
    /// API key of the workspace, shown only to its creator and owner.
    pub api_key: String,
    /// Time of creation.
    pub created_at: Timestamp,
    /// Time of expiry; null for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub expires_at: Option<Timestamp>,
}

/// Response of `GET /v1/workspaces/by-name/:name`.
#[derive(Debug, Serialize, ToSchema)]
pub struct WorkspaceName {
    /// Id of the workspace.
    #[schema(value_type = Id)]
    pub id: WorkspaceId,
    /// Name of the workspace.
    pub name: String,
    /// Time of creation.
    pub created_at: Timestamp,
}

/// Response of `GET` and `PATCH /v1/workspace`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Workspace {
    /// Id of the workspace.
    #[schema(value_type = Id)]
    pub id: WorkspaceId,
    /// Name of the workspace.
    pub name: String,
    /// Plan: free, pro or enterprise.
    #[schema(value_type = words::Plan)]
    pub plan: String,
    /// System prompt of the workspace's agents.
    pub system_prompt: Option<String>,
    /// Time of creation.
    pub created_at: Timestamp,
    /// Time of expiry; null for none.
    pub expires_at: Option<Timestamp>,
    /// Free-form data of clients.
    #[schema(value_type = Object)]
    pub metadata: Value,
    /// Origin of the workspace.
    #[schema(value_type = Option<Attribution>)]
    pub provenance: Option<Value>,
    /// Default TTL of deliveries, in seconds.
    pub delivery_ttl_seconds: i32,
    /// Time for which the token before an agent's last rotation is accepted, in seconds; absent if 0.
    #[serde(skip_serializing_if = "is_zero")]
    #[schema(required = false)]
    pub agent_token_grace_seconds: i32,
    /// Rights of its agents that deviate from the defaults.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Rights>, nullable = false)]
    pub policy: Option<RightSettings>,
    /// Always empty; strict clients require the field.
    pub api_key_hash: &'static str,
    /// Id of the caller's observer token, if the caller is an observer.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, nullable = false, example = "ot_243812500000000001")]
    pub observer_token_id: Option<ObserverTokenId>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(seconds: &i32) -> bool {
    *seconds == 0
}

/// Body of `PATCH /v1/workspace`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct UpdateWorkspaceBody {
    /// Name of the workspace.
    #[serde(default)]
    pub name: Option<String>,
    /// System prompt of the workspace's agents; null removes it.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>)]
    pub system_prompt: Option<Option<String>>,
    /// Default TTL of future deliveries, in seconds.
    #[serde(default)]
    #[schema(minimum = 60, maximum = 518_400)]
    pub delivery_ttl_seconds: Option<i32>,
    /// Time for which the token before an agent's last rotation stays valid, in seconds. 0, the default: it ends at once.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 86_400)]
    pub agent_token_grace_seconds: Option<i32>,
    /// Rights of its agents that deviate from the defaults, merged key by key; null of a right removes its deviation,
    /// null removes all of them.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<Rights>)]
    pub policy: Option<Option<RightChanges>>,
    /// Merged into the stored metadata key by key; a null deletes its key. At most 100 keys and 16 KiB after merging,
    /// without credentials. Not null.
    #[serde(default, deserialize_with = "not_null")]
    #[schema(value_type = Option<Object>, nullable = false)]
    pub metadata: Option<Map<String, Value>>,
}
