//! The outbox: committed batches that are not marked published, because their gateway stopped or NATS was
//! unavailable. The worker's relay claims an [`UnpublishedBatch`] and publishes it again.

use std::time::Duration;

use relay_domain::{AgentId, BatchId, GatewayId, MessageId, WorkspaceId, WorkspaceScope, ids::as_number};
use serde::{Deserialize, Serialize};
use sqlx::{FromRow, Row, postgres::PgRow, types::Json};

use crate::{Store, StoreError, StoreResult, decode::decode_rows, statement_timeout::StatementTimeout as _};

/// A batch claimed by this worker until the claim expires.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnpublishedBatch {
    pub batch_id: BatchId,
    /// The gateway that committed it.
    pub gateway_id: GatewayId,
    /// The messages whose deliveries are to be published.
    pub sources: Vec<(WorkspaceScope, MessageId)>,
    /// First and last of the agents whose deliveries are meant, if it is a chunk of a fan-out.
    pub agents: Option<(AgentId, AgentId)>,
    /// W3C trace context of the batch.
    pub traceparent: Option<String>,
}

/// Message of a batch as its row stores it: an array of two JSON numbers, of which jsonb keeps all 63 bits.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct OutboxSource(
    #[serde(with = "as_number")] pub(crate) WorkspaceId,
    #[serde(with = "as_number")] pub(crate) MessageId,
);

impl FromRow<'_, PgRow> for UnpublishedBatch {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let Json(sources): Json<Vec<OutboxSource>> = row.try_get("sources")?;
        let scoped = |OutboxSource(workspace, message)| (WorkspaceScope::from_engine_row(workspace), message);
        Ok(Self {
            batch_id: row.try_get("batch_id")?,
            gateway_id: row.try_get("gateway_id")?,
            sources: sources.into_iter().map(scoped).collect(),
            agents: Option::zip(row.try_get("first_agent")?, row.try_get("last_agent")?),
            traceparent: row.try_get("traceparent")?,
        })
    }
}

/// Backlog of publishing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OutboxLag {
    /// Batches not marked published, counted up to 10 000.
    pub pending: i64,
    /// Age of the oldest of them in seconds; 0 without any.
    pub oldest_seconds: f64,
}

// A batch younger than $1 is left to its gateway while that gateway holds its lease. SKIP LOCKED: several
// workers claim at the same time without waiting for each other.
// A claim that ends while its worker still publishes leads to a second publication: JetStream drops frames that it has.
const CLAIM: &str = "
UPDATE outbox o SET claimed_until = relay_now() + make_interval(secs => $3)
  FROM (SELECT batch_id FROM outbox o
         WHERE published_at IS NULL
           AND (claimed_until IS NULL OR claimed_until < relay_now())
           AND (created_at < relay_now() - make_interval(secs => $1)
                OR NOT EXISTS (SELECT FROM gateways g
                                WHERE g.gateway_id = o.gateway_id AND g.lease_until > relay_now()))
         ORDER BY created_at LIMIT $2
           FOR UPDATE SKIP LOCKED) AS due
 WHERE o.batch_id = due.batch_id
RETURNING o.batch_id, o.gateway_id, o.sources, o.first_agent, o.last_agent, o.traceparent";

/// Condition: a batch is not marked published. In the order of the index, so that no plan reads those that are.
pub(crate) const HAS_UNPUBLISHED: &str =
    "(SELECT true FROM outbox WHERE published_at IS NULL ORDER BY created_at LIMIT 1) IS NOT NULL";

// Bounded, because the lag is measured often and an outage may leave millions of rows.
const LAG: &str = "
SELECT count(*), coalesce(greatest(extract(epoch FROM relay_now() - min(created_at)), 0), 0)::float8
  FROM (SELECT created_at FROM outbox WHERE published_at IS NULL ORDER BY created_at LIMIT 10000) AS o";

impl Store {
    /// Claims up to `limit` batches that are older than `min_age`, or whose gateway has no lease. No other worker
    /// gets them for the duration of `claim`; then they can be claimed again.
    pub async fn claim_unpublished(
        &self,
        min_age: Duration,
        limit: i64,
        claim: Duration,
    ) -> StoreResult<Vec<UnpublishedBatch>> {
        let rows = sqlx::query(CLAIM)
            .bind(min_age.as_secs_f64())
            .bind(limit)
            .bind(claim.as_secs_f64())
            .fetch_all(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("claiming unpublished batches"))?;
        decode_rows("outbox", &rows)
    }

    /// Marks batches published. Returns how many were not marked before, by their gateway or another worker.
    pub async fn mark_published(&self, batches: &[BatchId]) -> StoreResult<u64> {
        let done = sqlx::query(
            "UPDATE outbox SET published_at = relay_now(), claimed_until = NULL
              WHERE batch_id = ANY($1) AND published_at IS NULL",
        )
        .bind(batches)
        .execute(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("marking batches published"))?;
        Ok(done.rows_affected())
    }

    /// Measures the backlog of publishing.
    pub async fn outbox_lag(&self) -> StoreResult<OutboxLag> {
        let (pending, oldest_seconds) = sqlx::query_as(LAG)
            .fetch_one(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("measuring the outbox's lag"))?;
        Ok(OutboxLag { pending, oldest_seconds })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_stored_as_pairs_of_numbers() {
        let sources = [OutboxSource(WorkspaceId::new(7), MessageId::new(i64::MAX))];
        assert_eq!(serde_json::to_string(&sources).unwrap(), "[[7,9223372036854775807]]");
    }
}
