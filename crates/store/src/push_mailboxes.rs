//! Who serves the mailboxes of agents on http_push nodes: one worker at a time each.
//!
//! A mailbox is *placed* when its agent is bound to such a node. A worker *takes* it, with the epoch one higher, and
//! *releases* it with the instant at which it is due again. A worker whose lease has ended owns nothing: the sweep
//! gives its mailboxes back. Everything that a worker writes about a mailbox names its owner and epoch.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, NodeId, WorkspaceId, WorkspaceScope};
use sqlx::{PgTransaction, Row, postgres::PgRow};

use crate::{
    Store, StoreError, StoreResult,
    cursors::split,
    holds::is_held,
    loop_state::{Remembered, recall, remember},
    patience::Patient as _,
};

/// Mailboxes that one step of the sweep looks at.
const SWEPT_AT_ONCE: i64 = 5000;

/// A mailbox that this worker serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakenMailbox {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// Whose mailbox.
    pub agent_id: AgentId,
    /// The node that the agent is on.
    pub node_id: NodeId,
    /// The agent's name.
    pub agent_name: String,
    /// Fences what is written about it.
    pub epoch: i64,
    /// Everything up to here has been handed over, is settled, or is deferred.
    pub pushed_seq: i64,
}

/// A mailbox that is given back.
#[derive(Debug, Clone)]
pub struct Release {
    /// The mailbox, with what has been handed over.
    pub mailbox: TakenMailbox,
    /// When it is due again, as far as known.
    pub due_at: Option<DateTime<Utc>>,
    /// Whether nothing goes before that, whatever comes.
    pub is_blocked: bool,
}

/// What one step of the sweep did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swept {
    /// Mailboxes taken back from workers that are gone.
    pub taken_back: u64,
    /// Mailboxes found with something to do that nobody was told of.
    pub woken: u64,
    /// Whether there is more to look at right away.
    pub more: bool,
}

// The agent must still be there: one that has moved on is somebody else's, and its row goes with the sweep.
macro_rules! take {
    ($($which:tt)*) => {
        concat!(
            "WITH locked AS MATERIALIZED (",
            $($which)*,
            "
                 FOR UPDATE OF p SKIP LOCKED
             ), taken AS (
                 UPDATE push_mailboxes p SET owner = $1, epoch = p.epoch + 1, due_at = NULL,
                        is_blocked = false
                   FROM locked l
                  WHERE p.workspace_id = l.workspace_id AND p.agent_id = l.agent_id
              RETURNING p.workspace_id, p.agent_id, p.node_id, p.epoch, p.pushed_seq
             )
             SELECT t.workspace_id, t.agent_id, t.node_id, t.epoch, a.name,
                    greatest(t.pushed_seq, coalesce(c.settled_floor, 0)) AS pushed_seq
               FROM taken t
               JOIN agents a ON a.workspace_id = t.workspace_id AND a.agent_id = t.agent_id
               LEFT JOIN mailbox_cursors c ON c.workspace_id = t.workspace_id AND c.agent_id = t.agent_id"
        )
    };
}

