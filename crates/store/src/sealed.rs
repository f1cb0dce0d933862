//! What is kept sealed, for whoever seals it anew with another key.

use relay_domain::{NodeId, SubscriptionId, WorkspaceId, WorkspaceScope};
use sqlx::Row as _;

use crate::{Store, StoreError, StoreResult, subscriptions::Sealed};

/// Whose secrets are sealed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SealedOf {
    /// An http_push node's.
    Node(NodeId),
    /// An event subscription's.
    Subscription(SubscriptionId),
}

/// Sealed secrets, and whose they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealedRow {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The node or the subscription.
    pub of: SealedOf,
    /// What is stored.
    pub sealed: Sealed,
}

const SEALED_WITH: &str = "
(SELECT workspace_id, node_id, NULL::bigint AS subscription_id, sealed_key_id AS key_id, sealed
   FROM nodes WHERE kind = 'http_push' AND sealed_key_id = ANY($1) ORDER BY workspace_id, node_id LIMIT $2)
UNION ALL
(SELECT workspace_id, NULL, subscription_id, secret_key_id, sealed
   FROM subscriptions WHERE secret_key_id = ANY($1) ORDER BY workspace_id, subscription_id LIMIT $2)";

impl Store {
    /// What is sealed with one of these keys: at most `limit` nodes' and as many subscriptions'.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn sealed_with(&self, keys: &[&str], limit: i64) -> StoreResult<Vec<SealedRow>> {
        let rows = sqlx::query(SEALED_WITH)
            .bind(keys)
            .bind(limit)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading what former keys have sealed"))?;
        let rows = rows.iter().map(|row| SealedRow {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(row.get("workspace_id"))),
            of: row.get::<Option<String>, _>("node_id").map_or_else(
                || SealedOf::Subscription(SubscriptionId::new(row.get("subscription_id"))),
                |node| SealedOf::Node(NodeId::new(node)),
            ),
            sealed: Sealed { key_id: row.get("key_id"), bytes: row.get("sealed") },
        });
        Ok(rows.collect())
    }

    /// Puts the same secrets, sealed anew, in the place of what was read. False when something else is there by now.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn seal_anew(&self, read: &SealedRow, fresh: &Sealed) -> StoreResult<bool> {
        let workspace = read.scope.workspace_id().get();
        // Bytes are never sealed alike twice: what is there is what was read, or the secrets have changed.
        let query = match &read.of {
            SealedOf::Node(node) => sqlx::query(
                "UPDATE nodes SET sealed_key_id = $3, sealed = $4
                  WHERE workspace_id = $1 AND node_id = $2 AND sealed = $5",
            )
            .bind(workspace)
            .bind(node.as_str()),
            SealedOf::Subscription(subscription) => sqlx::query(
                "UPDATE subscriptions SET secret_key_id = $3, sealed = $4
                  WHERE workspace_id = $1 AND subscription_id = $2 AND sealed = $5",
            )
            .bind(workspace)
            .bind(subscription.get()),
        };
        let done = query
            .bind(&fresh.key_id)
            .bind(&fresh.bytes)
            .bind(&read.sealed.bytes)
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("sealing secrets anew"))?;
        Ok(done.rows_affected() > 0)
    }
}
