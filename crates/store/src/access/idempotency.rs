//! Idempotency keys: claimed in the transaction of an operation, with the record from which a repeated request is
//! answered for 24 hours. The batch commit claims those of its sends itself ([`crate::messages::commit_in_steps`]).

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, InvocationId, MessageId, SessionEventId, WorkspaceId, WorkspaceScope, ids::as_number};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::types::Json;

use crate::{Store, StoreError, StoreResult, connections::DatabaseSession};

/// Retention of an idempotency key; published clients rely on 24 hours.
pub(crate) const IDEMPOTENCY_RETENTION_HOURS: i32 = 24;

/// Stored form of an idempotency key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdempotencyKey {
    /// SHA-256 over actor, operation, target and key.
    pub hash: [u8; 32],
    /// SHA-256 of the request body.
    pub fingerprint: [u8; 32],
}

/// Record of a post.
#[derive(Debug, Serialize, Deserialize)]
pub struct PostRecord {
    pub message_id: MessageId,
}

/// Record of an invocation.
#[derive(Debug, Serialize, Deserialize)]
pub struct InvocationRecord {
    /// As a number, unlike the ids of other records.
    #[serde(with = "as_number")]
    pub invocation_id: InvocationId,
}

/// Record of a session event.
#[derive(Debug, Serialize, Deserialize)]
pub struct SessionEventRecord {
    pub event_id: SessionEventId,
    pub sequence: i64,
    #[serde(with = "chrono::serde::ts_milliseconds")]
    pub at: DateTime<Utc>,
}

/// Record of a spawn, without its response: that contains a token, so a repeated request is answered with a new one.
#[derive(Debug, Serialize, Deserialize)]
pub struct SpawnRecord {
    pub agent_id: AgentId,
}

/// Response stored under a key.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct StoredResponse {
    /// SHA-256 of the request body.
    pub fingerprint: Vec<u8>,
    pub status: i16,
    pub response: Value,
}

/// Claims a key for an operation, with its record. Returns false when the key is in use; an expired one is overwritten.
/// A transaction that claims the same key waits here for the other to end.
pub(crate) async fn claim_key(
    tx: &mut DatabaseSession,
    workspace: WorkspaceId,
    key: &IdempotencyKey,
    record: &(impl Serialize + Sync),
) -> StoreResult<bool> {
    let claimed = sqlx::query(
        "INSERT INTO idempotency_keys AS k (workspace_id, key_hash, fingerprint, status, response, created_at)
         VALUES ($1, $2, $3, 201, $4, relay_now())
         ON CONFLICT (workspace_id, key_hash) DO UPDATE
            SET fingerprint = excluded.fingerprint, status = excluded.status, response = excluded.response,
                created_at = excluded.created_at
          WHERE k.created_at < relay_now() - make_interval(hours => $5)",
    )
    .bind(workspace)
    .bind(&key.hash[..])
    .bind(&key.fingerprint[..])
    .bind(Json(record))
    .bind(IDEMPOTENCY_RETENTION_HOURS)
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("claiming an idempotency key"))?;
    Ok(claimed.rows_affected() == 1)
}

impl Store {
    /// Returns the response stored under a key in the last 24 hours. It is written in the transaction of its operation,
    /// so that a missing response means that the operation was not committed.
    pub async fn stored_response(
        &self,
        scope: WorkspaceScope,
        key_hash: &[u8; 32],
    ) -> StoreResult<Option<StoredResponse>> {
        // An expired row may still exist: it stays until it is pruned, or claimed again.
        sqlx::query_as(
            "SELECT fingerprint, status, response FROM idempotency_keys
             WHERE workspace_id = $1 AND key_hash = $2 AND created_at > relay_now() - make_interval(hours => $3)",
        )
        .bind(scope.workspace_id())
        .bind(&key_hash[..])
        .bind(IDEMPOTENCY_RETENTION_HOURS)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking up an idempotency key"))
    }
}
