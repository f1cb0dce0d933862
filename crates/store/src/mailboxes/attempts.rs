//! Recorded http_push attempts of a delivery, as its recipient reads them over REST.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, WorkspaceScope, mailboxes::stream::Seq};

use crate::{Store, StoreError, StoreResult};

/// One http_push attempt of a delivery.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct AttemptRow {
    /// Ascends with time.
    pub attempt_id: i64,
    pub node_id: String,
    pub attempted_at: DateTime<Utc>,
    pub latency_ms: i32,
    /// HTTP status; `None` when no response arrived.
    pub status: Option<i16>,
    /// First bytes of the response; failures only.
    pub answer: Option<Vec<u8>>,
    /// `None` when the node accepted the delivery.
    pub error: Option<String>,
}

#[derive(sqlx::FromRow)]
struct DeliveryAttempt {
    agent_id: i64,
    seq: Seq,
    #[sqlx(flatten)]
    attempt: AttemptRow,
}

impl Store {
    /// Lists the newest `limit` attempts of a delivery, oldest first.
    pub async fn attempts(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        seq: Seq,
        limit: i64,
    ) -> StoreResult<Vec<AttemptRow>> {
        let mut rows: Vec<AttemptRow> = sqlx::query_as(
            "SELECT attempt_id, node_id, attempted_at, latency_ms, status, answer, error
               FROM delivery_attempts WHERE workspace_id = $1 AND agent_id = $2 AND seq = $3
              ORDER BY attempt_id DESC LIMIT $4",
        )
        .bind(scope.workspace_id().get())
        .bind(agent.get())
        .bind(seq)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the attempts of a delivery"))?;
        rows.reverse();
        Ok(rows)
    }

    /// Lists the newest `limit` attempts of each delivery, oldest first and without response bodies. `since` is a lower
    /// bound of their creation.
    pub async fn attempts_of_deliveries(
        &self,
        scope: WorkspaceScope,
        deliveries: &[(AgentId, Seq)],
        since: DateTime<Utc>,
        limit: i64,
    ) -> StoreResult<Vec<(AgentId, Seq, AttemptRow)>> {
        let (agents, seqs): (Vec<i64>, Vec<Seq>) = deliveries.iter().map(|(agent, seq)| (agent.get(), *seq)).unzip();
        // The bound on created_on limits the scan to few partitions; one index range is read per delivery.
        let rows: Vec<DeliveryAttempt> = sqlx::query_as(
            "SELECT k.agent_id, k.seq, t.*
               FROM unnest($2::bigint[], $3::bigint[]) AS k (agent_id, seq)
              CROSS JOIN LATERAL (
                    SELECT attempt_id, node_id, attempted_at, latency_ms, status, NULL::bytea AS answer, error
                      FROM delivery_attempts
                     WHERE workspace_id = $1 AND agent_id = k.agent_id AND seq = k.seq AND created_on >= $4
                     ORDER BY attempt_id DESC LIMIT $5) AS t
              ORDER BY k.agent_id, k.seq, t.attempt_id",
        )
        .bind(scope.workspace_id().get())
        .bind(agents)
        .bind(seqs)
        .bind(since.date_naive())
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the attempts of deliveries"))?;
        Ok(rows.into_iter().map(|row| (AgentId::new(row.agent_id), row.seq, row.attempt)).collect())
    }
}