// The workspaces take turns: of those due, the first of each come before the second of any.
const TAKE_DUE: &str = take!(concat!(
    "SELECT p.workspace_id, p.agent_id
       FROM (SELECT workspace_id, agent_id,
                    row_number() OVER (PARTITION BY workspace_id ORDER BY due_at) AS turn, due_at
               FROM (SELECT workspace_id, agent_id, due_at FROM push_mailboxes m
                      WHERE owner IS NULL AND due_at IS NOT NULL AND disabled_at IS NULL AND due_at <= now()
                        AND NOT ",
    is_held!("m"),
    " ORDER BY due_at LIMIT 8 * $2) AS due
              ORDER BY turn, due_at LIMIT $2) AS k
       JOIN push_mailboxes p USING (workspace_id, agent_id)
       JOIN agents a ON a.workspace_id = p.workspace_id AND a.agent_id = p.agent_id
                    AND a.node_id = p.node_id AND a.deleted_at IS NULL
      WHERE p.owner IS NULL AND p.disabled_at IS NULL AND p.due_at <= now()"
));

const TAKE_NAMED: &str = take!(concat!(
    "SELECT p.workspace_id, p.agent_id
       FROM unnest($2::bigint[], $3::bigint[]) AS k (workspace_id, agent_id)
       JOIN push_mailboxes p USING (workspace_id, agent_id)
       JOIN agents a ON a.workspace_id = p.workspace_id AND a.agent_id = p.agent_id
                    AND a.node_id = p.node_id AND a.deleted_at IS NULL
      WHERE p.owner IS NULL AND p.disabled_at IS NULL AND NOT (p.is_blocked AND p.due_at > now()) AND NOT ",
    is_held!("p")
));

const LAG: &str = concat!(
    "SELECT coalesce((SELECT extract(epoch FROM now() - due_at)::float8 FROM push_mailboxes m
                       WHERE owner IS NULL AND due_at IS NOT NULL AND disabled_at IS NULL AND due_at <= now()
                         AND NOT ",
    is_held!("m"),
    " ORDER BY due_at LIMIT 1), 0)"
);

// Rows that are missing: an agent came to its node by another way than a binding.
const ADD_MISSING: &str = "
INSERT INTO push_mailboxes (workspace_id, agent_id, node_id, pushed_seq, due_at)
SELECT a.workspace_id, a.agent_id, a.node_id, coalesce(c.settled_floor, 0), now()
  FROM nodes n
  JOIN agents a ON a.workspace_id = n.workspace_id AND a.node_id = n.node_id AND a.deleted_at IS NULL
  LEFT JOIN mailbox_cursors c ON c.workspace_id = a.workspace_id AND c.agent_id = a.agent_id
 WHERE n.kind = 'http_push'
   AND NOT EXISTS (SELECT FROM push_mailboxes p
                    WHERE p.workspace_id = a.workspace_id AND p.agent_id = a.agent_id AND p.node_id = a.node_id)
 LIMIT 1000
    ON CONFLICT (workspace_id, agent_id) DO UPDATE
       SET node_id = excluded.node_id, pushed_seq = excluded.pushed_seq, due_at = now(), owner = NULL,
           epoch = push_mailboxes.epoch + 1, disabled_at = NULL, disabled_reason = NULL";

// What nobody serves, and what is left of agents that are gone, disabled or not.
const PAGE: &str = "
SELECT p.workspace_id, p.agent_id, h.next_seq - 1 > greatest(p.pushed_seq, coalesce(c.settled_floor, 0)) AS has_more,
       a.agent_id IS NULL AS is_gone
  FROM (SELECT * FROM push_mailboxes WHERE (workspace_id, agent_id) > ($1, $2)
         ORDER BY workspace_id, agent_id LIMIT $3) AS p
  LEFT JOIN agents a ON a.workspace_id = p.workspace_id AND a.agent_id = p.agent_id
                    AND a.node_id = p.node_id AND a.deleted_at IS NULL
  LEFT JOIN mailbox_heads h ON h.workspace_id = p.workspace_id AND h.agent_id = p.agent_id
  LEFT JOIN mailbox_cursors c ON c.workspace_id = p.workspace_id AND c.agent_id = p.agent_id
 WHERE p.owner IS NULL
   AND (a.agent_id IS NULL OR (p.disabled_at IS NULL AND (NOT p.is_blocked OR p.due_at IS NULL)))
 ORDER BY p.workspace_id, p.agent_id";

impl Store {
    /// Takes or renews a worker's lease.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn renew_push_worker(&self, owner: i64, ttl: Duration) -> StoreResult<()> {
        sqlx::query(
            "INSERT INTO push_workers (owner, lease_until) VALUES ($1, now() + make_interval(secs => $2))
             ON CONFLICT (owner) DO UPDATE SET lease_until = excluded.lease_until",
        )
        .bind(owner)
        .bind(ttl.as_secs_f64())
        .execute(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("renewing a push worker's lease"))?;
        Ok(())
    }

    /// The workers that live, in order.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn push_workers(&self) -> StoreResult<Vec<i64>> {
        sqlx::query_scalar("SELECT owner FROM push_workers WHERE lease_until > now() ORDER BY owner")
            .fetch_all(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx("reading who lives"))
    }

    /// The agents of a workspace that are pushed to, with their nodes, 10 000 at most. None while it is held.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn pushed_agents(&self, scope: WorkspaceScope) -> StoreResult<Vec<(AgentId, NodeId)>> {
        let rows: Vec<(i64, String)> = sqlx::query_as(concat!(
            "SELECT p.agent_id, p.node_id FROM push_mailboxes p
               JOIN agents a ON a.workspace_id = p.workspace_id AND a.agent_id = p.agent_id
                            AND a.node_id = p.node_id AND a.deleted_at IS NULL
              WHERE p.workspace_id = $1 AND p.disabled_at IS NULL AND NOT ",
            is_held!("p"),
            " ORDER BY p.agent_id LIMIT 10000"
        ))
        .bind(scope.workspace_id().get())
        .fetch_all(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("reading who is pushed to"))?;
        Ok(rows.into_iter().map(|(agent, node)| (AgentId::new(agent), NodeId::new(node))).collect())
    }

    /// Gives everything back at the end of a drain.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn retire_push_worker(&self, owner: i64) -> StoreResult<()> {
        let doing = "retiring a push worker";
        sqlx::query("UPDATE push_mailboxes SET owner = NULL, due_at = now() WHERE owner = $1")
            .bind(owner)
            .execute(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        sqlx::query("DELETE FROM push_workers WHERE owner = $1")
            .bind(owner)
            .execute(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        Ok(())
    }

    /// Takes mailboxes that are due, at most `limit`; workspaces take turns.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn take_due_mailboxes(&self, owner: i64, limit: i64) -> StoreResult<Vec<TakenMailbox>> {
        let rows = sqlx::query(TAKE_DUE)
            .bind(owner)
            .bind(limit)
            .fetch_all(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx("taking mailboxes that are due"))?;
        Ok(rows.iter().map(taken).collect())
    }

    /// Takes those of these mailboxes that nobody serves.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn take_mailboxes(&self, owner: i64, of: &[(WorkspaceScope, AgentId)]) -> StoreResult<Vec<TakenMailbox>> {
        let (workspaces, agents) = split(of);
        let rows = sqlx::query(TAKE_NAMED)
            .bind(owner)
            .bind(workspaces)
            .bind(agents)
            .fetch_all(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx("taking mailboxes"))?;
        Ok(rows.iter().map(taken).collect())
    }

    /// Gives mailboxes back. What came in the meantime makes one due at once, unless it is blocked.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn release_mailboxes(&self, owner: i64, of: &[Release]) -> StoreResult<()> {
        // A message that was committed after the last read shows in the head.
        sqlx::query(
            "UPDATE push_mailboxes p
                SET owner = NULL, pushed_seq = greatest(p.pushed_seq, k.pushed_seq),
                    is_blocked = k.is_blocked,
                    due_at = CASE WHEN NOT k.is_blocked
                                   AND h.next_seq - 1 > greatest(k.pushed_seq, c.settled_floor) THEN now()
                                  ELSE least(k.due_at, p.due_at) END
               FROM unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::timestamptz[], $7::boolean[])
                    AS k (workspace_id, agent_id, epoch, pushed_seq, due_at, is_blocked)
               JOIN mailbox_heads h USING (workspace_id, agent_id)
               JOIN mailbox_cursors c USING (workspace_id, agent_id)
              WHERE p.workspace_id = k.workspace_id AND p.agent_id = k.agent_id
                AND p.owner = $1 AND p.epoch = k.epoch",
        )
        .bind(owner)
        .bind(of.iter().map(|r| r.mailbox.scope.workspace_id().get()).collect::<Vec<_>>())
        .bind(of.iter().map(|r| r.mailbox.agent_id.get()).collect::<Vec<_>>())
        .bind(of.iter().map(|r| r.mailbox.epoch).collect::<Vec<_>>())
        .bind(of.iter().map(|r| r.mailbox.pushed_seq).collect::<Vec<_>>())
        .bind(of.iter().map(|r| r.due_at).collect::<Vec<_>>())
        .bind(of.iter().map(|r| r.is_blocked).collect::<Vec<_>>())
        .execute(&self.pool)
        .patiently()
        .await
        .map_err(StoreError::from_sqlx("releasing mailboxes"))?;
        Ok(())
    }

    /// How long the mailbox that is due longest has waited for a worker to take it, in seconds; 0 when none is due.
    /// What is disabled, or whose workspace is held, is not due.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn push_lag(&self) -> StoreResult<f64> {
        sqlx::query_scalar(LAG)
            .fetch_one(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx("measuring the lag of pushing"))
    }

    /// One step of the sweep: takes mailboxes back from workers whose lease has ended, adds what is missing, and
    /// makes due what has rows that nobody was told of. While another worker is at it, does nothing.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn sweep_push_mailboxes(&self) -> StoreResult<Swept> {
        let doing = "sweeping push mailboxes";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let from = match recall::<(i64, i64)>(&mut tx, "push_sweep").await? {
            Remembered::Busy => return Ok(Swept::default()),
            Remembered::Ours(position) => position.unwrap_or((0, 0)),
        };
        // A worker without a row has retired, or was forgotten long after its lease.
        let taken_back = sqlx::query(
            "WITH gone AS MATERIALIZED (
                 SELECT p.workspace_id, p.agent_id FROM push_mailboxes p
                  WHERE p.owner IS NOT NULL
                    AND NOT EXISTS (SELECT FROM push_workers w WHERE w.owner = p.owner AND w.lease_until > now())
                  LIMIT 5000 FOR UPDATE SKIP LOCKED
             )
             UPDATE push_mailboxes p SET owner = NULL, due_at = now()
               FROM gone g WHERE p.workspace_id = g.workspace_id AND p.agent_id = g.agent_id",
        )
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?
        .rows_affected();
        let mut swept = Swept { taken_back, ..Swept::default() };
        sqlx::query("DELETE FROM push_workers WHERE lease_until < now() - interval '10 minutes'")
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        if from == (0, 0) {
            swept.woken +=
                sqlx::query(ADD_MISSING).execute(&mut *tx).await.map_err(StoreError::from_sqlx(doing))?.rows_affected();
        }
        let last: Option<(i64, i64)> = sqlx::query_as(
            "SELECT workspace_id, agent_id FROM push_mailboxes WHERE (workspace_id, agent_id) > ($1, $2)
              ORDER BY workspace_id, agent_id OFFSET $3 - 1 LIMIT 1",
        )
        .bind(from.0)
        .bind(from.1)
        .bind(SWEPT_AT_ONCE)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let page: Vec<(i64, i64, Option<bool>, bool)> = sqlx::query_as(PAGE)
            .bind(from.0)
            .bind(from.1)
            .bind(SWEPT_AT_ONCE)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let columns = |which: &dyn Fn(&(i64, i64, Option<bool>, bool)) -> bool| -> (Vec<i64>, Vec<i64>) {
            page.iter().filter(|row| which(row)).map(|row| (row.0, row.1)).unzip()
        };
        let gone = columns(&|row| row.3);
        let lagging = columns(&|row| !row.3 && row.2 == Some(true));
        for (statement, (workspaces, agents)) in [
            (
                "DELETE FROM push_mailboxes p USING unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
                  WHERE p.workspace_id = k.workspace_id AND p.agent_id = k.agent_id AND p.owner IS NULL
                    AND NOT EXISTS (SELECT FROM agents a WHERE a.workspace_id = p.workspace_id
                                     AND a.agent_id = p.agent_id AND a.node_id = p.node_id AND a.deleted_at IS NULL)",
                &gone,
            ),
            (
                "UPDATE push_mailboxes p SET due_at = now()
                   FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
                  WHERE p.workspace_id = k.workspace_id AND p.agent_id = k.agent_id
                    AND p.owner IS NULL AND (p.due_at IS NULL OR p.due_at > now()) AND NOT p.is_blocked",
                &lagging,
            ),
        ] {
            if !agents.is_empty() {
                let query = sqlx::query(statement).bind(workspaces).bind(agents);
                swept.woken += query.execute(&mut *tx).await.map_err(StoreError::from_sqlx(doing))?.rows_affected();
            }
        }
        swept.more = last.is_some();
        remember(&mut tx, "push_sweep", &last.unwrap_or((0, 0))).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(swept)
    }
}

