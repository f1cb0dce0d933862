//! Sweep of the mailboxes of http_push: releases those of workers that have ended, and repairs rows that no binding or
//! hint has kept right. One step at a time, called by the worker's dispatcher; main type: [`SweepStep`].

use const_format::formatcp;
use relay_domain::{AgentId, WorkspaceId, ids::as_number};
use serde::{Deserialize, Serialize};
use sqlx::FromRow;

use crate::{
    Store, StoreError, StoreResult,
    codes::HTTP_PUSH,
    connections::Transaction,
    maintenance::loop_state::{LoopState, lock_state, save_state},
};

/// Maximum number of mailboxes that one step of the sweep reads.
const SWEEP_BATCH: i64 = 5000;
const SWEEP_LOOP: &str = "push_sweep";

/// Last mailbox of a step of the sweep, stored as an array of two numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, FromRow)]
struct SweepPosition(#[serde(with = "as_number")] WorkspaceId, #[serde(with = "as_number")] AgentId);

impl SweepPosition {
    const START: Self = Self(WorkspaceId::new(0), AgentId::new(0));
}

/// Result of one step of the sweep.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SweepStep {
    /// Mailboxes released from expired workers.
    pub released: u64,
    /// Mailboxes added, removed, or made due because a notification was lost.
    pub repaired: u64,
    /// `true` if the pass is not complete.
    pub more: bool,
}

// Adds rows of agents that came to their node by another way than a binding. 1000 per pass bound the transaction.
// The new epoch fences a worker that still serves the mailbox for the former node.
const ADD_MISSING: &str = formatcp!(
    "
INSERT INTO push_mailboxes (workspace_id, agent_id, node_id, pushed_seq, due_at)
SELECT a.workspace_id, a.agent_id, a.node_id, coalesce(c.settled_floor, 0), relay_now()
  FROM nodes n
  JOIN agents a ON a.workspace_id = n.workspace_id AND a.node_id = n.node_id AND a.deleted_at IS NULL
  LEFT JOIN mailbox_cursors c ON c.workspace_id = a.workspace_id AND c.agent_id = a.agent_id
 WHERE n.kind = '{HTTP_PUSH}'
   AND NOT EXISTS (SELECT FROM push_mailboxes p
                    WHERE p.workspace_id = a.workspace_id AND p.agent_id = a.agent_id AND p.node_id = a.node_id)
 LIMIT 1000
    ON CONFLICT (workspace_id, agent_id) DO UPDATE
       SET node_id = excluded.node_id, pushed_seq = excluded.pushed_seq, due_at = relay_now(), owner = NULL,
           epoch = push_mailboxes.epoch + 1, disabled_at = NULL, disabled_reason = NULL"
);

/// Age of an ended lease at which its row is removed. Much later than the end, so that a worker with a slow clock tick
/// does not lose its row while it renews.
const WORKER_ROW_RETENTION: &str = "10 minutes";

/// Condition: there is anything to sweep. Most installations have no nodes of this kind.
pub(crate) const IS_ANY_SWEPT: &str = formatcp!(
    "(EXISTS (SELECT FROM nodes WHERE kind = '{HTTP_PUSH}') OR EXISTS (SELECT FROM push_mailboxes)
      OR EXISTS (SELECT FROM push_workers WHERE lease_until < relay_now() - interval '{WORKER_ROW_RETENTION}'))"
);

// Releases mailboxes of expired workers. A worker without a row has retired, or was removed long after its lease ended.
// SKIP LOCKED: the next step releases a row that another transaction holds.
const RELEASE_EXPIRED: &str = "
WITH expired AS MATERIALIZED (
    SELECT p.workspace_id, p.agent_id FROM push_mailboxes p
     WHERE p.owner IS NOT NULL
       AND NOT EXISTS (SELECT FROM push_workers w WHERE w.owner = p.owner AND w.lease_until > relay_now())
     LIMIT 5000 FOR UPDATE SKIP LOCKED
)
UPDATE push_mailboxes p SET owner = NULL, due_at = relay_now()
  FROM expired e WHERE p.workspace_id = e.workspace_id AND p.agent_id = e.agent_id";

// Mailboxes without a worker, and rows of agents that are no longer on the node, disabled or not. Read without locks:
// the two statements below check the state again.
const PAGE: &str = "
SELECT p.workspace_id, p.agent_id, h.next_seq - 1 > greatest(p.pushed_seq, coalesce(c.settled_floor, 0)) AS has_more,
       a.agent_id IS NULL AS is_orphaned
  FROM (SELECT * FROM push_mailboxes WHERE (workspace_id, agent_id) > ($1, $2)
         ORDER BY workspace_id, agent_id LIMIT $3) AS p
  LEFT JOIN agents a ON a.workspace_id = p.workspace_id AND a.agent_id = p.agent_id
                    AND a.node_id = p.node_id AND a.deleted_at IS NULL
  LEFT JOIN mailbox_heads h ON h.workspace_id = p.workspace_id AND h.agent_id = p.agent_id
  LEFT JOIN mailbox_cursors c ON c.workspace_id = p.workspace_id AND c.agent_id = p.agent_id
 WHERE p.owner IS NULL
   AND (a.agent_id IS NULL OR (p.disabled_at IS NULL AND (NOT p.is_blocked OR p.due_at IS NULL)))
 ORDER BY p.workspace_id, p.agent_id";

