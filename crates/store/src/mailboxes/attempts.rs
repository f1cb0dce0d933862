//! Recorded http_push attempts of a delivery, as its recipient reads them over REST.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, WorkspaceScope, mailboxes::stream::Seq, push::attempt::DeliveryAttempt};

use crate::{Store, StoreError, StoreResult};

#[derive(sqlx::FromRow)]
struct KeyedAttempt {
    agent_id: AgentId,
    seq: Seq,
    #[sqlx(flatten)]
    attempt: DeliveryAttempt,
}

impl Store {
    /// Lists the newest `limit` attempts of a delivery, oldest first.
    pub async fn attempts(
        &self,
        scope: WorkspaceScope,
        agent: AgentId,
        seq: Seq,
        limit: i64,
    ) -> StoreResult<Vec<DeliveryAttempt>> {
        let mut rows: Vec<DeliveryAttempt> = sqlx::query_as(
            "SELECT attempt_id, node_id, attempted_at, latency_ms, status, answer, error
               FROM delivery_attempts WHERE workspace_id = $1 AND agent_id = $2 AND seq = $3
              ORDER BY attempt_id DESC LIMIT $4",
        )
        .bind(scope.workspace_id())
        .bind(agent)
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
    ) -> StoreResult<Vec<(AgentId, Seq, DeliveryAttempt)>> {
        let (agents, seqs): (Vec<AgentId>, Vec<Seq>) = deliveries.iter().copied().unzip();
        // The bound on created_on limits the scan to few partitions; one index range is read per delivery.
        let rows: Vec<KeyedAttempt> = sqlx::query_as(
            "SELECT k.agent_id, k.seq, t.*
               FROM unnest($2::bigint[], $3::bigint[]) AS k (agent_id, seq)
              CROSS JOIN LATERAL (
                    SELECT attempt_id, node_id, attempted_at, latency_ms, status, NULL::bytea AS answer, error
                      FROM delivery_attempts
                     WHERE workspace_id = $1 AND agent_id = k.agent_id AND seq = k.seq AND created_on >= $4
                     ORDER BY attempt_id DESC LIMIT $5) AS t
              ORDER BY k.agent_id, k.seq, t.attempt_id",
        )
        .bind(scope.workspace_id())
        .bind(agents)
        .bind(seqs)
        .bind(since.date_naive())
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the attempts of deliveries"))?;
        Ok(rows.into_iter().map(|row| (row.agent_id, row.seq, row.attempt)).collect())
    }
}