/// An agent was bound to an http_push node: its mailbox is due. One that was there before goes on where it was;
/// one that comes from elsewhere starts behind what is settled.
pub(crate) async fn place(
    tx: &mut PgTransaction<'_>,
    scope: WorkspaceScope,
    agent: AgentId,
    node: &NodeId,
) -> StoreResult<()> {
    sqlx::query(
        "INSERT INTO push_mailboxes (workspace_id, agent_id, node_id, pushed_seq, due_at)
         SELECT $1, $2, $3, coalesce((SELECT settled_floor FROM mailbox_cursors
                                       WHERE workspace_id = $1 AND agent_id = $2), 0), now()
         ON CONFLICT (workspace_id, agent_id) DO UPDATE
            SET node_id = excluded.node_id, due_at = now(), disabled_at = NULL, disabled_reason = NULL,
                is_blocked = false,
                pushed_seq = CASE WHEN push_mailboxes.node_id = excluded.node_id THEN push_mailboxes.pushed_seq
                                  ELSE excluded.pushed_seq END,
                owner = CASE WHEN push_mailboxes.node_id = excluded.node_id THEN push_mailboxes.owner END,
                epoch = CASE WHEN push_mailboxes.node_id = excluded.node_id THEN push_mailboxes.epoch
                             ELSE push_mailboxes.epoch + 1 END",
    )
    .bind(scope.workspace_id().get())
    .bind(agent.get())
    .bind(node.as_str())
    .execute(&mut **tx)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("placing a push mailbox"))
}

