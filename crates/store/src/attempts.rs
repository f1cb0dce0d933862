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
}
