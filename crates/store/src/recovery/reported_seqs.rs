//! Seqs above a mailbox's head that a broker reports after a restore: they were allotted before it.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, WorkspaceScope,
    mailboxes::{dead_letter::DeadLetterReason, stream::Seq},
    recovery::{REPORT_WINDOW, may_raise_head},
};

use super::heads;
use crate::{
    Store, StoreError, StoreResult, mailboxes::expiry::extend_settled_floors, messages::days::day_of,
    nodes::fence::Fence,
};

/// Outcome of a reported seq.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportOutcome {
    /// The seq is below the head by now, or the agent has moved to another provider.
    NotAhead,
    /// The head was raised above the seq.
    Raised {
        /// Seqs without a row; they became dead letters.
        lost: u64,
        /// Deliveries that were allotted one of these seqs again since the recovery, and moved above it.
        moved: u64,
    },
    /// The seq is too high, or no recent recovery explains it.
    Refused,
}

// Earlier raises by reports are counted as dead letters since the recovery: these are kept for longer than the window in
// which reports are accepted.
const MAILBOX_STATE: &str = "
SELECT h.next_seq - 1, r.recovered_at,
       (SELECT count(*) FROM delivery_exceptions x
         WHERE x.workspace_id = $1 AND x.agent_id = $2 AND x.state = 4 AND x.reason = $5 AND x.at >= r.recovered_at)
  FROM mailbox_heads h
  JOIN agents a USING (workspace_id, agent_id)
 CROSS JOIN recovery_state r
 WHERE h.workspace_id = $1 AND h.agent_id = $2 AND a.deleted_at IS NULL
   AND a.node_id = $3 AND (a.provider IS NULL OR a.provider = $4)";

/// Moves unsettled deliveries that were written since the recovery with seqs up to the reported one ($3): each gets the next
/// seq above it, as if its recipient had reported a retryable failure.
const MOVE_DELIVERIES: &str = "
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
    /// Raises the head of a mailbox above a seq that the broker of its agent has reported, by `margin` at most and within
    /// [`REPORT_WINDOW`] after a recovery. Seqs in between without a row become dead letters.
    pub async fn raise_to_reported(
        &self,
        fence: &Fence,
        agent: AgentId,
        reported: Seq,
        margin: i64,
        now: DateTime<Utc>,
        mut fresh_id: impl FnMut() -> i64,
    ) -> StoreResult<ReportOutcome> {
        let doing = "raising a mailbox head above a reported seq";
        let scope: WorkspaceScope = fence.scope;
        let (workspace, mailbox) = (scope.workspace_id().get(), agent.get());
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        heads::lock_mailboxes(&mut tx, &[workspace], &[mailbox]).await?;
        let state: Option<(Seq, Option<DateTime<Utc>>, i64)> = sqlx::query_as(MAILBOX_STATE)
            .bind(workspace)
            .bind(mailbox)
            .bind(fence.node_id.as_str())
            .bind(fence.provider.as_str())
            .bind(DeadLetterReason::LostInRestore.as_str())
            .fetch_optional(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let Some((head, recovered_at, raised)) = state.filter(|(head, ..)| reported > *head) else {
            return Ok(ReportOutcome::NotAhead);
        };
        let recovered_at = recovered_at.filter(|at| (now - *at).to_std().is_ok_and(|since| since <= REPORT_WINDOW));
        let Some(recovered_at) = recovered_at.filter(|_| may_raise_head(head, reported, raised, margin)) else {
            return Ok(ReportOutcome::Refused);
        };
        let lost = heads::raise_locked_heads(&mut tx, &[(scope, agent, reported)], now, &mut fresh_id).await?;
        let moved = sqlx::query(MOVE_DELIVERIES)
            .bind(workspace)
            .bind(mailbox)
            .bind(reported)
            .bind(recovered_at)
            .bind(now)
            .bind(day_of(now))
            .bind("its seq was allotted before the database was restored: see redriven_as")
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?
            .rows_affected();
        extend_settled_floors(&mut tx, &[workspace], &[mailbox]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(ReportOutcome::Raised { lost, moved })
    }
}
