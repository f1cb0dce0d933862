//! Creation, lookup, change and deletion of workspaces.

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{
    ChannelId, WorkspaceId, WorkspaceScope,
    access::{
        rights::RightChanges,
        token::{ChangeOrigin, TokenHash},
    },
    events::kind,
    names,
    workspaces::{
        Workspace, metadata,
        plan::{Plan, Quota},
    },
};
use relay_wire::{events::recorded_data::WorkspaceUpdated, field::ToValue as _};
use serde_json::{Map, Value};
use sqlx::types::Json;

use crate::{
    Store, StoreError, StoreResult,
    access::idempotency::{IdempotencyKey, claim_key},
    connections::DatabaseSession,
    decode::decode_row,
    events::{self, Event, RecordedEvents},
    observers::tokens,
    workspaces::quota_counts::is_within_quota,
};

/// Workspace to create, with its `general` channel.
#[derive(Debug)]
pub struct NewWorkspace<'a> {
    pub workspace_id: WorkspaceId,
    pub name: &'a str,
    pub plan: Plan,
    /// Workspace that answers for this one, and how many it may have; `None` is unlimited.
    pub created_by: Option<(WorkspaceScope, Option<i64>)>,
    pub metadata: &'a Value,
    pub provenance: Option<&'a Value>,
    pub created_at: DateTime<Utc>,
    pub expires_at: Option<DateTime<Utc>>,
    pub key: TokenHash,
    /// Id of the `general` channel.
    pub general: ChannelId,
}

/// Change of a workspace. `None` leaves a field as it is.
#[derive(Debug)]
pub struct WorkspaceChange<'a> {
    pub name: Option<&'a str>,
    /// `Some(None)` clears it.
    pub system_prompt: Option<Option<&'a str>>,
    /// Merged into the stored metadata.
    pub metadata: Option<&'a Map<String, Value>>,
    pub delivery_ttl_seconds: Option<i32>,
    pub agent_token_grace_seconds: Option<i32>,
    /// Merged into the stored policy; `Some(None)` removes it.
    pub policy: Option<Option<&'a RightChanges>>,
}

impl WorkspaceChange<'_> {
    /// Names the settings that the change sets. Metadata is the clients' own data and no setting.
    fn settings(&self) -> Vec<&'static str> {
        let settings = [
            ("name", self.name.is_some()),
            ("system_prompt", self.system_prompt.is_some()),
            ("delivery_ttl_seconds", self.delivery_ttl_seconds.is_some()),
            ("agent_token_grace_seconds", self.agent_token_grace_seconds.is_some()),
            ("policy", self.policy.is_some()),
        ];
        settings.into_iter().filter_map(|(name, is_set)| is_set.then_some(name)).collect()
    }
}

/// Idempotency key of a creation, under which its response is stored.
#[derive(Debug, Clone, Copy)]
pub struct CreationKey {
    /// Workspace of the creator; `None` without authentication.
    pub owner: Option<WorkspaceId>,
    pub key: IdempotencyKey,
}

/// Outcome of a creation.
#[derive(Debug)]
pub enum WorkspaceCreation {
    Created,
    /// The key was used in the last 24 hours; nothing was created.
    Replayed {
        /// SHA-256 of the earlier request body.
        fingerprint: Vec<u8>,
        /// Response stored by the earlier request.
        response: Value,
    },
    /// The creator's quota of child workspaces is reached; nothing was created.
    TooMany,
}

const COLUMNS: &str =
    "workspace_id, name, plan, system_prompt, metadata, provenance, created_at, expires_at, delivery_ttl_seconds,
      agent_token_grace_seconds, created_by, policy";
const IS_ALIVE: &str = "deleted_at IS NULL AND (expires_at IS NULL OR expires_at > relay_now())";

/// Owner of idempotency keys without authentication. No workspace has this id.
const ANONYMOUS_OWNER: WorkspaceId = WorkspaceId::new(0);

