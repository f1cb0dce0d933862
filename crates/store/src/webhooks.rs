//! Inbound webhooks: who may post to which channel with no more than a token.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, ChannelId, WebhookId, WorkspaceId, WorkspaceScope, names::WEBHOOK_AGENT, token::TokenHash,
};
use sqlx::{FromRow, Row, postgres::PgRow};

use crate::{Store, StoreError, StoreResult, tokens::read_hash};

/// An inbound webhook.
#[derive(Debug, Clone)]
pub struct WebhookRow {
    /// The webhook.
    pub webhook_id: WebhookId,
    /// Its name.
    pub name: String,
    /// Where it posts.
    pub channel_id: ChannelId,
    /// That channel's name.
    pub channel_name: String,
    /// When it was made.
    pub created_at: DateTime<Utc>,
}

impl FromRow<'_, PgRow> for WebhookRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            webhook_id: WebhookId::new(row.try_get("webhook_id")?),
            name: row.try_get("name")?,
            channel_id: ChannelId::new(row.try_get("channel_id")?),
            channel_name: row.try_get("channel_name")?,
            created_at: row.try_get("created_at")?,
        })
    }
}

/// A webhook to be made.
#[derive(Debug)]
pub struct NewWebhook<'a> {
    /// Its id.
    pub webhook_id: WebhookId,
    /// Its name.
    pub name: &'a str,
    /// Where it posts.
    pub channel_id: ChannelId,
    /// The hash of its token.
    pub token: TokenHash,
    /// When it is made.
    pub at: DateTime<Utc>,
}

/// The agent that a workspace's webhooks post as. It has the workspace's own id, which no other agent can
/// have, and is deleted from the first moment on: nothing that looks for agents finds it.
#[must_use]
pub fn webhook_agent(scope: WorkspaceScope) -> AgentId {
    AgentId::new(scope.workspace_id().get())
}

impl Store {
    /// Makes a webhook, and with the first one of a workspace the agent that it posts as. False when the
    /// workspace has `limit` of them.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn create_webhook(&self, scope: WorkspaceScope, new: &NewWebhook<'_>, limit: i64) -> StoreResult<bool> {
        let doing = "making a webhook";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let made = sqlx::query(
            "WITH room AS (
                SELECT WHERE (SELECT count(*) FROM webhooks WHERE workspace_id = $1) < $8
             ), made AS (
                INSERT INTO webhooks (workspace_id, webhook_id, name, channel_id, created_at)
                SELECT $1, $2, $3, $4, $5 FROM room
                RETURNING workspace_id, webhook_id
             ), agent AS (
                INSERT INTO agents (workspace_id, agent_id, name, type, status, node_id, created_at, last_seen_at,
                                    deleted_at)
                SELECT $1, $1, $7, 'system', 'offline', 'node_direct_' || $1, $5, $5, $5 FROM made
                ON CONFLICT (workspace_id, agent_id) DO NOTHING
             )
             INSERT INTO tokens (token_hash, kind, workspace_id, webhook_id, created_at)
             SELECT $6, 'webhook', workspace_id, webhook_id, $5 FROM made",
        )
        .bind(scope.workspace_id().get())
        .bind(new.webhook_id.get())
        .bind(new.name)
        .bind(new.channel_id.get())
        .bind(new.at)
        .bind(&new.token.as_bytes()[..])
        .bind(WEBHOOK_AGENT)
        .bind(limit)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(made.rows_affected() == 1)
    }

    /// The webhooks of a workspace, oldest first, at most `limit`.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn webhooks(&self, scope: WorkspaceScope, limit: i64) -> StoreResult<Vec<WebhookRow>> {
        sqlx::query_as(
            "SELECT w.webhook_id, w.name, w.channel_id, c.name AS channel_name, w.created_at
               FROM webhooks w
               JOIN channels c ON c.workspace_id = w.workspace_id AND c.channel_id = w.channel_id
              WHERE w.workspace_id = $1 ORDER BY w.webhook_id LIMIT $2",
        )
        .bind(scope.workspace_id().get())
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing webhooks"))
    }

    /// Deletes a webhook; its token is dead. `None` when there is none of that id.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn delete_webhook(&self, scope: WorkspaceScope, webhook: WebhookId) -> StoreResult<Option<TokenHash>> {
        let hash: Option<Vec<u8>> = sqlx::query_scalar(
            "WITH gone AS (
                DELETE FROM webhooks WHERE workspace_id = $1 AND webhook_id = $2 RETURNING webhook_id
             )
             DELETE FROM tokens t USING gone
              WHERE t.workspace_id = $1 AND t.webhook_id = gone.webhook_id AND t.kind = 'webhook'
             RETURNING t.token_hash",
        )
        .bind(scope.workspace_id().get())
        .bind(webhook.get())
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("deleting a webhook"))?;
        Ok(hash.as_deref().and_then(read_hash))
    }

    /// The webhook that a token stands for, with its workspace. `None` when there is no such token or its
    /// workspace is gone.
    ///
    /// Takes no scope: it is one of the reads that make scopes.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn webhook_of_token(&self, hash: &TokenHash) -> StoreResult<Option<(WorkspaceId, WebhookRow)>> {
        let doing = "looking up a webhook's token";
        let row = sqlx::query(
            "SELECT h.workspace_id, h.webhook_id, h.name, h.channel_id, c.name AS channel_name, h.created_at
               FROM tokens t
               JOIN workspaces w ON w.workspace_id = t.workspace_id
               JOIN webhooks h ON h.workspace_id = t.workspace_id AND h.webhook_id = t.webhook_id
               JOIN channels c ON c.workspace_id = h.workspace_id AND c.channel_id = h.channel_id
              WHERE t.token_hash = $1 AND t.kind = 'webhook'
                AND w.deleted_at IS NULL AND (w.expires_at IS NULL OR w.expires_at > now())",
        )
        .bind(&hash.as_bytes()[..])
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(row) = row else { return Ok(None) };
        let read = || Ok((WorkspaceId::new(row.try_get("workspace_id")?), WebhookRow::from_row(&row)?));
        read().map(Some).map_err(StoreError::from_sqlx(doing))
    }
}
