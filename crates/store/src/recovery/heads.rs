//! Raising of heads: seqs that were allotted before a restore must not be allotted again.

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::{
    AgentId, WorkspaceId, WorkspaceScope,
    events::EventSeq,
    mailboxes::{dead_letter::DeadLetterReason, stream::Seq},
};

use crate::{
    Store, StoreError, StoreResult,
    codes::{DEAD_LETTERED, NOTICE_SOURCE},
    connections::DatabaseSession,
    mailboxes::{
        cursors::split_keys,
        settled_floors::{extend_settled_floors, lock_cursors},
    },
};

/// Key of a mailbox, in the order in which pages of mailboxes are read.
pub type MailboxKey = (WorkspaceId, AgentId);

/// Before the first mailbox of the first page.
pub const BEFORE_ALL_MAILBOXES: MailboxKey = (WorkspaceId::new(0), AgentId::new(0));

/// Result of one step of [`Store::jump_heads`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadJump {
    /// Last mailbox of the page; `None` if none was left.
    pub last: Option<MailboxKey>,
    /// Mailboxes raised.
    pub mailboxes: u64,
    /// Seqs without a row below the rows of an interrupted recovery; they became dead letters.
    pub lost: u64,
}

// Sorted, so that concurrent transactions take the row locks in one order. count(*) keeps the rows in Postgres.
const LOCK_HEADS: &str = "
SELECT count(*) FROM (
    SELECT h.agent_id
      FROM mailbox_heads h JOIN unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
     USING (workspace_id, agent_id)
     ORDER BY h.workspace_id, h.agent_id
       FOR UPDATE OF h) AS l";

/// Selects the seqs without a row between the head of a mailbox and the seq to which it is raised.
const GAPS: &str = "
SELECT k.workspace_id, k.agent_id, n.seq
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS k (workspace_id, agent_id, highest)
  JOIN mailbox_heads h USING (workspace_id, agent_id)
 CROSS JOIN LATERAL generate_series(h.next_seq, k.highest) AS n (seq)
 WHERE NOT EXISTS (SELECT FROM deliveries d
                    WHERE d.workspace_id = k.workspace_id AND d.agent_id = k.agent_id AND d.seq = n.seq)
 ORDER BY k.workspace_id, k.agent_id, n.seq";

/// Writes a delivery and its dead letter for each gap.
// The deliveries need no ON CONFLICT: the gaps were found after the heads were locked.
const DEAD_LETTER_GAPS: &str = formatcp!(
    "WITH gaps AS (
        SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[])
                      AS g (workspace_id, agent_id, seq, source_id)
     ), rows AS (
        INSERT INTO deliveries (workspace_id, agent_id, seq, created_on, source_kind, source_id, node_id,
                                created_at, expires_at)
        SELECT g.workspace_id, g.agent_id, g.seq, ($5 AT TIME ZONE 'UTC')::date, {NOTICE_SOURCE}, g.source_id, a.node_id,
               $5, $5
          FROM gaps g JOIN agents a USING (workspace_id, agent_id)
     )
     INSERT INTO delivery_exceptions (workspace_id, agent_id, seq, state, error, retryable, reason, at)
     SELECT g.workspace_id, g.agent_id, g.seq, {DEAD_LETTERED}, $6, false, $7, $5 FROM gaps g
         ON CONFLICT DO NOTHING"
);

// sent_seq rises with the head: the seqs may have been written to a socket before the restore.
const RAISE: &str = "
WITH k AS (SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS k (workspace_id, agent_id, highest)),
sent AS (
    UPDATE mailbox_cursors c SET sent_seq = greatest(c.sent_seq, k.highest)
      FROM k WHERE c.workspace_id = k.workspace_id AND c.agent_id = k.agent_id
)
UPDATE mailbox_heads h SET next_seq = k.highest + 1
  FROM k
 WHERE h.workspace_id = k.workspace_id AND h.agent_id = k.agent_id AND h.next_seq <= k.highest";

const PAGE: &str = "
SELECT workspace_id, agent_id FROM mailbox_heads
 WHERE (workspace_id, agent_id) > ($1, $2) ORDER BY workspace_id, agent_id LIMIT $3";

/// Finds rows at or above their heads: a recovery reinserted them and was interrupted before it raised the heads.
const LEFT_ABOVE: &str = "
SELECT h.workspace_id, h.agent_id, d.seq
  FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
  JOIN mailbox_heads h USING (workspace_id, agent_id)
 CROSS JOIN LATERAL (
       SELECT max(seq) AS seq FROM deliveries
        WHERE workspace_id = h.workspace_id AND agent_id = h.agent_id AND seq >= h.next_seq) AS d
 WHERE d.seq IS NOT NULL
 ORDER BY h.workspace_id, h.agent_id";

