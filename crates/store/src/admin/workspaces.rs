//! Workspaces and their tokens as operators see them.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, NodeId, WorkspaceId, WorkspaceScope,
    access::token::{ChangeOrigin, TokenHash, TokenKind},
    events::kind,
    workspaces::plan::Plan,
};
use sqlx::Row as _;

use crate::{
    Store, StoreError, StoreResult,
    access::rotation::{TokenSubject, token_event},
    decode::{decode_row, decode_rows},
    events,
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

// Raising the generation refuses sends of the agent that were authenticated before, at their commit.
// An agent's own node is `NodeId::direct`: its token would otherwise still open connections for the agent.
const REVOKE: &str = "
WITH revoked AS (
    DELETE FROM tokens WHERE token_hash = $1 AND kind <> 'observer'
 RETURNING kind, workspace_id, agent_id, node_id
), former AS (
    DELETE FROM former_agent_tokens f
     WHERE f.token_hash = $1
        OR (f.workspace_id, f.agent_id) IN (SELECT workspace_id, agent_id FROM revoked)
 RETURNING 'agent' AS kind, f.workspace_id, f.agent_id, NULL AS node_id
), ended AS (
    SELECT * FROM revoked UNION ALL SELECT * FROM former LIMIT 1
), own_node AS (
    DELETE FROM tokens t USING revoked
     WHERE t.workspace_id = revoked.workspace_id AND t.kind = 'node' AND t.node_id = 'node_direct_' || revoked.agent_id
), raised AS (
    UPDATE agents a SET token_generation = token_generation + 1 FROM ended
     WHERE a.workspace_id = ended.workspace_id AND a.agent_id = ended.agent_id
 RETURNING a.name
)
SELECT ended.kind, ended.workspace_id, (SELECT name FROM raised) AS agent, ended.agent_id, ended.node_id,
       relay_now() AS at
  FROM ended";

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
        let doing = "adding a workspace key";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let added: Option<DateTime<Utc>> = sqlx::query_scalar(
            "INSERT INTO tokens (token_hash, kind, workspace_id, created_at)
             SELECT $2, 'workspace', workspace_id, relay_now() FROM workspaces
              WHERE workspace_id = $1 AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > relay_now())
             RETURNING created_at",
        )
        .bind(scope.workspace_id())
        .bind(&key.as_bytes()[..])
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(at) = added else { return Ok(false) };
        let event = token_event(kind::TOKEN_CREATED, TokenSubject::Workspace, ChangeOrigin::Operator);
        // Not announced by this process: the feeds of observers find the record when they compare themselves with the
        // head.
        events::append(&mut tx, scope, at, vec![event]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(true)
    }

    /// Revokes a token of a workspace, agent or node. With an agent's token, its former one and that of its own node
    /// end too. Returns `None` if there is no such token; observer tokens are revoked by their id.
    pub async fn revoke_token(&self, hash: TokenHash) -> StoreResult<Option<RevokedToken>> {
        let doing = "revoking a token";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let row = sqlx::query(REVOKE)
            .bind(&hash.as_bytes()[..])
            .fetch_optional(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let Some(row) = row else { return Ok(None) };
        let revoked: RevokedToken = decode_row("tokens", &row)?;
        let agent_id: Option<AgentId> = row.try_get("agent_id").map_err(StoreError::from_sqlx(doing))?;
        let at: DateTime<Utc> = row.try_get("at").map_err(StoreError::from_sqlx(doing))?;
        let subject = match (agent_id, &revoked.node_id) {
            (Some(agent), _) => Some(TokenSubject::Agent(agent)),
            (None, Some(node)) => Some(TokenSubject::Node(node)),
            (None, None) => (revoked.kind == TokenKind::Workspace).then_some(TokenSubject::Workspace),
        };
        // A webhook's token is revoked without an event, as over the API.
        let event = subject.map(|subject| token_event(kind::TOKEN_REVOKED, subject, ChangeOrigin::Operator));
        let scope = WorkspaceScope::from_engine_row(revoked.workspace_id);
        events::append(&mut tx, scope, at, event.into_iter().collect()).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(revoked))
    }
}