impl Store {
    /// Creates a workspace with its key and its `general` channel, unless `key` was used in the last 24 hours.
    pub async fn create_workspace(
        &self,
        new: &NewWorkspace<'_>,
        key: Option<(CreationKey, &Value)>,
    ) -> StoreResult<WorkspaceCreation> {
        let doing = "creating a workspace";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        if let Some((key, response)) = key
            && let Some(replayed) = store_creation_key(&mut tx, &key, response).await?
        {
            return Ok(replayed);
        }
        sqlx::query(
            "WITH workspace AS (
                INSERT INTO workspaces
                       (workspace_id, name, metadata, provenance, created_at, expires_at, plan, created_by)
                VALUES ($1, $2, $3, $4, $5, $6, $10, $11)
             ), general AS (
                INSERT INTO channels (workspace_id, channel_id, name, topic, created_at)
                VALUES ($1, $7, $9, 'General discussion', $5)
             )
             INSERT INTO tokens (token_hash, kind, workspace_id, created_at) VALUES ($8, 'workspace', $1, $5)",
        )
        .bind(new.workspace_id)
        .bind(new.name)
        .bind(new.metadata)
        .bind(new.provenance)
        .bind(new.created_at)
        .bind(new.expires_at)
        .bind(new.general)
        .bind(&new.key.as_bytes()[..])
        .bind(names::GENERAL_CHANNEL)
        .bind(new.plan)
        .bind(new.created_by.map(|(creator, _)| creator.workspace_id()))
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        // The count includes the new row, which the drop of the transaction undoes.
        if let Some((creator, most)) = new.created_by
            && !is_within_quota(&mut tx, creator, Quota::ChildWorkspaces, most).await?
        {
            return Ok(WorkspaceCreation::TooMany);
        }
        // Without a key a repetition would create a second workspace.
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(WorkspaceCreation::Created)
    }

    /// Returns the workspace unless it is deleted or expired.
    pub async fn workspace(&self, scope: WorkspaceScope) -> StoreResult<Option<Workspace>> {
        let row = sqlx::query(formatcp!("SELECT {COLUMNS} FROM workspaces WHERE workspace_id = $1 AND {IS_ALIVE}"))
            .bind(scope.workspace_id())
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading a workspace"))?;
        row.map(|row| decode_row("workspaces", &row)).transpose()
    }

    /// Returns the workspace that answers for this one, if another one does.
    pub async fn answerable_workspace(&self, scope: WorkspaceScope) -> StoreResult<Option<WorkspaceId>> {
        let created_by: Option<Option<WorkspaceId>> =
            sqlx::query_scalar("SELECT created_by FROM workspaces WHERE workspace_id = $1")
                .bind(scope.workspace_id())
                .fetch_optional(&self.pool)
                .await
                .map_err(StoreError::from_sqlx("reading the creator of a workspace"))?;
        Ok(created_by.flatten())
    }

    /// Returns the oldest workspace of that name that is neither deleted nor expired. Takes no scope because names are
    /// public.
    pub async fn workspace_by_name(&self, name: &str) -> StoreResult<Option<Workspace>> {
        let row = sqlx::query(formatcp!(
            "SELECT {COLUMNS} FROM workspaces WHERE name = $1 AND {IS_ALIVE} ORDER BY workspace_id LIMIT 1"
        ))
        .bind(name)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking up a workspace by name"))?;
        row.map(|row| decode_row("workspaces", &row)).transpose()
    }

    /// Changes a workspace, and records which settings were set. Returns `None` if it is deleted or expired, or if its
    /// metadata would exceed its bounds.
    pub async fn update_workspace(
        &self,
        scope: WorkspaceScope,
        change: &WorkspaceChange<'_>,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<(Workspace, RecordedEvents)>> {
        let doing = "updating a workspace";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let metadata = match change.metadata {
            None => None,
            Some(change) => match merge_metadata(&mut tx, scope, change).await? {
                Some(merged) if metadata::is_within_bounds(&merged) => Some(Json(merged)),
                Some(_) | None => return Ok(None),
            },
        };
        let row = sqlx::query(formatcp!(
            "UPDATE workspaces SET
                name = coalesce($2, name),
                system_prompt = CASE WHEN $3 THEN $4 ELSE system_prompt END,
                metadata = coalesce($5, metadata),
                delivery_ttl_seconds = coalesce($6, delivery_ttl_seconds),
                agent_token_grace_seconds = coalesce($7, agent_token_grace_seconds),
                policy = CASE WHEN $8 THEN nullif(jsonb_strip_nulls(coalesce(policy, '{{}}') || $9), '{{}}')
                               ELSE policy END
             WHERE workspace_id = $1 AND {IS_ALIVE}
             RETURNING {COLUMNS}"
        ))
        .bind(scope.workspace_id())
        .bind(change.name)
        .bind(change.system_prompt.is_some())
        .bind(change.system_prompt.flatten())
        .bind(metadata)
        .bind(change.delivery_ttl_seconds)
        .bind(change.agent_token_grace_seconds)
        .bind(change.policy.is_some())
        .bind(change.policy.flatten().map(Json))
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(row) = row else { return Ok(None) };
        let row = decode_row("workspaces", &row)?;
        let settings = change.settings();
        let data = WorkspaceUpdated { settings: &settings, by: ChangeOrigin::WorkspaceKey.as_str() };
        let event = (!settings.is_empty()).then(|| Event::new(kind::WORKSPACE_UPDATED, data.to_value()));
        let recorded = events::append(&mut tx, scope, at, event.into_iter().collect()).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some((row, recorded)))
    }

    /// Deletes the workspace and revokes its tokens, whose number is returned. Workers remove the bytes of its files
    /// soon, retention drops its daily partitions, and a worker erases all other rows weeks later.
    pub async fn delete_workspace(&self, scope: WorkspaceScope, at: DateTime<Utc>) -> StoreResult<u64> {
        let doing = "deleting a workspace";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // First, because it locks the workspace's row: a transaction that holds it FOR SHARE has ended, and its rows
        // are visible to the statements below.
        sqlx::query("UPDATE workspaces SET deleted_at = $2 WHERE workspace_id = $1 AND deleted_at IS NULL")
            .bind(scope.workspace_id())
            .bind(at)
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        sqlx::query(
            // An object that a worker is removing keeps the end of the worker's claim.
            "WITH files AS (
                UPDATE files SET status = 'deleted', deleted_at = $2
                 WHERE workspace_id = $1 AND status <> 'deleted'
             )
             UPDATE file_objects SET remove_after = relay_now() WHERE workspace_id = $1 AND NOT removing",
        )
        .bind(scope.workspace_id())
        .bind(at)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        disable_endpoints(&mut tx, scope, at).await?;
        // Former tokens need no deletion: their lookup requires a workspace that is not deleted.
        let revoked = sqlx::query("DELETE FROM tokens WHERE workspace_id = $1")
            .bind(scope.workspace_id())
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        // Complete: transactions that create observer tokens hold the workspace's row FOR SHARE, so they have committed
        // or will find the workspace deleted.
        tokens::override_workspace_tokens(&mut tx, scope).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(revoked.rows_affected())
    }
}