/// Records the skipped seqs of a non-empty mailbox as one run, because its floor cannot pass the unsettled rows below.
/// A run of an interrupted recovery that ends at the head is extended.
const SKIP: &str = "
WITH busy AS (
    SELECT h.workspace_id, h.agent_id, h.next_seq
      FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
      JOIN mailbox_heads h USING (workspace_id, agent_id)
      JOIN mailbox_cursors c USING (workspace_id, agent_id)
     WHERE c.settled_floor < h.next_seq - 1
), before AS (
    DELETE FROM skipped_seqs s USING busy b
     WHERE s.workspace_id = b.workspace_id AND s.agent_id = b.agent_id AND s.last_seq = b.next_seq - 1
    RETURNING s.workspace_id, s.agent_id, s.first_seq
)
INSERT INTO skipped_seqs (workspace_id, agent_id, first_seq, last_seq, at)
SELECT b.workspace_id, b.agent_id, coalesce(p.first_seq, b.next_seq), b.next_seq + $3 - 1, relay_now()
  FROM busy b LEFT JOIN before p USING (workspace_id, agent_id)";

// An empty mailbox needs no run: its floors jump with the head.
const JUMP: &str = "
WITH k AS (SELECT * FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)),
idle AS (
    UPDATE mailbox_cursors c
       SET sent_seq = h.next_seq + $3 - 1, ack_floor = h.next_seq + $3 - 1, settled_floor = h.next_seq + $3 - 1
      FROM k JOIN mailbox_heads h USING (workspace_id, agent_id)
     WHERE c.workspace_id = k.workspace_id AND c.agent_id = k.agent_id AND c.settled_floor >= h.next_seq - 1
), busy AS (
    UPDATE mailbox_cursors c SET sent_seq = greatest(c.sent_seq, h.next_seq + $3 - 1)
      FROM k JOIN mailbox_heads h USING (workspace_id, agent_id)
     WHERE c.workspace_id = k.workspace_id AND c.agent_id = k.agent_id AND c.settled_floor < h.next_seq - 1
)
UPDATE mailbox_heads h SET next_seq = h.next_seq + $3
  FROM k WHERE h.workspace_id = k.workspace_id AND h.agent_id = k.agent_id";

impl Store {
    /// Raises heads above the highest seqs known to have been allotted. A seq below without a row becomes a dead
    /// letter, whose source id comes from `fresh_id`. Returns the count of these.
    pub async fn raise_heads(
        &self,
        highest: &[(WorkspaceScope, AgentId, Seq)],
        now: DateTime<Utc>,
        mut fresh_id: impl FnMut() -> i64,
    ) -> StoreResult<u64> {
        let doing = "raising mailbox heads";
        let keys: Vec<_> = highest.iter().map(|(scope, agent, _)| (*scope, *agent)).collect();
        let (workspaces, agents) = split_keys(&keys);
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        lock_mailboxes(&mut tx, &workspaces, &agents).await?;
        let lost = raise_locked_heads(&mut tx, highest, now, &mut fresh_id).await?;
        extend_settled_floors(&mut tx, &workspaces, &agents).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(lost)
    }

    /// Raises the heads of up to `limit` mailboxes behind `after` by `margin`, for a restore after which the allotted
    /// seqs are unknown. The skipped seqs count as settled: one row in a non-empty mailbox, none in others. `fresh_id`
    /// serves as in [`Store::raise_heads`].
    pub async fn jump_heads(
        &self,
        after: MailboxKey,
        limit: i64,
        margin: i64,
        now: DateTime<Utc>,
        mut fresh_id: impl FnMut() -> i64,
    ) -> StoreResult<HeadJump> {
        let doing = "raising mailbox heads by a margin";
        let failed = StoreError::from_sqlx;
        let mut tx = self.pool.begin().await.map_err(failed(doing))?;
        let page: Vec<MailboxKey> = sqlx::query_as(PAGE)
            .bind(after.0)
            .bind(after.1)
            .bind(limit)
            .fetch_all(&mut *tx)
            .await
            .map_err(failed(doing))?;
        let (workspaces, agents): (Vec<WorkspaceId>, Vec<AgentId>) = page.iter().copied().unzip();
        lock_mailboxes(&mut tx, &workspaces, &agents).await?;
        let above: Vec<(WorkspaceId, AgentId, Seq)> = sqlx::query_as(LEFT_ABOVE)
            .bind(&workspaces)
            .bind(&agents)
            .fetch_all(&mut *tx)
            .await
            .map_err(failed(doing))?;
        let mut lost = 0;
        if !above.is_empty() {
            let scoped = |(workspace, agent, seq)| (WorkspaceScope::from_engine_row(workspace), agent, seq);
            let highest: Vec<_> = above.into_iter().map(scoped).collect();
            lost = raise_locked_heads(&mut tx, &highest, now, &mut fresh_id).await?;
            extend_settled_floors(&mut tx, &workspaces, &agents).await?;
        }
        // SKIP before JUMP: the skipped runs begin at the heads from before the jump.
        for statement in [SKIP, JUMP] {
            let query = sqlx::query(statement).bind(&workspaces).bind(&agents).bind(margin);
            query.execute(&mut *tx).await.map_err(failed(doing))?;
        }
        tx.commit().await.map_err(failed(doing))?;
        Ok(HeadJump { last: page.last().copied(), mailboxes: page.len() as u64, lost })
    }

