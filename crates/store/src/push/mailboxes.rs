//! Mailbox leases of http_push workers: at most one worker serves a mailbox. Main type: [`LeasedMailbox`]; called by the
//! worker's dispatcher and by transactions that bind agents or settle rows.
//!
//! A mailbox is placed when its agent is bound to an http_push node. A worker claims it, which increments the epoch, and
//! releases it with the instant at which it is due again. Every write of a worker names owner and epoch, so a worker whose
//! lease has expired changes nothing; the sweep releases its mailboxes.

use const_format::formatcp;
use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, NodeId, PushWorkerId, WorkspaceId, WorkspaceScope,
    ids::as_number,
    push::mailbox::{LeasedMailbox, MailboxRelease},
};
use serde::{Deserialize, Serialize};
use sqlx::{FromRow, Row as _, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    codes::HTTP_PUSH,
    connections::Transaction,
    decode::decode_rows,
    mailboxes::cursors::split_keys,
    maintenance::loop_state::{LoopState, lock_state, save_state},
    statement_timeout::StatementTimeout as _,
    workspaces::suspensions::is_suspended,
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

/// Row of a claim.
struct LeasedMailboxRow(LeasedMailbox);

impl FromRow<'_, PgRow> for LeasedMailboxRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self(LeasedMailbox {
            scope: WorkspaceScope::from_engine_row(row.try_get("workspace_id")?),
            agent_id: row.try_get("agent_id")?,
            node_id: row.try_get("node_id")?,
            agent_name: row.try_get("name")?,
            epoch: row.try_get("epoch")?,
            pushed_seq: row.try_get("pushed_seq")?,
            recovery_epoch: None,
        }))
    }
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

// Claims the selected mailboxes. SKIP LOCKED: a row that another worker is claiming is not waited for. The selection joins
// the agent, because a mailbox whose agent has moved elsewhere must not be served; the sweep removes its row.
macro_rules! claim {
    ($epoch:literal, $($which:tt)*) => {
        concat!(
            "WITH locked AS MATERIALIZED (",
            $($which)*,
            "
                 FOR UPDATE OF p SKIP LOCKED
             ), claimed AS (
                 UPDATE push_mailboxes p SET owner = $1, epoch = p.epoch + 1, due_at = NULL,
                        is_blocked = false
                   FROM locked l
                  WHERE p.workspace_id = l.workspace_id AND p.agent_id = l.agent_id
                    AND relay_require_epoch(",
            $epoch,
            ")
              RETURNING p.workspace_id, p.agent_id, p.node_id, p.epoch, p.pushed_seq
             )
             SELECT t.workspace_id, t.agent_id, t.node_id, t.epoch, a.name,
                    greatest(t.pushed_seq, coalesce(c.settled_floor, 0)) AS pushed_seq
               FROM claimed t
               JOIN agents a ON a.workspace_id = t.workspace_id AND a.agent_id = t.agent_id
               LEFT JOIN mailbox_cursors c ON c.workspace_id = t.workspace_id AND c.agent_id = t.agent_id"
        )
    };
}