fn taken(row: &PgRow) -> TakenMailbox {
    TakenMailbox {
        scope: WorkspaceScope::from_engine_row(WorkspaceId::new(row.get("workspace_id"))),
        agent_id: AgentId::new(row.get("agent_id")),
        node_id: NodeId::new(row.get::<String, _>("node_id")),
        agent_name: row.get("name"),
        epoch: row.get("epoch"),
        pushed_seq: row.get("pushed_seq"),
    }
}

/// A row of the mailbox comes back then; an agent that is not pushed to has no such mailbox.
pub(crate) async fn due_at(
    tx: &mut PgTransaction<'_>,
    scope: WorkspaceScope,
    agent: AgentId,
    at: DateTime<Utc>,
) -> StoreResult<()> {
    sqlx::query(
        "UPDATE push_mailboxes SET due_at = least(due_at, $3) WHERE workspace_id = $1 AND agent_id = $2
            AND (due_at IS NULL OR due_at > $3)",
    )
    .bind(scope.workspace_id().get())
    .bind(agent.get())
    .bind(at)
    .execute(&mut **tx)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("putting off a push mailbox"))
}

/// A row of the mailbox was settled: it may be the one that the others wait for.
pub(crate) async fn unblock(tx: &mut PgTransaction<'_>, scope: WorkspaceScope, agent: AgentId) -> StoreResult<()> {
    sqlx::query(
        "UPDATE push_mailboxes SET due_at = now()
          WHERE workspace_id = $1 AND agent_id = $2 AND owner IS NULL AND is_blocked",
    )
    .bind(scope.workspace_id().get())
    .bind(agent.get())
    .execute(&mut **tx)
    .await
    .map(|_| ())
    .map_err(StoreError::from_sqlx("unblocking a push mailbox"))
}
