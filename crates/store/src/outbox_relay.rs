//! Commit batches that their gateway did not mark published: it died, or NATS was away.

use std::time::Duration;

use relay_domain::{BatchId, GatewayId, MessageId, WorkspaceId, WorkspaceScope};
use sqlx::Row;

use crate::{Store, StoreError, StoreResult, patience::Patient as _};

/// A batch that is this worker's to publish until the claim lapses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnpublishedBatch {
    /// The batch.
    pub batch_id: BatchId,
    /// The gateway that committed it.
    pub gateway_id: GatewayId,
    /// The messages whose deliveries are to be published.
    pub sources: Vec<(WorkspaceScope, MessageId)>,
    /// The trace that the batch belongs to.
    pub traceparent: Option<String>,
}

/// How far publishing is behind committing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OutboxLag {
    /// Batches not marked published, counted up to 10 000.
    pub pending: i64,
    /// Age of the oldest of them in seconds; 0 when there is none.
    pub oldest_seconds: f64,
}

// A younger batch belongs to its gateway while that gateway's lease holds.
const CLAIM: &str = "
UPDATE outbox o SET claimed_until = now() + make_interval(secs => $3)
  FROM (SELECT batch_id FROM outbox o
         WHERE published_at IS NULL
           AND (claimed_until IS NULL OR claimed_until < now())
           AND (created_at < now() - make_interval(secs => $1)
                OR NOT EXISTS (SELECT FROM gateways g
                                WHERE g.gateway_id = o.gateway_id AND g.lease_until > now()))
         ORDER BY created_at LIMIT $2
           FOR UPDATE SKIP LOCKED) AS due
 WHERE o.batch_id = due.batch_id
RETURNING o.batch_id, o.gateway_id, o.sources, o.traceparent";

const LAG: &str = "
SELECT count(*), coalesce(greatest(extract(epoch FROM now() - min(created_at)), 0), 0)::float8
  FROM (SELECT created_at FROM outbox WHERE published_at IS NULL ORDER BY created_at LIMIT 10000) AS o";

impl Store {
    /// Claims up to `limit` batches that are older than `patience`, or whose gateway's lease is gone.
    /// Nobody else gets them for the length of `claim`.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn claim_unpublished(
        &self,
        patience: Duration,
        limit: i64,
        claim: Duration,
    ) -> StoreResult<Vec<UnpublishedBatch>> {
        let rows = sqlx::query(CLAIM)
            .bind(patience.as_secs_f64())
            .bind(limit)
            .bind(claim.as_secs_f64())
            .fetch_all(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx("claiming unpublished batches"))?;
        let batches = rows.iter().map(|row| {
            let sources: sqlx::types::Json<Vec<(i64, i64)>> =
                row.try_get("sources").map_err(StoreError::from_sqlx("reading an outbox row's sources"))?;
            let scoped = |(workspace, message)| {
                (WorkspaceScope::from_engine_row(WorkspaceId::new(workspace)), MessageId::new(message))
            };
            Ok(UnpublishedBatch {
                batch_id: BatchId::new(row.get("batch_id")),
                gateway_id: GatewayId::new(row.get("gateway_id")),
                sources: sources.0.into_iter().map(scoped).collect(),
                traceparent: row.get("traceparent"),
            })
        });
        batches.collect()
    }

    /// Marks batches published, whoever published them. Returns how many were not marked before.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn mark_relayed(&self, batches: &[BatchId]) -> StoreResult<u64> {
        let ids: Vec<i64> = batches.iter().map(|batch| batch.get()).collect();
        let done = sqlx::query(
            "UPDATE outbox SET published_at = now(), claimed_until = NULL
              WHERE batch_id = ANY($1) AND published_at IS NULL",
        )
        .bind(ids)
        .execute(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("marking batches published"))?;
        Ok(done.rows_affected())
    }

    /// How far publishing is behind.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn outbox_lag(&self) -> StoreResult<OutboxLag> {
        let (pending, oldest_seconds) = sqlx::query_as(LAG)
            .fetch_one(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx("measuring the outbox's lag"))?;
        Ok(OutboxLag { pending, oldest_seconds })
    }
}
