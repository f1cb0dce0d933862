//! A position above a mailbox's head, told by a broker after a restore: its numbers were given away before.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, WorkspaceScope,
    dead_letter::DeadReason,
    recovery::{TOLD_WITHIN, may_raise},
    session::Seq,
};

use super::heads;
use crate::{Store, StoreError, StoreResult, commit::day_of, expiry::extend_settled_floors, hosting::Fence};

/// What came of a position that a broker told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// The mailbox reaches there by now, or the agent is elsewhere.
    Known,
    /// The head was raised above it.
    Raised {
        /// Numbers that nothing is known of: dead letters.
        given_up: u64,
        /// Deliveries that had been given one of these numbers once more, and got another.
        moved: u64,
    },
    /// It is too high, or no recovery explains it.
    Refused,
}

// What was raised on the word of brokers are the letters since the recovery; they are kept for longer than the word counts.
const STANDING: &str = "
SELECT h.next_seq - 1, r.recovered_at,
       (SELECT count(*) FROM delivery_exceptions x
         WHERE x.workspace_id = $1 AND x.agent_id = $2 AND x.state = 4 AND x.reason = $5 AND x.at >= r.recovered_at)
  FROM mailbox_heads h
  JOIN agents a USING (workspace_id, agent_id)
 CROSS JOIN recovery_state r
 WHERE h.workspace_id = $1 AND h.agent_id = $2 AND a.deleted_at IS NULL
   AND a.node_id = $3 AND (a.provider IS NULL OR a.provider = $4)";

/// Deliveries that were written since the recovery with numbers up to the told one ($3), and wait: each gets the next
/// number above it, as if its recipient had reported a failure that passes.
const MOVE: &str = "
WITH moved AS (
    SELECT d.*, a.node_id AS located, $3 + row_number() OVER (ORDER BY d.seq) AS fresh
      FROM deliveries d
      JOIN agents a USING (workspace_id, agent_id)
      LEFT JOIN delivery_exceptions x USING (workspace_id, agent_id, seq)
     WHERE d.workspace_id = $1 AND d.agent_id = $2 AND d.seq <= $3 AND d.created_at >= $4
       AND d.created_on >= ($4 AT TIME ZONE 'UTC')::date
       AND d.seq > (SELECT c.settled_floor FROM mailbox_cursors c WHERE c.workspace_id = $1 AND c.agent_id = $2)
       AND (x.state IS NULL OR x.state = 3)
), bumped AS (
    UPDATE mailbox_heads SET next_seq = next_seq + (SELECT count(*) FROM moved) WHERE workspace_id = $1 AND agent_id = $2
), left_behind AS (
    INSERT INTO delivery_exceptions (workspace_id, agent_id, seq, state, error, retryable, at, redriven_seq, redriven_at)
    SELECT workspace_id, agent_id, seq, 2, $7, true, $5, fresh, $5 FROM moved
        ON CONFLICT (workspace_id, agent_id, seq) DO UPDATE
       SET state = excluded.state, error = excluded.error, retryable = excluded.retryable, available_at = NULL,
           at = excluded.at, redriven_seq = excluded.redriven_seq, redriven_at = excluded.redriven_at
)
INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_kind, source_id, redrive_no, channel_id,
                        node_id, mode, reason, created_at, expires_at)
SELECT workspace_id, agent_id, fresh, $6, source_kind, source_id, redrive_no + 1, channel_id,
       located, mode, reason, $5, expires_at
  FROM moved";

impl Store {
    /// Raises the head of a mailbox above a position that the broker of its agent has told, by `margin` at most, if the
    /// database was recovered in the last days. Numbers in between that nothing is known of become dead letters.
    ///
    /// # Errors
    /// When Postgres is away or the transaction lost a lock race; nothing has changed then.
    pub async fn raise_to_told(
        &self,
        fence: &Fence,
        agent: AgentId,
        told: Seq,
        margin: i64,
        now: DateTime<Utc>,
        mut fresh_id: impl FnMut() -> i64,
    ) -> StoreResult<Told> {
        let doing = "raising a mailbox to what its broker has had";
        let scope: WorkspaceScope = fence.scope;
        let (workspace, mailbox) = (scope.workspace_id().get(), agent.get());
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        heads::lock(&mut tx, &[workspace], &[mailbox]).await?;
        let standing: Option<(Seq, Option<DateTime<Utc>>, i64)> = sqlx::query_as(STANDING)
            .bind(workspace)
            .bind(mailbox)
            .bind(fence.node_id.as_str())
            .bind(fence.provider.as_str())
            .bind(DeadReason::LostInRestore.as_str())
            .fetch_optional(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let Some((head, recovered_at, raised)) = standing.filter(|(head, ..)| told > *head) else {
            return Ok(Told::Known);
        };
        let recovered_at = recovered_at.filter(|at| (now - *at).to_std().is_ok_and(|since| since <= TOLD_WITHIN));
        let Some(recovered_at) = recovered_at.filter(|_| may_raise(head, told, raised, margin)) else {
            return Ok(Told::Refused);
        };
        let given_up = heads::raise(&mut tx, &[(scope, agent, told)], now, &mut fresh_id).await?;
        let moved = sqlx::query(MOVE)
            .bind(workspace)
            .bind(mailbox)
            .bind(told)
            .bind(recovered_at)
            .bind(now)
            .bind(day_of(now))
            .bind("its number was given away before the database was restored: see redriven_as")
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?
            .rows_affected();
        extend_settled_floors(&mut tx, &[workspace], &[mailbox]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Told::Raised { given_up, moved })
    }
}