// Fair between families (a workspace and those created with its key): the first due mailbox of each comes before the
// second of any. Ordering all due rows by turn would read the whole backlog, so only the oldest 8 * $2 take part.
const CLAIM_DUE: &str = claim!(
    "$3",
    concat!(
        "SELECT p.workspace_id, p.agent_id
       FROM (SELECT workspace_id, agent_id,
                    row_number() OVER (PARTITION BY coalesce(w.created_by, workspace_id) ORDER BY due_at) AS turn,
                    due_at
               FROM (SELECT workspace_id, agent_id, due_at FROM push_mailboxes m
                      WHERE owner IS NULL AND due_at IS NOT NULL AND disabled_at IS NULL AND due_at <= relay_now()
                        AND NOT ",
        is_suspended!("m"),
        " ORDER BY due_at LIMIT 8 * $2) AS due
               LEFT JOIN workspaces w USING (workspace_id)
              ORDER BY turn, due_at LIMIT $2) AS k
       JOIN push_mailboxes p USING (workspace_id, agent_id)
       JOIN agents a ON a.workspace_id = p.workspace_id AND a.agent_id = p.agent_id
                    AND a.node_id = p.node_id AND a.deleted_at IS NULL
      WHERE p.owner IS NULL AND p.disabled_at IS NULL AND p.due_at <= relay_now()"
    )
);

const CLAIM_NAMED: &str = claim!(
    "$4",
    concat!(
        "SELECT p.workspace_id, p.agent_id
       FROM unnest($2::bigint[], $3::bigint[]) AS k (workspace_id, agent_id)
       JOIN push_mailboxes p USING (workspace_id, agent_id)
       JOIN agents a ON a.workspace_id = p.workspace_id AND a.agent_id = p.agent_id
                    AND a.node_id = p.node_id AND a.deleted_at IS NULL
      WHERE p.owner IS NULL AND p.disabled_at IS NULL AND NOT (p.is_blocked AND p.due_at > relay_now()) AND NOT ",
        is_suspended!("p")
    )
);

const LAG: &str = concat!(
    "SELECT coalesce((SELECT extract(epoch FROM relay_now() - due_at)::float8 FROM push_mailboxes m
                       WHERE owner IS NULL AND due_at IS NOT NULL AND disabled_at IS NULL AND due_at <= relay_now()
                         AND NOT ",
    is_suspended!("m"),
    " ORDER BY due_at LIMIT 1), 0)"
);

// Adds rows of agents that came to their node by another way than a binding. 1000 per pass bound the transaction.
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

/// Age of an ended lease at which its row is removed. Much later than the end, so that a worker with a slow clock tick does
/// not lose its row while it renews.
const WORKER_ROW_RETENTION: &str = "10 minutes";

// Asked before each sweep, since most installations have no nodes of this kind.
const IS_ANY_SWEPT: &str = formatcp!(
    "
SELECT EXISTS (SELECT FROM nodes WHERE kind = '{HTTP_PUSH}') OR EXISTS (SELECT FROM push_mailboxes)
    OR EXISTS (SELECT FROM push_workers WHERE lease_until < relay_now() - interval '{WORKER_ROW_RETENTION}')"
);

// Releases mailboxes of expired workers. A worker without a row has retired, or was removed long after its lease ended.
const RELEASE_EXPIRED: &str = "
WITH expired AS MATERIALIZED (
    SELECT p.workspace_id, p.agent_id FROM push_mailboxes p
     WHERE p.owner IS NOT NULL
       AND NOT EXISTS (SELECT FROM push_workers w WHERE w.owner = p.owner AND w.lease_until > relay_now())
     LIMIT 5000 FOR UPDATE SKIP LOCKED
)
UPDATE push_mailboxes p SET owner = NULL, due_at = relay_now()
  FROM expired e WHERE p.workspace_id = e.workspace_id AND p.agent_id = e.agent_id";

// Mailboxes without a worker, and rows of agents that are no longer on the node, disabled or not. Read without locks: the
// two statements below check the state again.
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
    /// Acquires or renews a worker's lease.
    pub async fn renew_push_worker(&self, owner: PushWorkerId, ttl: Duration) -> StoreResult<()> {
        // The lease ends by the clock of Postgres, which all workers share.
        sqlx::query(
            "INSERT INTO push_workers (owner, lease_until, reads_shared_bodies)
             VALUES ($1, relay_now() + make_interval(secs => $2), true)
             ON CONFLICT (owner) DO UPDATE SET lease_until = excluded.lease_until",
        )
        .bind(owner)
        .bind(ttl.as_secs_f64())
        .execute(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("renewing a push worker's lease"))?;
        Ok(())
    }

    /// Lists the workers whose lease has not expired, in order.
    pub async fn live_push_workers(&self) -> StoreResult<Vec<PushWorkerId>> {
        sqlx::query_scalar("SELECT owner FROM push_workers WHERE lease_until > relay_now() ORDER BY owner")
            .fetch_all(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("listing push workers"))
    }

    /// Lists the agents of a workspace that use http_push, with their nodes, at most 10 000. Empty while the workspace is
    /// suspended.
    pub async fn http_push_agents(&self, scope: WorkspaceScope) -> StoreResult<Vec<(AgentId, NodeId)>> {
        sqlx::query_as(concat!(
            "SELECT p.agent_id, p.node_id FROM push_mailboxes p
              -- `OFFSET 0`: from the few mailboxes, also while the tables have no statistics.
              CROSS JOIN LATERAL (SELECT FROM agents
                                   WHERE workspace_id = p.workspace_id AND agent_id = p.agent_id
                                     AND node_id = p.node_id AND deleted_at IS NULL OFFSET 0) AS a
              WHERE p.workspace_id = $1 AND p.disabled_at IS NULL AND NOT ",
            is_suspended!("p"),
            " ORDER BY p.agent_id LIMIT 10000"
        ))
        .bind(scope.workspace_id())
        .fetch_all(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("listing http_push agents"))
    }

    /// Releases all mailboxes of a worker, and ends its lease. Called at the end of a drain.
    pub async fn retire_push_worker(&self, owner: PushWorkerId) -> StoreResult<()> {
        let doing = "retiring a push worker";
        // Mailboxes before the lease: a crash in between leaves a worker without mailboxes, which is harmless.
        sqlx::query("UPDATE push_mailboxes SET owner = NULL, due_at = relay_now() WHERE owner = $1")
            .bind(owner)
            .execute(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        sqlx::query("DELETE FROM push_workers WHERE owner = $1")
            .bind(owner)
            .execute(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        Ok(())
    }

    /// Claims mailboxes that are due, at most `limit`, fairly between families of workspaces.
    pub async fn claim_due_mailboxes(&self, owner: PushWorkerId, limit: i64) -> StoreResult<Vec<LeasedMailbox>> {
        let doing = "claiming due mailboxes";
        let epoch = self.epoch(doing)?;
        let rows =
            sqlx::query(CLAIM_DUE).bind(owner).bind(limit).bind(epoch).fetch_all(&self.pool).with_timeout().await;
        decode_mailboxes(&self.note_epoch(epoch, rows.map_err(StoreError::from_sqlx(doing)))?, epoch)
    }

    /// Claims the mailboxes among these that have no worker.
    pub async fn claim_mailboxes(
        &self,
        owner: PushWorkerId,
        mailboxes: &[(WorkspaceScope, AgentId)],
    ) -> StoreResult<Vec<LeasedMailbox>> {
        let doing = "claiming mailboxes";
        let epoch = self.epoch(doing)?;
        let (workspaces, agents) = split_keys(mailboxes);
        let rows = sqlx::query(CLAIM_NAMED)
            .bind(owner)
            .bind(workspaces)
            .bind(agents)
            .bind(epoch)
            .fetch_all(&self.pool)
            .with_timeout()
            .await;
        decode_mailboxes(&self.note_epoch(epoch, rows.map_err(StoreError::from_sqlx(doing)))?, epoch)
    }

    /// Releases mailboxes. A row that arrived meanwhile makes its mailbox due at once, unless the mailbox is blocked. A
    /// recovery has released those that were claimed before it.
    pub async fn release_mailboxes(&self, owner: PushWorkerId, releases: &[MailboxRelease]) -> StoreResult<()> {
        let doing = "releasing mailboxes";
        let epoch = self.epoch(doing)?;
        let releases: Vec<_> = releases.iter().filter(|release| release.mailbox.recovery_epoch == epoch).collect();
        // The hint for a message committed after the last read went to this worker and is lost; the head shows the message.
        let done = sqlx::query(
            "UPDATE push_mailboxes p
                SET owner = NULL, pushed_seq = greatest(p.pushed_seq, least(k.pushed_seq, h.next_seq - 1)),
                    is_blocked = k.is_blocked,
                    due_at = CASE WHEN NOT k.is_blocked
                                   AND h.next_seq - 1 > greatest(k.pushed_seq, c.settled_floor) THEN relay_now()
                                  ELSE least(k.due_at, p.due_at) END
               FROM unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::timestamptz[], $7::boolean[])
                    AS k (workspace_id, agent_id, epoch, pushed_seq, due_at, is_blocked)
               JOIN mailbox_heads h USING (workspace_id, agent_id)
               JOIN mailbox_cursors c USING (workspace_id, agent_id)
              WHERE p.workspace_id = k.workspace_id AND p.agent_id = k.agent_id
                AND p.owner = $1 AND p.epoch = k.epoch AND relay_require_epoch($8)",
        )
        .bind(owner)
        .bind(releases.iter().map(|r| r.mailbox.scope.workspace_id()).collect::<Vec<_>>())
        .bind(releases.iter().map(|r| r.mailbox.agent_id).collect::<Vec<_>>())
        .bind(releases.iter().map(|r| r.mailbox.epoch).collect::<Vec<_>>())
        .bind(releases.iter().map(|r| r.mailbox.pushed_seq).collect::<Vec<_>>())
        .bind(releases.iter().map(|r| r.due_at).collect::<Vec<_>>())
        .bind(releases.iter().map(|r| r.is_blocked).collect::<Vec<_>>())
        .bind(epoch)
        .execute(&self.pool)
        .with_timeout()
        .await;
        self.note_epoch(epoch, done.map_err(StoreError::from_sqlx(doing))).map(|_| ())
    }

    /// Returns the time for which the mailbox that is due longest has waited for a worker, in seconds; 0 when none is due.
    /// Mailboxes that are disabled, or whose workspace is suspended, are not due.
    pub async fn push_lag(&self) -> StoreResult<f64> {
        sqlx::query_scalar(LAG)
            .fetch_one(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("measuring the push lag"))
    }

    /// Runs one step of the sweep: releases mailboxes of expired workers, adds missing rows, removes orphaned ones, and
    /// makes mailboxes due whose hint was lost. Does nothing while another worker runs a step.
    pub async fn sweep_push_mailboxes(&self) -> StoreResult<SweepStep> {
        let doing = "sweeping push mailboxes";
        let is_any_swept: bool =
            sqlx::query_scalar(IS_ANY_SWEPT).fetch_one(&self.pool).await.map_err(StoreError::from_sqlx(doing))?;
        if !is_any_swept {
            return Ok(SweepStep::default());
        }
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
        save_state(&mut tx, SWEEP_LOOP, &last.unwrap_or(SweepPosition::START)).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(SweepStep { released, repaired, more: last.is_some() })
    }
}

fn decode_mailboxes(rows: &[PgRow], recovery_epoch: Option<i64>) -> StoreResult<Vec<LeasedMailbox>> {
    let rows: Vec<LeasedMailboxRow> = decode_rows("push_mailboxes", rows)?;
    Ok(rows.into_iter().map(|row| LeasedMailbox { recovery_epoch, ..row.0 }).collect())
}

/// Releases all mailboxes for a recovery, whatever their workers remember of them. No position exceeds the head.
pub(crate) const RELEASE_ALL: &str = "
UPDATE push_mailboxes p
   SET owner = NULL, epoch = p.epoch + 1, pushed_seq = least(p.pushed_seq, h.next_seq - 1),
       due_at = CASE WHEN p.owner IS NULL THEN p.due_at ELSE relay_now() END
  FROM mailbox_heads h
 WHERE h.workspace_id = p.workspace_id AND h.agent_id = p.agent_id
   AND (p.owner IS NOT NULL OR p.pushed_seq >= h.next_seq)";

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

/// Makes the mailbox of an agent due that was bound to an http_push node. An agent that was on the node before keeps its
/// push position and its worker; one that comes from elsewhere starts above the settled floor, with a new epoch that fences
/// the worker of the former node.
pub(crate) async fn place_mailbox(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    agent: AgentId,
    node: &NodeId,
) -> StoreResult<()> {
    sqlx::query(
        "INSERT INTO push_mailboxes (workspace_id, agent_id, node_id, pushed_seq, due_at)
         SELECT $1, $2, $3, coalesce((SELECT settled_floor FROM mailbox_cursors
                                       WHERE workspace_id = $1 AND agent_id = $2), 0), relay_now()
         ON CONFLICT (workspace_id, agent_id) DO UPDATE
            SET node_id = excluded.node_id, due_at = relay_now(), disabled_at = NULL, disabled_reason = NULL,
                is_blocked = false,
                pushed_seq = CASE WHEN push_mailboxes.node_id = excluded.node_id THEN push_mailboxes.pushed_seq
                                  ELSE excluded.pushed_seq END,
                owner = CASE WHEN push_mailboxes.node_id = excluded.node_id THEN push_mailboxes.owner END,
                epoch = CASE WHEN push_mailboxes.node_id = excluded.node_id THEN push_mailboxes.epoch
                             ELSE push_mailboxes.epoch + 1 END",
    )
    .bind(scope.workspace_id())
    .bind(agent)
    .bind(node)
    .execute(&mut **tx)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("placing a push mailbox"))
}

/// Makes a mailbox due at `at`, at which a deferral ends. Does nothing for an agent that does not use http_push.
pub(crate) async fn set_due(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    agent: AgentId,
    at: DateTime<Utc>,
) -> StoreResult<()> {
    sqlx::query(
        "UPDATE push_mailboxes SET due_at = least(due_at, $3) WHERE workspace_id = $1 AND agent_id = $2
            AND (due_at IS NULL OR due_at > $3)",
    )
    .bind(scope.workspace_id())
    .bind(agent)
    .bind(at)
    .execute(&mut **tx)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("scheduling a push mailbox"))
}

/// Makes a blocked mailbox due: a row was settled, and it may be the one that blocks later rows.
pub(crate) async fn unblock_mailbox(tx: &mut Transaction, scope: WorkspaceScope, agent: AgentId) -> StoreResult<()> {
    sqlx::query(
        "UPDATE push_mailboxes SET due_at = relay_now()
          WHERE workspace_id = $1 AND agent_id = $2 AND owner IS NULL AND is_blocked",
    )
    .bind(scope.workspace_id())
    .bind(agent)
    .execute(&mut **tx)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("unblocking a push mailbox"))
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
