//! Encrypted secrets of nodes and subscriptions, for re-encryption with another key. Called by the worker.

use const_format::formatcp;
use relay_domain::{NodeId, SubscriptionId, WorkspaceScope};
use sqlx::{FromRow, Row as _, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    codes::{HTTP_PUSH, POLL},
    decode::decode_rows,
    subscriptions::definitions::EncryptedSecret,
};

/// Row that holds the secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SecretOwner {
    /// An http_push node.
    Node(NodeId),
    /// An event subscription.
    Subscription(SubscriptionId),
}

/// Encrypted secrets and the row that holds them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncryptedSecretRow {
    pub scope: WorkspaceScope,
    pub owner: SecretOwner,
    pub sealed: EncryptedSecret,
}

impl FromRow<'_, PgRow> for EncryptedSecretRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            scope: WorkspaceScope::from_engine_row(row.try_get("workspace_id")?),
            owner: match row.try_get("node_id")? {
                Some(node) => SecretOwner::Node(node),
                None => SecretOwner::Subscription(row.try_get("subscription_id")?),
            },
            sealed: EncryptedSecret { key_id: row.try_get("key_id")?, bytes: row.try_get("sealed")? },
        })
    }
}

// Each half has a limit of its own, so that many secrets of one table do not postpone those of the other.
const SEALED_WITH: &str = formatcp!(
    "
(SELECT workspace_id, node_id, NULL::bigint AS subscription_id, sealed_key_id AS key_id, sealed
   FROM nodes WHERE kind IN ('{HTTP_PUSH}', '{POLL}') AND sealed_key_id = ANY($1) ORDER BY workspace_id, node_id LIMIT $2)
UNION ALL
(SELECT workspace_id, NULL, subscription_id, secret_key_id, sealed
   FROM subscriptions WHERE secret_key_id = ANY($1) ORDER BY workspace_id, subscription_id LIMIT $2)"
);

impl Store {
    /// Returns secrets encrypted with one of `keys`: at most `limit` of nodes and as many of subscriptions.
    pub async fn secrets_encrypted_with(&self, keys: &[&str], limit: i64) -> StoreResult<Vec<EncryptedSecretRow>> {
        let rows = sqlx::query(SEALED_WITH)
            .bind(keys)
            .bind(limit)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading secrets encrypted with former keys"))?;
        decode_rows("nodes", &rows)
    }

    /// Replaces the secrets that were read by the same ones, re-encrypted. Returns false if they have changed since.
    pub async fn replace_secret(&self, read: &EncryptedSecretRow, fresh: &EncryptedSecret) -> StoreResult<bool> {
        let workspace = read.scope.workspace_id();
        // Encryption uses a random nonce, so equal bytes mean that the secrets have not changed.
        let query = match &read.owner {
            SecretOwner::Node(node) => sqlx::query(
                "UPDATE nodes SET sealed_key_id = $3, sealed = $4
                  WHERE workspace_id = $1 AND node_id = $2 AND sealed = $5",
            )
            .bind(workspace)
            .bind(node),
            SecretOwner::Subscription(subscription) => sqlx::query(
                "UPDATE subscriptions SET secret_key_id = $3, sealed = $4
                  WHERE workspace_id = $1 AND subscription_id = $2 AND sealed = $5",
            )
            .bind(workspace)
            .bind(subscription),
        };
        let done = query
            .bind(&fresh.key_id)
            .bind(&fresh.bytes)
            .bind(&read.sealed.bytes)
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("replacing encrypted secrets"))?;
        Ok(done.rows_affected() > 0)
    }
}