const REMOVE_ORPHANED: &str = "
DELETE FROM push_mailboxes p USING unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
 WHERE p.workspace_id = k.workspace_id AND p.agent_id = k.agent_id AND p.owner IS NULL
   AND NOT EXISTS (SELECT FROM agents a WHERE a.workspace_id = p.workspace_id
                    AND a.agent_id = p.agent_id AND a.node_id = p.node_id AND a.deleted_at IS NULL)";

const MAKE_DUE: &str = "
UPDATE push_mailboxes p SET due_at = relay_now()
  FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
 WHERE p.workspace_id = k.workspace_id AND p.agent_id = k.agent_id
   AND p.owner IS NULL AND (p.due_at IS NULL OR p.due_at > relay_now()) AND NOT p.is_blocked";

impl Store {
    /// Runs one step of the sweep: releases mailboxes of expired workers, adds missing rows, removes orphaned ones, and
    /// makes mailboxes due whose hint was lost. Does nothing while another worker runs a step.
    pub async fn sweep_push_mailboxes(&self) -> StoreResult<SweepStep> {
        let doing = "sweeping push mailboxes";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let from = match lock_state::<SweepPosition>(&mut tx, SWEEP_LOOP).await? {
            LoopState::Busy => return Ok(SweepStep::default()),
            LoopState::Locked(position) => position.unwrap_or(SweepPosition::START),
        };
        let released =
            sqlx::query(RELEASE_EXPIRED).execute(&mut *tx).await.map_err(StoreError::from_sqlx(doing))?.rows_affected();
        sqlx::query(formatcp!(
            "DELETE FROM push_workers WHERE lease_until < relay_now() - interval '{WORKER_ROW_RETENTION}'"
        ))
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let mut repaired = 0;
        // The join over all nodes runs once per pass, not at every step.
        if from == SweepPosition::START {
            let added = sqlx::query(ADD_MISSING).execute(&mut *tx).await.map_err(StoreError::from_sqlx(doing))?;
            repaired += added.rows_affected();
        }
        // Before the repair, which removes rows of the page and would so shift its end.
        let last: Option<SweepPosition> = sqlx::query_as(
            "SELECT workspace_id, agent_id FROM push_mailboxes WHERE (workspace_id, agent_id) > ($1, $2)
              ORDER BY workspace_id, agent_id OFFSET $3 - 1 LIMIT 1",
        )
        .bind(from.0)
        .bind(from.1)
        .bind(SWEEP_BATCH)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        repaired += repair_page(&mut tx, from).await?;
        // After the last page the sweep begins again.
        save_state(&mut tx, SWEEP_LOOP, &last.unwrap_or(SweepPosition::START)).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(SweepStep { released, repaired, more: last.is_some() })
    }
}

/// Row of [`PAGE`].
#[derive(FromRow)]
struct SweptMailbox {
    workspace_id: WorkspaceId,
    agent_id: AgentId,
    /// `None` for a mailbox without a head.
    has_more: Option<bool>,
    is_orphaned: bool,
}

/// Removes orphaned mailboxes of the page after `from`, and makes those due that have rows above their push position.
/// Returns the number of changed mailboxes.
async fn repair_page(tx: &mut Transaction, from: SweepPosition) -> StoreResult<u64> {
    let doing = "sweeping push mailboxes";
    let page: Vec<SweptMailbox> = sqlx::query_as(PAGE)
        .bind(from.0)
        .bind(from.1)
        .bind(SWEEP_BATCH)
        .fetch_all(&mut **tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
    let (orphaned, present): (Vec<_>, Vec<_>) = page.into_iter().partition(|row| row.is_orphaned);
    let lagging = present.into_iter().filter(|row| row.has_more == Some(true)).collect();
    let mut changed = 0;
    for (statement, rows) in [(REMOVE_ORPHANED, orphaned), (MAKE_DUE, lagging)] {
        if !rows.is_empty() {
            let (workspaces, agents): (Vec<WorkspaceId>, Vec<AgentId>) =
                rows.iter().map(|row| (row.workspace_id, row.agent_id)).unzip();
            let query = sqlx::query(statement).bind(workspaces).bind(agents);
            changed += query.execute(&mut **tx).await.map_err(StoreError::from_sqlx(doing))?.rows_affected();
        }
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_position_of_the_sweep_is_stored_as_two_numbers() {
        let position = SweepPosition(WorkspaceId::new(7), AgentId::new(2));
        assert_eq!(serde_json::to_string(&position).unwrap(), "[7,2]");
    }
}
