//! Workspaces.

use chrono::{DateTime, Utc};
use relay_domain::{ChannelId, WorkspaceId, WorkspaceScope, names, token::TokenHash};
use serde_json::Value;
use sqlx::{FromRow, Row, postgres::PgRow};

use crate::{Store, StoreError, StoreResult, observer_tokens, tokens::read_hash};

/// A workspace that is neither deleted nor expired.
#[derive(Debug, Clone)]
pub struct WorkspaceRow {
    /// Its id.
    pub workspace_id: WorkspaceId,
    /// Its name; not unique.
    pub name: String,
    /// The plan: free, pro or enterprise.
    pub plan: String,
    /// What agents are told first, if set.
    pub system_prompt: Option<String>,
    /// What clients keep there.
    pub metadata: Value,
    /// Who made it, as told by the maker.
    pub provenance: Option<Value>,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it ends, if it does.
    pub expires_at: Option<DateTime<Utc>>,
    /// How long its deliveries live, in seconds.
    pub delivery_ttl_seconds: i32,
}

impl FromRow<'_, PgRow> for WorkspaceRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            workspace_id: WorkspaceId::new(row.try_get("workspace_id")?),
            name: row.try_get("name")?,
            plan: row.try_get("plan")?,
            system_prompt: row.try_get("system_prompt")?,
            metadata: row.try_get("metadata")?,
            provenance: row.try_get("provenance")?,
            created_at: row.try_get("created_at")?,
            expires_at: row.try_get("expires_at")?,
            delivery_ttl_seconds: row.try_get("delivery_ttl_seconds")?,
        })
    }
}

/// A workspace to be made, with its `general` channel.
#[derive(Debug)]
pub struct NewWorkspace<'a> {
    /// Its id.
    pub workspace_id: WorkspaceId,
    /// Its name.
    pub name: &'a str,
    /// What clients keep there.
    pub metadata: &'a Value,
    /// Who makes it.
    pub provenance: Option<&'a Value>,
    /// When it is made.
    pub created_at: DateTime<Utc>,
    /// When it ends, if it does.
    pub expires_at: Option<DateTime<Utc>>,
    /// The hash of its key.
    pub key: TokenHash,
    /// The id of `general`.
    pub general: ChannelId,
}

/// What a keyed creation leaves behind, so that the same request is answered the same way.
#[derive(Debug, Clone, Copy)]
pub struct CreationKey {
    /// Under which workspace the key is kept: the creator's, or 0 for the anonymous.
    pub kept_under: i64,
    /// The hash of actor, operation and key.
    pub key_hash: [u8; 32],
    /// The hash of the request body.
    pub fingerprint: [u8; 32],
}

/// What became of a creation.
#[derive(Debug)]
pub enum Creation {
    /// The workspace was made now.
    Made,
    /// The key was used before, with this fingerprint and this stored answer.
    Replayed {
        /// The hash of the body of then.
        fingerprint: Vec<u8>,
        /// What was stored then.
        response: Value,
    },
}

macro_rules! columns {
    () => {
        "workspace_id, name, plan, system_prompt, metadata, provenance, created_at, expires_at, delivery_ttl_seconds"
    };
}
macro_rules! alive {
    () => {
        "deleted_at IS NULL AND (expires_at IS NULL OR expires_at > now())"
    };
}

