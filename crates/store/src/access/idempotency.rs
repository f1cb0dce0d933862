//! Responses stored under idempotency keys for 24 hours.

use relay_domain::WorkspaceScope;
use serde_json::Value;

use crate::{Store, StoreError, StoreResult};

/// Response stored under a key.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct StoredResponse {
    /// SHA-256 of the request body.
    pub fingerprint: Vec<u8>,
    pub status: i16,
    pub response: Value,
}

impl Store {
    /// Returns the response stored under a key in the last 24 hours. It is written in the transaction of its operation,
    /// so that a missing response means that the operation was not committed.
    pub async fn stored_response(
        &self,
        scope: WorkspaceScope,
        key_hash: &[u8; 32],
    ) -> StoreResult<Option<StoredResponse>> {
        sqlx::query_as(
            "SELECT fingerprint, status, response FROM idempotency_keys
             WHERE workspace_id = $1 AND key_hash = $2 AND created_at > relay_now() - interval '24 hours'",
        )
        .bind(scope.workspace_id())
        .bind(&key_hash[..])
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking up an idempotency key"))
    }
}
