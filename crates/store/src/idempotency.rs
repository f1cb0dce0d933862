//! Idempotency keys: what was answered under a key, for a day.

use relay_domain::WorkspaceScope;
use serde_json::Value;

use crate::{Store, StoreError, StoreResult};

/// An answer stored under a key.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct StoredResponse {
    /// SHA-256 of the request body that it answers.
    pub fingerprint: Vec<u8>,
    /// The HTTP status.
    pub status: i16,
    /// What was answered.
    pub response: Value,
}

impl Store {
    /// What was answered under a key in the last 24 hours. Answers are written in the transaction of what
    /// they answer for, so one that is not there was not committed.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn stored_response(
        &self,
        scope: WorkspaceScope,
        key_hash: &[u8; 32],
    ) -> StoreResult<Option<StoredResponse>> {
        sqlx::query_as(
            "SELECT fingerprint, status, response FROM idempotency_keys
             WHERE workspace_id = $1 AND key_hash = $2 AND created_at > now() - interval '24 hours'",
        )
        .bind(scope.workspace_id().get())
        .bind(&key_hash[..])
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking up an idempotency key"))
    }
}
