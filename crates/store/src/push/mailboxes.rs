//! Mailbox leases of http_push workers: at most one worker serves a mailbox. Main type: [`LeasedMailbox`]; called by
//! the worker's dispatcher and by transactions that bind agents or settle rows.
//!
//! A mailbox is placed when its agent is bound to an http_push node. A worker claims it, which increments the epoch,
//! and releases it with the instant at which it is due again. Every write of a worker names owner and epoch, so a
//! worker whose lease has expired changes nothing; the [sweep](crate::push::sweep) releases its mailboxes.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, NodeId, PushWorkerId, WorkspaceScope,
    push::mailbox::{LeasedMailbox, MailboxRelease},
};
use sqlx::{FromRow, Row as _, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult, connections::Transaction, decode::decode_rows, mailboxes::cursors::split_keys,
    statement_timeout::StatementTimeout as _, workspaces::suspensions::is_suspended,
};

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

// Claims the selected mailboxes. SKIP LOCKED: a row that another worker is claiming is not waited for. The selection
// joins the agent, because a mailbox whose agent has moved elsewhere must not be served; the sweep removes its row.
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
// `k` was read without locks, so the conditions are repeated on the locked row.
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

// Named by a hint, so it need not be due. A blocked one waits for its time, because its new rows wait, too.
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

/// Condition: a mailbox can be claimed.
pub(crate) const IS_ANY_DUE: &str = concat!(
    "(SELECT true FROM push_mailboxes m
       WHERE owner IS NULL AND due_at IS NOT NULL AND disabled_at IS NULL AND due_at <= relay_now() AND NOT ",
    is_suspended!("m"),
    " ORDER BY due_at LIMIT 1) IS NOT NULL"
);

const LAG: &str = concat!(
    "SELECT coalesce((SELECT extract(epoch FROM relay_now() - due_at)::float8 FROM push_mailboxes m
                       WHERE owner IS NULL AND due_at IS NOT NULL AND disabled_at IS NULL AND due_at <= relay_now()
                         AND NOT ",
    is_suspended!("m"),
    " ORDER BY due_at LIMIT 1), 0)"
);

impl Store {
    /// Acquires or renews a worker's lease. Returns the workers whose lease has not expired, this one included, in
    /// order.
    pub async fn renew_push_worker(&self, owner: PushWorkerId, ttl: Duration) -> StoreResult<Vec<PushWorkerId>> {
        // The lease ends by the clock of Postgres, which all workers share.
        // UNION ALL: the snapshot of a statement lacks what it writes. `reads_shared_bodies` tells the dispatch of
        // subscriptions that this version finds bodies outside of the deliveries.
        sqlx::query_scalar(
            "WITH renewed AS (
                 INSERT INTO push_workers (owner, lease_until, reads_shared_bodies)
                 VALUES ($1, relay_now() + make_interval(secs => $2), true)
                 ON CONFLICT (owner) DO UPDATE SET lease_until = excluded.lease_until
             )
             SELECT owner FROM push_workers WHERE lease_until > relay_now() AND owner <> $1 UNION ALL SELECT $1
              ORDER BY owner",
        )
        .bind(owner)
        .bind(ttl.as_secs_f64())
        .fetch_all(&self.pool)
        .with_timeout()
        .await
        .map_err(StoreError::from_sqlx("renewing a push worker's lease"))
    }

    /// Lists the agents of a workspace that use http_push, with their nodes, at most 10 000. Empty while the workspace
    /// is suspended.
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
        // The hint for a message committed after the last read went to this worker and is lost; the head shows the
        // message. A deferral that was reported during the lease has set `p.due_at`, which this worker may not know.
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

    /// Returns the time for which the mailbox that is due longest has waited for a worker, in seconds; 0 when none is
    /// due. Mailboxes that are disabled, or whose workspace is suspended, are not due.
    pub async fn push_lag(&self) -> StoreResult<f64> {
        sqlx::query_scalar(LAG)
            .fetch_one(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("measuring the push lag"))
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

/// Makes the mailbox of an agent due that was bound to an http_push node. An agent that was on the node before keeps
/// its push position and its worker; one that comes from elsewhere starts above the settled floor, with a new epoch
/// that fences the worker of the former node.
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
