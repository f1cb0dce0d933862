//! Seqs that a broker reports after a restore, though they have not been sent since: they were allotted before it.

use std::collections::HashSet;

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, WorkspaceId, WorkspaceScope,
    mailboxes::{dead_letter::DeadLetterReason, stream::Seq},
    recovery::{REPORT_WINDOW, may_raise_head},
};

use super::heads;
use crate::{
    Store, StoreError, StoreResult,
    codes::{DEAD_LETTERED, DEFERRED, FAILED},
    decode::decode_row,
    mailboxes::settled_floors::extend_settled_floors,
    messages::days::day_of,
    nodes::fence::Fence,
    statement_timeout::StatementTimeout as _,
};

/// Seq up to which a broker has received the deliveries of one of its agents.
#[derive(Debug, Clone, Copy)]
pub struct ReportedSeq<'a> {
    /// Connection of the broker.
    pub fence: &'a Fence,
    pub agent_id: AgentId,
    pub seq: Seq,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportOutcome {
    /// The seq was sent by now, or the agent has moved to another provider.
    NotAhead,
    /// The head was raised above the seq, unless it was above it.
    Raised {
        /// Seqs without a row; they became dead letters.
        lost: u64,
        /// Deliveries that were allotted one of these seqs again since the recovery, and moved above the head, together
        /// with those behind them.
        moved: u64,
    },
    /// The seq is too high, or no recent recovery explains it.
    Refused,
}

// Earlier raises by reports are counted as dead letters since the recovery: these are kept for longer than the window
// in which reports are accepted.
const MAILBOX_STATE: &str = formatcp!(
    "
SELECT h.agent_id, h.next_seq - 1 AS head, c.sent_seq, r.recovered_at,
       CASE WHEN r.epoch > 0 THEN least(to_timestamp(r.epoch / 1000.0), r.recovered_at)
            ELSE r.recovered_at END AS began_at,
       (SELECT count(*) FROM delivery_exceptions x
         WHERE x.workspace_id = $1 AND x.agent_id = $2 AND x.state = {DEAD_LETTERED} AND x.reason = $5
           AND x.at >= r.recovered_at) AS raised
  FROM mailbox_heads h
  JOIN mailbox_cursors c USING (workspace_id, agent_id)
  JOIN agents a USING (workspace_id, agent_id)
 CROSS JOIN recovery_state r
 WHERE h.workspace_id = $1 AND h.agent_id = $2 AND a.deleted_at IS NULL
   AND a.node_id = $3 AND (a.provider IS NULL OR a.provider = $4)"
);

#[derive(sqlx::FromRow)]
struct MailboxState {
    head: Seq,
    /// Highest seq sent over any socket, as of the last flush.
    sent_seq: Seq,
    /// `None` if the database was never recovered.
    recovered_at: Option<DateTime<Utc>>,
    /// Begin of that recovery. No delivery was written between the two, so that the clocks of the processes that wrote
    /// before and after may differ a little.
    began_at: Option<DateTime<Utc>>,
    /// Seqs by which reports have raised the head since.
    raised: i64,
}

/// The begin of the recovery as in [`MAILBOX_STATE`]; the deliveries of its day and later are few partitions.
const REASSIGNED: &str = "
SELECT k.workspace_id, k.agent_id
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS k (workspace_id, agent_id, seq)
  JOIN mailbox_heads h USING (workspace_id, agent_id)
  JOIN mailbox_cursors c USING (workspace_id, agent_id)
 CROSS JOIN (SELECT least(to_timestamp(epoch / 1000.0), recovered_at) AS began_at FROM recovery_state) AS r
 WHERE k.seq > c.sent_seq
   AND (k.seq >= h.next_seq
        OR EXISTS (SELECT FROM deliveries d
                    WHERE d.workspace_id = k.workspace_id AND d.agent_id = k.agent_id
                      AND d.seq > c.sent_seq AND d.seq <= k.seq AND d.created_at >= r.began_at
                      AND d.created_on >= (r.began_at AT TIME ZONE 'UTC')::date))";

