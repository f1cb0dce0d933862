//! Workspaces and their tokens as operators see them.

use chrono::{DateTime, Utc};
use relay_domain::{
    NodeId, WorkspaceId, WorkspaceScope,
    access::token::{TokenHash, TokenKind},
    workspaces::plan::Plan,
};

use crate::{
    Store, StoreError, StoreResult,
    decode::{decode_row, decode_rows},
};

/// Workspace in any state, with counts.
#[derive(Debug, Clone, sqlx::FromRow, serde::Serialize)]
pub struct WorkspaceSummary {
    pub workspace_id: WorkspaceId,
    /// Not unique.
    pub name: String,
    pub plan: Plan,
    pub created_at: DateTime<Utc>,
    pub expires_at: Option<DateTime<Utc>>,
    pub suspended_at: Option<DateTime<Utc>>,
    /// Other rows of a deleted workspace may remain until it is erased.
    pub deleted_at: Option<DateTime<Utc>>,
    /// Agents that are not deleted.
    pub agents: i64,
    /// Connected providers.
    pub connected: i64,
}

#[derive(Debug, Clone, sqlx::FromRow, serde::Serialize)]
pub struct RevokedToken {
    pub kind: TokenKind,
    pub workspace_id: WorkspaceId,
    /// Name of the agent, for an agent token.
    pub agent: Option<String>,
    pub node_id: Option<NodeId>,
}

impl Store {
    /// Returns the workspaces with an id above `after`, oldest first; those of one name if it is given.
    pub async fn workspace_summaries(
        &self,
        name: Option<&str>,
        after: WorkspaceId,
        limit: i64,
    ) -> StoreResult<Vec<WorkspaceSummary>> {
        let rows = sqlx::query(
            "SELECT w.workspace_id, w.name, w.plan, w.created_at, w.expires_at, w.suspended_at, w.deleted_at,
                    (SELECT count(*) FROM agents a
                      WHERE a.workspace_id = w.workspace_id AND a.deleted_at IS NULL) AS agents,
                    (SELECT count(*) FROM providers p
                      WHERE p.workspace_id = w.workspace_id AND p.gateway_id IS NOT NULL) AS connected
               FROM workspaces w
              WHERE w.workspace_id > $2 AND ($1::text IS NULL OR w.name = $1)
              ORDER BY w.workspace_id LIMIT $3",
        )
        .bind(name)
        .bind(after)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing workspaces"))?;
        decode_rows("workspaces", &rows)
    }

    /// Adds a key to a workspace. Returns false if it is deleted or expired.
    pub async fn add_workspace_key(&self, scope: WorkspaceScope, key: TokenHash) -> StoreResult<bool> {
        let added = sqlx::query(
            "INSERT INTO tokens (token_hash, kind, workspace_id, created_at)
             SELECT $2, 'workspace', workspace_id, relay_now() FROM workspaces
              WHERE workspace_id = $1 AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > relay_now())",
        )
        .bind(scope.workspace_id())
        .bind(&key.as_bytes()[..])
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("adding a workspace key"))?;
        Ok(added.rows_affected() == 1)
    }

    /// Revokes a token of a workspace, agent or node. Returns `None` if there is no such token; observer tokens are
    /// revoked by their id.
    pub async fn revoke_token(&self, hash: TokenHash) -> StoreResult<Option<RevokedToken>> {
        // Raising the generation refuses sends of the agent that were authenticated before, at their commit.
        let row = sqlx::query(
            "WITH revoked AS (
                DELETE FROM tokens WHERE token_hash = $1 AND kind <> 'observer'
                RETURNING kind, workspace_id, agent_id, node_id
             ), raised AS (
                UPDATE agents a SET token_generation = token_generation + 1 FROM revoked
                 WHERE a.workspace_id = revoked.workspace_id AND a.agent_id = revoked.agent_id
                RETURNING a.name
             )
             SELECT revoked.kind, revoked.workspace_id, (SELECT name FROM raised) AS agent, revoked.node_id FROM revoked",
        )
        .bind(&hash.as_bytes()[..])
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("revoking a token"))?;
        row.map(|row| decode_row("tokens", &row)).transpose()
    }
}