impl Store {
    /// Makes a workspace with its key and its `general` channel, unless `key` was used in the last day.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn create_workspace(
        &self,
        new: &NewWorkspace<'_>,
        key: Option<(CreationKey, &Value)>,
    ) -> StoreResult<Creation> {
        let doing = "creating a workspace";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        if let Some((key, response)) = key {
            let fresh = sqlx::query(
                "INSERT INTO idempotency_keys (workspace_id, key_hash, fingerprint, status, response, created_at)
                 VALUES ($1, $2, $3, 201, $4, $5)
                 ON CONFLICT (workspace_id, key_hash) DO UPDATE
                    SET fingerprint = EXCLUDED.fingerprint, response = EXCLUDED.response,
                        created_at = EXCLUDED.created_at
                    WHERE idempotency_keys.created_at < EXCLUDED.created_at - interval '24 hours'",
            )
            .bind(key.kept_under)
            .bind(&key.key_hash[..])
            .bind(&key.fingerprint[..])
            .bind(response)
            .bind(new.created_at)
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
            if fresh.rows_affected() == 0 {
                let (fingerprint, response) = sqlx::query_as(
                    "SELECT fingerprint, response FROM idempotency_keys WHERE workspace_id = $1 AND key_hash = $2",
                )
                .bind(key.kept_under)
                .bind(&key.key_hash[..])
                .fetch_one(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
                return Ok(Creation::Replayed { fingerprint, response });
            }
        }
        sqlx::query(
            "WITH workspace AS (
                INSERT INTO workspaces (workspace_id, name, metadata, provenance, created_at, expires_at)
                VALUES ($1, $2, $3, $4, $5, $6)
             ), general AS (
                INSERT INTO channels (workspace_id, channel_id, name, topic, created_at)
                VALUES ($1, $7, $9, 'General discussion', $5)
             )
             INSERT INTO tokens (token_hash, kind, workspace_id, created_at) VALUES ($8, 'workspace', $1, $5)",
        )
        .bind(new.workspace_id.get())
        .bind(new.name)
        .bind(new.metadata)
        .bind(new.provenance)
        .bind(new.created_at)
        .bind(new.expires_at)
        .bind(new.general.get())
        .bind(&new.key.as_bytes()[..])
        .bind(names::GENERAL)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(Creation::Made)
    }

    /// The workspace, if it is alive.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn workspace(&self, scope: WorkspaceScope) -> StoreResult<Option<WorkspaceRow>> {
        sqlx::query_as(concat!("SELECT ", columns!(), " FROM workspaces WHERE workspace_id = $1 AND ", alive!()))
            .bind(scope.workspace_id().get())
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading a workspace"))
    }

    /// The oldest living workspace of that name. Names are public: this takes no scope.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn workspace_by_name(&self, name: &str) -> StoreResult<Option<WorkspaceRow>> {
        sqlx::query_as(concat!(
            "SELECT ",
            columns!(),
            " FROM workspaces WHERE name = $1 AND ",
            alive!(),
            " ORDER BY workspace_id LIMIT 1"
        ))
        .bind(name)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking up a workspace by name"))
    }

    /// Changes what is given; in `metadata` a null deletes its key, other keys are merged. `None` when the
    /// workspace is gone or its metadata would pass `metadata_limit` bytes.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn update_workspace(
        &self,
        scope: WorkspaceScope,
        name: Option<&str>,
        system_prompt: Option<Option<&str>>,
        metadata: Option<&Value>,
        metadata_limit: i32,
        delivery_ttl_seconds: Option<i32>,
    ) -> StoreResult<Option<WorkspaceRow>> {
        sqlx::query_as(concat!(
            "UPDATE workspaces w SET
                name = coalesce($2, name),
                system_prompt = CASE WHEN $3 THEN $4 ELSE system_prompt END,
                metadata = merged.value,
                delivery_ttl_seconds = coalesce($7, delivery_ttl_seconds)
             FROM (
                SELECT coalesce((
                    SELECT jsonb_object_agg(key, value)
                    FROM jsonb_each(old.metadata || coalesce($5, '{}'))
                    WHERE NOT coalesce($5 -> key = 'null', false)
                ), '{}') AS value
                FROM workspaces old WHERE old.workspace_id = $1
             ) merged
             WHERE w.workspace_id = $1 AND ",
            alive!(),
            "
               AND ($5 IS NULL OR octet_length(merged.value::text) <= $6)
             RETURNING ",
            columns!()
        ))
        .bind(scope.workspace_id().get())
        .bind(name)
        .bind(system_prompt.is_some())
        .bind(system_prompt.flatten())
        .bind(metadata)
        .bind(metadata_limit)
        .bind(delivery_ttl_seconds)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("updating a workspace"))
    }

    /// Deletes the workspace: its tokens are gone at once, its files soon. What is kept by the day goes with retention, everything
    /// else when a worker erases it weeks later. Returns the hashes of the tokens that died.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn delete_workspace(&self, scope: WorkspaceScope, at: DateTime<Utc>) -> StoreResult<Vec<TokenHash>> {
        let doing = "deleting a workspace";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        sqlx::query("UPDATE workspaces SET deleted_at = $2 WHERE workspace_id = $1 AND deleted_at IS NULL")
            .bind(scope.workspace_id().get())
            .bind(at)
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        sqlx::query(
            "WITH files AS (
                UPDATE files SET status = 'deleted', deleted_at = $2
                 WHERE workspace_id = $1 AND status <> 'deleted'
             )
             UPDATE file_objects SET remove_after = now() WHERE workspace_id = $1 AND NOT removing",
        )
        .bind(scope.workspace_id().get())
        .bind(at)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        // Nobody calls its addresses any more, whether or not this finds them: so they need not be looked at either.
        sqlx::query(
            "WITH idle AS (
                SELECT agent_id FROM push_mailboxes
                 WHERE workspace_id = $1 AND disabled_at IS NULL FOR UPDATE SKIP LOCKED
             ), pushed AS (
                UPDATE push_mailboxes p SET disabled_at = $2, disabled_reason = 'workspace_deleted'
                  FROM idle WHERE p.workspace_id = $1 AND p.agent_id = idle.agent_id
             ), unserved AS (
                SELECT subscription_id FROM subscriptions
                 WHERE workspace_id = $1 AND is_active FOR UPDATE SKIP LOCKED
             )
             UPDATE subscriptions s
                SET is_active = false, disabled_at = $2, disabled_reason = 'workspace_deleted'
               FROM unserved u WHERE s.workspace_id = $1 AND s.subscription_id = u.subscription_id",
        )
        .bind(scope.workspace_id().get())
        .bind(at)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let hashes: Vec<Vec<u8>> =
            sqlx::query_scalar("DELETE FROM tokens WHERE workspace_id = $1 RETURNING token_hash")
                .bind(scope.workspace_id().get())
                .fetch_all(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
        // Whoever was making observer tokens has ended or waits: the workspace's row is held.
        observer_tokens::overrule_all(&mut tx, scope).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(hashes.iter().filter_map(|bytes| read_hash(bytes)).collect())
    }
}