/// Moves unsettled deliveries above $8 that were written since the recovery: each gets the next seq above the head
/// ($3), as if its recipient had reported a retryable failure. All of them move, so that they keep their order.
const MOVE_DELIVERIES: &str = formatcp!(
    "
WITH moved AS (
    SELECT d.*, a.node_id AS located, $3 + row_number() OVER (ORDER BY d.seq) AS fresh
      FROM deliveries d
      JOIN agents a USING (workspace_id, agent_id)
      LEFT JOIN delivery_exceptions x USING (workspace_id, agent_id, seq)
     WHERE d.workspace_id = $1 AND d.agent_id = $2 AND d.seq <= $3 AND d.created_at >= $4
       AND d.created_on >= ($4 AT TIME ZONE 'UTC')::date
       AND d.seq > greatest($8, (SELECT c.settled_floor FROM mailbox_cursors c
                                  WHERE c.workspace_id = $1 AND c.agent_id = $2))
       AND (x.state IS NULL OR x.state = {DEFERRED})
), bumped AS (
    UPDATE mailbox_heads SET next_seq = next_seq + (SELECT count(*) FROM moved) WHERE workspace_id = $1 AND agent_id = $2
), left_behind AS (
    INSERT INTO delivery_exceptions (workspace_id, agent_id, seq, state, error, retryable, at, redriven_seq, redriven_at)
    SELECT workspace_id, agent_id, seq, {FAILED}, $7, true, $5, fresh, $5 FROM moved
        ON CONFLICT (workspace_id, agent_id, seq) DO UPDATE
       SET state = excluded.state, error = excluded.error, retryable = excluded.retryable, available_at = NULL,
           at = excluded.at, redriven_seq = excluded.redriven_seq, redriven_at = excluded.redriven_at
)
INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_kind, source_id, redrive_no, channel_id,
                        node_id, mode, reason, created_at, expires_at)
SELECT workspace_id, agent_id, fresh, $6, source_kind, source_id, redrive_no + 1, channel_id,
       located, mode, reason, $5, expires_at
  FROM moved"
);

impl Store {
    /// Finds the mailboxes, among these with the highest seqs that were sent before the last recovery, where such a seq
    /// was assigned again or will be.
    pub async fn reassigned_seqs(
        &self,
        sent: &[(WorkspaceScope, AgentId, Seq)],
    ) -> StoreResult<HashSet<(WorkspaceScope, AgentId)>> {
        let rows: Vec<(WorkspaceId, AgentId)> = sqlx::query_as(REASSIGNED)
            .bind(sent.iter().map(|(scope, ..)| scope.workspace_id()).collect::<Vec<_>>())
            .bind(sent.iter().map(|(_, agent, _)| *agent).collect::<Vec<_>>())
            .bind(sent.iter().map(|(.., seq)| *seq).collect::<Vec<_>>())
            .fetch_all(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("comparing sent seqs with mailboxes"))?;
        let scoped = |(workspace, agent)| (WorkspaceScope::from_engine_row(workspace), agent);
        Ok(rows.into_iter().map(scoped).collect())
    }

    /// Raises the head of a mailbox above a seq that the broker of its agent has reported, by `margin` at most and
    /// within [`REPORT_WINDOW`] after a recovery. Seqs in between without a row become dead letters. Deliveries that
    /// were allotted such a seq since move above the head, also if it is above the report: the broker would drop them
    /// as repeated.
    pub async fn raise_to_reported(
        &self,
        reported: ReportedSeq<'_>,
        margin: i64,
        now: DateTime<Utc>,
        mut fresh_id: impl FnMut() -> i64,
    ) -> StoreResult<ReportOutcome> {
        let doing = "raising a mailbox head above a reported seq";
        let ReportedSeq { fence, agent_id, seq } = reported;
        let workspace = fence.scope.workspace_id();
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        heads::lock_mailboxes(&mut tx, &[workspace], &[agent_id]).await?;
        let state = sqlx::query(MAILBOX_STATE)
            .bind(fence.scope.workspace_id())
            .bind(agent_id)
            .bind(&fence.node_id)
            .bind(&fence.provider)
            .bind(DeadLetterReason::LostInRestore.as_str())
            .fetch_optional(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let state: Option<MailboxState> = state.map(|row| decode_row("mailbox_heads", &row)).transpose()?;
        let Some(state) = state.filter(|state| seq > state.sent_seq) else { return Ok(ReportOutcome::NotAhead) };
        let age = state.recovered_at.and_then(|at| (now - at).to_std().ok());
        let is_recent = age.is_some_and(|age| age <= REPORT_WINDOW);
        let is_above = seq > state.head;
        let may_raise = !is_above || may_raise_head(state.head, seq, state.raised, margin);
        let Some(began_at) = state.began_at.filter(|_| is_recent && may_raise) else {
            return Ok(ReportOutcome::Refused);
        };
        let mut lost = 0;
        if is_above {
            lost = heads::raise_locked_heads(&mut tx, &[(fence.scope, agent_id, seq)], now, &mut fresh_id).await?;
        }
        let moved = sqlx::query(MOVE_DELIVERIES)
            .bind(fence.scope.workspace_id())
            .bind(agent_id)
            .bind(seq.max(state.head))
            .bind(began_at)
            .bind(now)
            .bind(day_of(now))
            .bind("its seq was allotted before the database was restored: see redriven_as")
            // A sent seq below the head comes from a socket that knew the broker's position.
            .bind(if is_above { 0 } else { state.sent_seq })
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?
            .rows_affected();
        extend_settled_floors(&mut tx, &[workspace], &[agent_id]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        // The sent position is flushed with a delay, also before a failover.
        Ok(if is_above || moved > 0 { ReportOutcome::Raised { lost, moved } } else { ReportOutcome::NotAhead })
    }
}
