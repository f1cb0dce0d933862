//! Runs of seqs that a recovery skipped in non-empty mailboxes (ADR 0017).
//!
//! A skipped seq has no delivery and no settlement; it counts as settled, and nodes receive a tombstone for it. Only
//! recovery inserts these rows, while no process serves clients. Floors and depths read them.

use relay_domain::{AgentId, WorkspaceId};

use crate::{
    StoreError, StoreResult,
    connections::DatabaseSession,
    mailboxes::settled_floors::{extend_settled_floors, lock_cursors},
};

// In a mailbox that is settled over REST only, the ack floor never passes the run: one row per recovery remains.
const REMOVE: &str = "
DELETE FROM skipped_seqs s
 USING (SELECT r.workspace_id, r.agent_id, r.last_seq
          FROM skipped_seqs r JOIN mailbox_cursors c USING (workspace_id, agent_id)
         WHERE r.last_seq <= c.ack_floor LIMIT $1) AS passed
 WHERE s.workspace_id = passed.workspace_id AND s.agent_id = passed.agent_id AND s.last_seq = passed.last_seq";

const FLOOR_BEHIND: &str = "
SELECT s.workspace_id, s.agent_id
  FROM skipped_seqs s JOIN mailbox_cursors c USING (workspace_id, agent_id)
 WHERE c.settled_floor >= s.first_seq - 1 AND c.settled_floor < s.last_seq
 ORDER BY s.workspace_id, s.agent_id LIMIT $1";

/// Removes runs that the ack floor has passed, and moves settled floors over runs where an earlier version, which knew
/// no such rows, left them; at most `page` of each. Returns the counts of runs and floors.
pub(crate) async fn compact_skipped(tx: &mut DatabaseSession, page: i64) -> StoreResult<(u64, u64)> {
    let doing = "compacting skipped seqs";
    let removed = sqlx::query(REMOVE).bind(page).execute(&mut *tx).await.map_err(StoreError::from_sqlx(doing))?;
    let behind: Vec<(WorkspaceId, AgentId)> =
        sqlx::query_as(FLOOR_BEHIND).bind(page).fetch_all(&mut *tx).await.map_err(StoreError::from_sqlx(doing))?;
    let mut extended = 0;
    if !behind.is_empty() {
        let (workspaces, agents): (Vec<WorkspaceId>, Vec<AgentId>) = behind.into_iter().unzip();
        lock_cursors(tx, &workspaces, &agents).await?;
        extended = extend_settled_floors(tx, &workspaces, &agents).await?;
    }
    Ok((removed.rows_affected(), extended))
}
