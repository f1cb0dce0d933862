//! Settled floors: every seq up to a mailbox's floor is settled. A floor moves over the individually settled rows and
//! the skipped runs right above it. Moved by expiry, settlement, pruning, dispatch and recovery.

use relay_domain::{AgentId, WorkspaceId};

use crate::{StoreError, StoreResult, connections::DatabaseSession};

/// SQL that selects the individually settled rows and skipped runs above a floor of a mailbox, as `last_seq` and
/// `width`. In the order of `last_seq` there is no hole up to the point where the widths add up to `last_seq` minus the
/// floor.
macro_rules! settled_above {
    ($mailbox:expr, $floor:expr) => {
        const_format::concatcp!(
            "SELECT single.seq AS last_seq, 1::bigint AS width FROM delivery_exceptions single
              WHERE single.workspace_id = ",
            $mailbox,
            ".workspace_id AND single.agent_id = ",
            $mailbox,
            ".agent_id AND single.seq > ",
            $floor,
            " AND single.state IN (",
            $crate::codes::ACKED,
            ", ",
            $crate::codes::FAILED,
            ", ",
            $crate::codes::DEAD_LETTERED,
            ")
              UNION ALL
             SELECT run.last_seq, run.last_seq - greatest(run.first_seq - 1, ",
            $floor,
            ") FROM skipped_seqs run
              WHERE run.workspace_id = ",
            $mailbox,
            ".workspace_id AND run.agent_id = ",
            $mailbox,
            ".agent_id AND run.last_seq > ",
            $floor
        )
    };
}
pub(crate) use settled_above;

/// SQL that counts the seqs above a floor of a mailbox that are settled individually or skipped.
macro_rules! count_settled_above {
    ($mailbox:expr, $floor:expr) => {{
        const ABOVE: &str = $crate::mailboxes::settled_floors::settled_above!($mailbox, $floor);
        const_format::concatcp!("(SELECT coalesce(sum(settled.width), 0)::bigint FROM (", ABOVE, ") AS settled)")
    }};
}
pub(crate) use count_settled_above;

// Sorted, so that concurrent callers take the row locks in one order.
// A subquery removes duplicates, because FOR UPDATE does not combine with DISTINCT.
const LOCK_CURSORS: &str = "
SELECT c.agent_id
  FROM (SELECT DISTINCT * FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)) AS k
  JOIN mailbox_cursors c USING (workspace_id, agent_id)
 ORDER BY c.workspace_id, c.agent_id
   FOR UPDATE OF c";

/// Moves the settled floor of locked mailboxes over the individually settled rows right above it: a run without a hole
/// ends where the widths add up to the distance from the floor.
// DISTINCT: a mailbox that a caller names twice would have its widths added up twice.
const EXTEND_SETTLED_FLOORS: &str = const_format::concatcp!(
    "
UPDATE mailbox_cursors c
   SET settled_floor = run.floor
  FROM (SELECT x.workspace_id, x.agent_id, max(x.last_seq) AS floor
          FROM (SELECT b.workspace_id, b.agent_id, b.settled_floor, settled.last_seq,
                       sum(settled.width) OVER (PARTITION BY b.workspace_id, b.agent_id ORDER BY settled.last_seq) AS reach
                  FROM (SELECT DISTINCT * FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)) AS k
                  JOIN mailbox_cursors b ON b.workspace_id = k.workspace_id AND b.agent_id = k.agent_id
                 CROSS JOIN LATERAL (",
    settled_above!("b", "b.settled_floor"),
    ") AS settled) AS x
         WHERE x.last_seq = x.settled_floor + x.reach
         GROUP BY x.workspace_id, x.agent_id) AS run
 WHERE c.workspace_id = run.workspace_id AND c.agent_id = run.agent_id AND c.settled_floor < run.floor"
);

/// Extends the settled floors of these mailboxes; the caller holds the locks on their cursor rows. Returns the number
/// of floors that moved.
pub(crate) async fn extend_settled_floors(
    tx: &mut DatabaseSession,
    workspaces: &[WorkspaceId],
    agents: &[AgentId],
) -> StoreResult<u64> {
    let done = sqlx::query(EXTEND_SETTLED_FLOORS)
        .bind(workspaces)
        .bind(agents)
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("extending settled floors"))?;
    Ok(done.rows_affected())
}

/// Locks the cursor rows of these mailboxes until the transaction ends.
pub(crate) async fn lock_cursors(
    tx: &mut DatabaseSession,
    workspaces: &[WorkspaceId],
    agents: &[AgentId],
) -> StoreResult<()> {
    sqlx::query(LOCK_CURSORS)
        .bind(workspaces)
        .bind(agents)
        .execute(tx)
        .await
        .map_err(StoreError::from_sqlx("locking mailbox cursors"))?;
    Ok(())
}
