//! Workspaces: the [`Workspace`] itself, families ([`family`]), plans with their limits ([`plan`]), rate limits
//! ([`rate_limit`]) and the rules of their metadata ([`metadata`]). Used by the engine's limits and by the store.

pub mod activity;
pub mod family;
pub mod metadata;
pub mod plan;
pub mod rate_limit;
pub mod usage;

use chrono::{DateTime, Utc};
use serde_json::Value;

use self::plan::Plan;
use crate::{WorkspaceId, access::rights::RightSettings};

/// Workspace that is neither deleted nor expired.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct Workspace {
    pub workspace_id: WorkspaceId,
    /// Not unique.
    pub name: String,
    pub plan: Plan,
    /// Instructions for every agent of the workspace.
    pub system_prompt: Option<String>,
    /// Object kept for clients.
    pub metadata: Value,
    /// Origin as reported by the creator.
    pub provenance: Option<Value>,
    pub created_at: DateTime<Utc>,
    pub expires_at: Option<DateTime<Utc>>,
    pub delivery_ttl_seconds: i32,
    /// Time for which the token before an agent's last rotation is accepted.
    pub agent_token_grace_seconds: i32,
    /// Workspace that answers for this one, if it was created with a workspace key.
    pub created_by: Option<WorkspaceId>,
    /// Rights of its agents that deviate from the defaults.
    #[cfg_attr(feature = "sqlx", sqlx(json(nullable)))]
    pub policy: Option<RightSettings>,
}
