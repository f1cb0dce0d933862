//! Workspaces and their tokens as operators see them.

use chrono::{DateTime, Utc};
use relay_domain::{WorkspaceScope, token::TokenHash};

use crate::{Store, StoreError, StoreResult};

/// A workspace, alive or not, with what it holds.
#[derive(Debug, Clone, sqlx::FromRow, serde::Serialize)]
pub struct WorkspaceSummary {
    /// Its id.
    pub workspace_id: i64,
    /// Its name; not unique.
    pub name: String,
    /// The plan: free, pro or enterprise.
    pub plan: String,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it ends, if it does.
    pub expires_at: Option<DateTime<Utc>>,
    /// Since when nobody is let in, if so.
    pub suspended_at: Option<DateTime<Utc>>,
    /// When it was deleted; its rows may still be there.
    pub deleted_at: Option<DateTime<Utc>>,
    /// Agents that are not deleted.
    pub agents: i64,
    /// Providers that are connected.
    pub connected: i64,
}

/// What a token was that is dead now.
#[derive(Debug, Clone, sqlx::FromRow, serde::Serialize)]
pub struct TokenKilled {
    /// workspace, agent, node or observer.
    pub kind: String,
    /// Whose it was.
    pub workspace_id: i64,
    /// The agent's name, for an agent's token.
    pub agent: Option<String>,
    /// The node, for a node's token.
    pub node_id: Option<String>,
}

impl Store {
    /// Workspaces by id, oldest first, behind `after`; of one name if one is given.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn workspace_summaries(
        &self,
        name: Option<&str>,
        after: i64,
        limit: i64,
    ) -> StoreResult<Vec<WorkspaceSummary>> {
        sqlx::query_as(
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
        .map_err(StoreError::from_sqlx("listing workspaces"))
    }

    /// Gives a living workspace one more key. `false` when it is not alive.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn add_workspace_key(&self, scope: WorkspaceScope, key: TokenHash) -> StoreResult<bool> {
        let added = sqlx::query(
            "INSERT INTO tokens (token_hash, kind, workspace_id, created_at)
             SELECT $2, 'workspace', workspace_id, now() FROM workspaces
              WHERE workspace_id = $1 AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > now())",
        )
        .bind(scope.workspace_id().get())
        .bind(&key.as_bytes()[..])
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("adding a workspace key"))?;
        Ok(added.rows_affected() == 1)
    }

    /// Kills a token of any kind but signed ones, which have no row. `None` when there is no such token.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn kill_token(&self, hash: TokenHash) -> StoreResult<Option<TokenKilled>> {
        // The generation is raised with it: sends that were authenticated before are refused at their commit.
        sqlx::query_as(
            "WITH gone AS (
                DELETE FROM tokens WHERE token_hash = $1 AND kind <> 'observer'
                RETURNING kind, workspace_id, agent_id, node_id
             ), raised AS (
                UPDATE agents a SET token_generation = token_generation + 1 FROM gone
                 WHERE a.workspace_id = gone.workspace_id AND a.agent_id = gone.agent_id
                RETURNING a.name
             )
             SELECT gone.kind, gone.workspace_id, (SELECT name FROM raised) AS agent, gone.node_id FROM gone",
        )
        .bind(&hash.as_bytes()[..])
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("killing a token"))
    }
}
