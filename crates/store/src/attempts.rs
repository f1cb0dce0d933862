//! Tries to hand a delivery over, as its recipient reads them.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, WorkspaceScope, session::Seq};

use crate::{Store, StoreError, StoreResult};

/// One try.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct AttemptRow {
    /// Its id; later ones are higher.
    pub attempt_id: i64,
    /// Where it went.
    pub node_id: String,
    /// When it began.
    pub attempted_at: DateTime<Utc>,
    /// How long it took.
    pub latency_ms: i32,
    /// The HTTP status; none when no answer came.
    pub status: Option<i16>,
    /// What began the answer; of failures only.
    pub answer: Option<Vec<u8>>,
    /// What went wrong.
    pub error: Option<String>,
}

#[derive(sqlx::FromRow)]
struct OfDelivery {
    agent_id: i64,
    seq: Seq,
    #[sqlx(flatten)]
    attempt: AttemptRow,
}

impl Store {
    /// The tries of a delivery, oldest first, at most `limit`; the newest when there are more.
    ///
    /// # Errors
    /// When Postgres does not answer.
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
        .map_err(StoreError::from_sqlx("reading the tries of a delivery"))?;
        rows.reverse();
        Ok(rows)
    }

    /// The tries of several deliveries that were written on `since` or later, each delivery's oldest first, at most `limit`
    /// each; the newest where there are more. Without what began the answers.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn attempts_of(
        &self,
        scope: WorkspaceScope,
        of: &[(AgentId, Seq)],
        since: DateTime<Utc>,
        limit: i64,
    ) -> StoreResult<Vec<(AgentId, Seq, AttemptRow)>> {
        let (agents, seqs): (Vec<i64>, Vec<Seq>) = of.iter().map(|(agent, seq)| (agent.get(), *seq)).unzip();
        let rows: Vec<OfDelivery> = sqlx::query_as(
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
        .map_err(StoreError::from_sqlx("reading the tries of deliveries"))?;
        Ok(rows.into_iter().map(|row| (AgentId::new(row.agent_id), row.seq, row.attempt)).collect())
    }
}