/// Locks a workspace until the commit, so that concurrent changes lose no keys, and returns its metadata with the
/// change.
/// `None` if it is deleted or expired.
async fn merge_metadata(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    change: &Map<String, Value>,
) -> StoreResult<Option<Map<String, Value>>> {
    let stored: Option<Json<Map<String, Value>>> = sqlx::query_scalar(formatcp!(
        "SELECT metadata FROM workspaces WHERE workspace_id = $1 AND {IS_ALIVE} FOR NO KEY UPDATE"
    ))
    .bind(scope.workspace_id())
    .fetch_optional(tx)
    .await
    .map_err(StoreError::from_sqlx("reading the metadata of a workspace"))?;
    Ok(stored.map(|Json(stored)| metadata::merge(stored, change)))
}

/// Disables the http_push mailboxes and subscriptions of a deleted workspace.
///
/// Endpoints of a deleted workspace are not called even if they are missed here, so rows that a dispatcher has
/// locked are skipped instead of waited for. Disabling the others keeps them out of the dispatchers' scans.
async fn disable_endpoints(tx: &mut DatabaseSession, scope: WorkspaceScope, at: DateTime<Utc>) -> StoreResult<()> {
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
    .bind(scope.workspace_id())
    .bind(at)
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("disabling the endpoints of a deleted workspace"))?;
    Ok(())
}

/// Stores the response of a creation under its key. Returns the earlier response if the key was used in the last 24
/// hours. A concurrent request with the same key waits for the end of this transaction.
async fn store_creation_key(
    tx: &mut DatabaseSession,
    CreationKey { owner, key }: &CreationKey,
    response: &Value,
) -> StoreResult<Option<WorkspaceCreation>> {
    let owner = owner.unwrap_or(ANONYMOUS_OWNER);
    if claim_key(tx, owner, key, response).await? {
        return Ok(None);
    }
    let (fingerprint, response) =
        sqlx::query_as("SELECT fingerprint, response FROM idempotency_keys WHERE workspace_id = $1 AND key_hash = $2")
            .bind(owner)
            .bind(&key.hash[..])
            .fetch_one(tx)
            .await
            .map_err(StoreError::from_sqlx("reading the idempotency key of a workspace"))?;
    Ok(Some(WorkspaceCreation::Replayed { fingerprint, response }))
}