    /// Raises event heads above the highest event seqs known to have been allotted. Returns the count of raised heads.
    pub async fn raise_event_heads(&self, last: &[(WorkspaceScope, EventSeq)]) -> StoreResult<u64> {
        // One row for each workspace: an UPDATE that joins several uses any of them.
        let raised = sqlx::query(
            "UPDATE event_heads h SET next_seq = k.last + 1
               FROM (SELECT workspace_id, max(last) AS last
                       FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, last) GROUP BY 1) AS k
              WHERE h.workspace_id = k.workspace_id AND h.next_seq <= k.last",
        )
        .bind(last.iter().map(|(scope, _)| scope.workspace_id()).collect::<Vec<_>>())
        .bind(last.iter().map(|(_, last)| *last).collect::<Vec<_>>())
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("raising event heads"))?;
        Ok(raised.rows_affected())
    }

    /// Raises the event heads of all workspaces by `margin`.
    pub async fn jump_event_heads(&self, margin: i64) -> StoreResult<()> {
        sqlx::query("UPDATE event_heads SET next_seq = next_seq + $1")
            .bind(margin)
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("raising event heads by a margin"))?;
        Ok(())
    }
}

/// Locks heads, then cursors (the order that all transactions keep), until the transaction ends.
pub(super) async fn lock_mailboxes(
    tx: &mut DatabaseSession,
    workspaces: &[WorkspaceId],
    agents: &[AgentId],
) -> StoreResult<()> {
    sqlx::query(LOCK_HEADS)
        .bind(workspaces)
        .bind(agents)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx("locking mailbox heads"))?;
    lock_cursors(tx, workspaces, agents).await
}

/// Performs [`Store::raise_heads`] within a transaction that has locked the mailboxes and extends the settled floors
/// afterwards.
pub(super) async fn raise_locked_heads(
    tx: &mut DatabaseSession,
    highest: &[(WorkspaceScope, AgentId, Seq)],
    now: DateTime<Utc>,
    fresh_id: &mut impl FnMut() -> i64,
) -> StoreResult<u64> {
    let doing = "raising mailbox heads";
    let failed = StoreError::from_sqlx;
    let keys: Vec<_> = highest.iter().map(|(scope, agent, _)| (*scope, *agent)).collect();
    let (workspaces, agents) = split_keys(&keys);
    let to: Vec<Seq> = highest.iter().map(|(_, _, seq)| *seq).collect();
    let gaps: Vec<(WorkspaceId, AgentId, Seq)> = sqlx::query_as(GAPS)
        .bind(&workspaces)
        .bind(&agents)
        .bind(&to)
        .fetch_all(&mut *tx)
        .await
        .map_err(failed(doing))?;
    if !gaps.is_empty() {
        let reason = DeadLetterReason::LostInRestore;
        sqlx::query(DEAD_LETTER_GAPS)
            .bind(gaps.iter().map(|(workspace, ..)| *workspace).collect::<Vec<_>>())
            .bind(gaps.iter().map(|(_, agent, _)| *agent).collect::<Vec<_>>())
            .bind(gaps.iter().map(|(.., seq)| *seq).collect::<Vec<_>>())
            .bind(gaps.iter().map(|_| fresh_id()).collect::<Vec<_>>())
            .bind(now)
            .bind(reason.default_error())
            .bind(reason.as_str())
            .execute(&mut *tx)
            .await
            .map_err(failed(doing))?;
    }
    sqlx::query(RAISE).bind(&workspaces).bind(&agents).bind(&to).execute(tx).await.map_err(failed(doing))?;
    Ok(gaps.len() as u64)
}
