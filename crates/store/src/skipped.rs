//! Runs of numbers that a recovery has skipped in mailboxes which hold something (ADR 0017).
//!
//! No delivery and no exception has such a number: a tombstone stands for it, and it counts as settled. Only recovery
//! writes these rows, while nobody is served; floors and depths read them.

use sqlx::PgConnection;

use crate::{
    StoreError, StoreResult,
    expiry::{extend_settled_floors, lock_cursors},
};

/// SQL: what is settled apart above a floor of a mailbox, as `last_seq` and `width`: rows settled one by one, and skipped
/// runs. In the order of `last_seq` there is no hole up to where the widths add up to `last_seq` less the floor.
macro_rules! settled_above {
    ($mailbox:literal, $floor:literal) => {
        concat!(
            "SELECT alone.seq AS last_seq, 1::bigint AS width FROM delivery_exceptions alone
              WHERE alone.workspace_id = ",
            $mailbox,
            ".workspace_id AND alone.agent_id = ",
            $mailbox,
            ".agent_id AND alone.seq > ",
            $floor,
            " AND alone.state IN (1, 2, 4)
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

/// SQL: how many numbers above a floor of a mailbox are settled apart.
macro_rules! count_settled_above {
    ($mailbox:literal, $floor:literal) => {
        concat!(
            "(SELECT coalesce(sum(apart.width), 0)::bigint FROM (",
            $crate::skipped::settled_above!($mailbox, $floor),
            ") AS apart)"
        )
    };
}
pub(crate) use count_settled_above;

// Where only REST settles, the ack floor never comes: one row a mailbox and recovery stays.
const REMOVE: &str = "
DELETE FROM skipped_seqs s
 USING (SELECT r.workspace_id, r.agent_id, r.last_seq
          FROM skipped_seqs r JOIN mailbox_cursors c USING (workspace_id, agent_id)
         WHERE r.last_seq <= c.ack_floor LIMIT $1) AS passed
 WHERE s.workspace_id = passed.workspace_id AND s.agent_id = passed.agent_id AND s.last_seq = passed.last_seq";

const FLOOR_IS_BEHIND: &str = "
SELECT s.workspace_id, s.agent_id
  FROM skipped_seqs s JOIN mailbox_cursors c USING (workspace_id, agent_id)
 WHERE c.settled_floor >= s.first_seq - 1 AND c.settled_floor < s.last_seq
 ORDER BY s.workspace_id, s.agent_id LIMIT $1";

/// Removes runs that the ack floor has passed, and lets settled floors pass those that a version without such rows has
/// left them at; at most `page` of each. Returns how many runs and floors these were.
pub(crate) async fn compact(tx: &mut PgConnection, page: i64) -> StoreResult<(u64, u64)> {
    let doing = "compacting skipped numbers";
    let removed = sqlx::query(REMOVE).bind(page).execute(&mut *tx).await.map_err(StoreError::from_sqlx(doing))?;
    let behind: Vec<(i64, i64)> =
        sqlx::query_as(FLOOR_IS_BEHIND).bind(page).fetch_all(&mut *tx).await.map_err(StoreError::from_sqlx(doing))?;
    let mut extended = 0;
    if !behind.is_empty() {
        let (workspaces, agents): (Vec<i64>, Vec<i64>) = behind.into_iter().unzip();
        lock_cursors(tx, &workspaces, &agents).await?;
        extended = extend_settled_floors(tx, &workspaces, &agents).await?;
    }
    Ok((removed.rows_affected(), extended))
}
