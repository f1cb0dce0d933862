//! Inbound webhooks: tokens that may only post to one channel.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, ChannelId, WebhookId, WorkspaceId, WorkspaceScope, access::token::TokenHash, messages::Webhook,
    names::WEBHOOK_AGENT,
};
use sqlx::{FromRow as _, Row as _};

use crate::{Store, StoreError, StoreResult, access::tokens::read_hash};

/// Result of looking up a webhook's token.
#[derive(Debug)]
pub enum WebhookLookup {
    Valid(WorkspaceId, Webhook),
    /// The token was valid until its workspace expired.
    WorkspaceExpired,
    /// The token is unknown, or its workspace or webhook is deleted.
    Unknown,
}

#[derive(Debug)]
pub struct NewWebhook<'a> {
    pub webhook_id: WebhookId,
    pub name: &'a str,
    pub channel_id: ChannelId,
    pub token: TokenHash,
    pub at: DateTime<Utc>,
}

/// The agent that a workspace's webhooks post as. Its id is the workspace's id, which no other agent can have. It
/// is deleted from its creation on, so that no lookup of agents finds it.
#[must_use]
pub fn webhook_agent(scope: WorkspaceScope) -> AgentId {
    AgentId::new(scope.workspace_id().get())
}

impl Store {
    /// Creates a webhook, and with the first one of a workspace the agent that it posts as. Returns false when
    /// the workspace has `limit` webhooks.
    pub async fn create_webhook(&self, scope: WorkspaceScope, new: &NewWebhook<'_>, limit: i64) -> StoreResult<bool> {
        let doing = "creating a webhook";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The limit is checked without a lock: concurrent requests may exceed it by a few. The agent is inserted with
        // the first webhook, because most workspaces have none.
        let created = sqlx::query(
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
        .bind(scope.workspace_id())
        .bind(new.webhook_id)
        .bind(new.name)
        .bind(new.channel_id)
        .bind(new.at)
        .bind(&new.token.as_bytes()[..])
        .bind(WEBHOOK_AGENT)
        .bind(limit)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        // Not idempotent: a retry after an unknown outcome would create a second webhook.
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(created.rows_affected() == 1)
    }

    /// Lists the webhooks of a workspace, oldest first.
    pub async fn webhooks(&self, scope: WorkspaceScope, limit: i64) -> StoreResult<Vec<Webhook>> {
        sqlx::query_as(
            "SELECT w.webhook_id, w.name, w.channel_id, c.name AS channel_name, w.created_at
               FROM webhooks w
               JOIN channels c ON c.workspace_id = w.workspace_id AND c.channel_id = w.channel_id
              WHERE w.workspace_id = $1 ORDER BY w.webhook_id LIMIT $2",
        )
        .bind(scope.workspace_id())
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing webhooks"))
    }

    /// Deletes a webhook and its token, whose hash is returned. `None` without such a webhook.
    pub async fn delete_webhook(&self, scope: WorkspaceScope, webhook: WebhookId) -> StoreResult<Option<TokenHash>> {
        let hash: Option<Vec<u8>> = sqlx::query_scalar(
            "WITH deleted AS (
                DELETE FROM webhooks WHERE workspace_id = $1 AND webhook_id = $2 RETURNING webhook_id
             )
             DELETE FROM tokens t USING deleted
              WHERE t.workspace_id = $1 AND t.webhook_id = deleted.webhook_id AND t.kind = 'webhook'
             RETURNING t.token_hash",
        )
        .bind(scope.workspace_id())
        .bind(webhook)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("deleting a webhook"))?;
        Ok(hash.as_deref().and_then(read_hash))
    }

    /// Finds the webhook and workspace of a token. It takes no scope, because its result is what a scope is made from.
    pub async fn webhook_by_token(&self, hash: &TokenHash) -> StoreResult<WebhookLookup> {
        let doing = "looking up a webhook's token";
        let row = sqlx::query(
            "SELECT h.workspace_id, h.webhook_id, h.name, h.channel_id, c.name AS channel_name, h.created_at,
                    coalesce(w.expires_at <= relay_now(), false) AS workspace_expired
               FROM tokens t
               JOIN workspaces w ON w.workspace_id = t.workspace_id
               JOIN webhooks h ON h.workspace_id = t.workspace_id AND h.webhook_id = t.webhook_id
               JOIN channels c ON c.workspace_id = h.workspace_id AND c.channel_id = h.channel_id
              WHERE t.token_hash = $1 AND t.kind = 'webhook' AND w.deleted_at IS NULL",
        )
        .bind(&hash.as_bytes()[..])
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(row) = row else { return Ok(WebhookLookup::Unknown) };
        let read = || {
            if row.try_get("workspace_expired")? {
                return Ok(WebhookLookup::WorkspaceExpired);
            }
            Ok(WebhookLookup::Valid(row.try_get("workspace_id")?, Webhook::from_row(&row)?))
        };
        read().map_err(StoreError::from_sqlx(doing))
    }
}
