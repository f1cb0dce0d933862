//! Invocations whose provider was lost or did not answer, and those that wait for one.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{InvocationId, NodeId, ProviderName, WorkspaceScope, action, node::NODE_TTL};
use serde_json::Value;
use sqlx::PgConnection;

use crate::{
    Store, StoreError, StoreResult,
    candidates::{Candidates, Wanted, take_turns},
    finish::scope_of,
    hosting::Fence,
    invoke::Dispatch,
};

/// Attempts whose reasons are kept with an invocation; older ones go.
const KEPT_PLACEMENTS: usize = 10;
/// Workspaces with something to be tried again that one look names.
const WORKSPACES: i64 = 1000;

/// An invocation that has been sent somewhere else.
#[derive(Debug)]
pub struct Redispatched {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The invocation.
    pub invocation_id: InvocationId,
    /// Where it goes now.
    pub dispatch: Dispatch,
}

/// What one look at a workspace's waiting invocations did.
#[derive(Debug, Default)]
pub struct Redispatch {
    /// What goes somewhere now.
    pub sent: Vec<Redispatched>,
    /// How many were looked at.
    pub looked_at: usize,
}

// A provider that is gone has a moment to come back before what it was doing goes elsewhere.
const NOTE_LOST: &str = "
WITH lost AS MATERIALIZED (
    SELECT i.workspace_id, i.invocation_id
      FROM invocations i
      LEFT JOIN providers p ON p.workspace_id = i.workspace_id AND p.node_id = i.node_id AND p.provider = i.provider
     WHERE i.status = 'dispatched' AND i.unreachable_since IS NULL AND p.gateway_id IS NULL
     ORDER BY i.workspace_id, i.invocation_id LIMIT $2
       FOR UPDATE OF i SKIP LOCKED
)
UPDATE invocations i SET unreachable_since = $1
  FROM lost WHERE i.workspace_id = lost.workspace_id AND i.invocation_id = lost.invocation_id";

// An agent of no particular provider is asked through another one that is there, once the one it was asked through has
// been silent for so long that it is taken for dead.
const ASK_ANOTHER: &str = "
WITH stray AS MATERIALIZED (
    SELECT i.workspace_id, i.invocation_id
      FROM invocations i
      JOIN agents a ON a.workspace_id = i.workspace_id AND a.agent_id = i.handler_agent_id AND a.provider IS NULL
     WHERE i.status = 'invoked' AND i.sent_epoch IS NOT NULL
       AND NOT EXISTS (
           SELECT FROM providers p
            WHERE p.workspace_id = i.workspace_id AND p.node_id = i.node_id AND p.provider = i.provider
              AND (p.gateway_id IS NOT NULL OR p.last_heartbeat_at > $1))
       AND EXISTS (
           SELECT FROM providers p
            WHERE p.workspace_id = a.workspace_id AND p.node_id = a.node_id AND p.gateway_id IS NOT NULL)
     ORDER BY i.workspace_id, i.invocation_id LIMIT $2
       FOR UPDATE OF i SKIP LOCKED
)
UPDATE invocations i SET sent_epoch = NULL
  FROM stray WHERE i.workspace_id = stray.workspace_id AND i.invocation_id = stray.invocation_id";

/// Condition of an invocation `i` that an agent handles: the connection over which that agent is reached, wherever it is
/// now, is gone. On nodes that are pushed to, or whose agents claim, there is none that could be.
pub(crate) const HANDLER_IS_AWAY: &str = "coalesce((
    SELECT coalesce(n.kind, 'ws') = 'ws' AND NOT EXISTS (
           SELECT FROM providers p
            WHERE p.workspace_id = a.workspace_id AND p.node_id = a.node_id
              AND (a.provider IS NULL OR p.provider = a.provider) AND p.gateway_id IS NOT NULL)
      FROM agents a
      LEFT JOIN nodes n ON n.workspace_id = a.workspace_id AND n.node_id = a.node_id
     WHERE a.workspace_id = i.workspace_id AND a.agent_id = i.handler_agent_id), true)";

// One that is only silent is asked no more where another could be; what it still says counts until another was asked.
// One that has said that it is at work may be silent, and so may one whose agent has come up: its inventory tells when
// that one is gone. Of one that is lost the agent is kept in mind: it may still run when its provider is back.
const TAKE_BACK: &str = "
WITH lost AS MATERIALIZED (
    SELECT i.workspace_id, i.invocation_id
      FROM invocations i
      LEFT JOIN providers p ON p.workspace_id = i.workspace_id AND p.node_id = i.node_id AND p.provider = i.provider
     WHERE i.status = 'dispatched' AND i.came_up IS NULL
       AND (p.gateway_id IS NULL AND i.unreachable_since < $5
            OR i.due_at <= $1 AND i.accepted_at IS NULL AND i.agent_id IS NULL
               AND (i.target_node_id IS NULL OR i.sent_epoch IS NULL))
     ORDER BY i.workspace_id, i.invocation_id LIMIT $2
       FOR UPDATE OF i SKIP LOCKED
)
UPDATE invocations i
   SET status = 'pending', reserves = false, sent_epoch = NULL, sent_at = NULL, accepted_at = NULL,
       tried = CASE WHEN i.target_node_id IS NULL AND i.node_id <> ALL (i.tried) THEN i.tried || i.node_id
                    ELSE i.tried END,
       unreachable_since = coalesce(i.unreachable_since, $1),
       due_at = $1 + make_interval(secs => least($3 * 2 ^ least(i.attempt - 1, 16), $4))
  FROM lost
 WHERE i.workspace_id = lost.workspace_id AND i.invocation_id = lost.invocation_id AND i.status = 'dispatched'
RETURNING i.workspace_id";

// Each workspace has its turn, however much another one has waiting.
const DUE_WORKSPACES: &str = "
SELECT workspace_id FROM (
    SELECT workspace_id, min(due_at) AS due FROM invocations
     WHERE completed_at IS NULL AND status = 'pending' AND came_up IS NULL AND due_at <= $1
     GROUP BY workspace_id) AS waiting
 ORDER BY due LIMIT $2";

const DUE: &str = "
SELECT invocation_id, capability, target_node_id, target_provider, only_capacity, attempt, tried, placements
  FROM invocations
 WHERE workspace_id = $1 AND status = 'pending' AND came_up IS NULL AND due_at <= $2
 ORDER BY due_at, invocation_id LIMIT $3
   FOR UPDATE SKIP LOCKED";

/// One that is due.
#[derive(sqlx::FromRow)]
struct Due {
    invocation_id: i64,
    capability: String,
    target_node_id: Option<String>,
    target_provider: Option<String>,
    only_capacity: bool,
    attempt: i32,
    tried: Vec<String>,
    placements: Value,
}

impl Store {
    /// Takes invocations back from providers that are gone, or that did not answer in time and are not the only ones
    /// that could. They wait, and their places are free. Returns how many, at most `limit`.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn take_back_lost(&self, limit: i64, at: DateTime<Utc>) -> StoreResult<u64> {
        let doing = "taking invocations back";
        sqlx::query(NOTE_LOST).bind(at).bind(limit).execute(&self.pool).await.map_err(StoreError::from_sqlx(doing))?;
        self.note_handlers(limit, at).await?;
        sqlx::query(ASK_ANOTHER)
            .bind(at - TimeDelta::from_std(NODE_TTL).unwrap_or_default())
            .bind(limit)
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let first = action::backoff(1);
        let longest = action::backoff(i32::MAX);
        let taken = sqlx::query(TAKE_BACK)
            .bind(at)
            .bind(limit)
            .bind(first.as_secs_f64())
            .bind(longest.as_secs_f64())
            .bind(at - TimeDelta::from_std(action::LOST_GRACE).unwrap_or_default())
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        Ok(taken.rows_affected())
    }

    /// Notes of what agents were sent whose connection is gone, and forgets it of those that are back.
    async fn note_handlers(&self, limit: i64, at: DateTime<Utc>) -> StoreResult<()> {
        let query = format!(
            "WITH changed AS MATERIALIZED (
                 SELECT i.workspace_id, i.invocation_id
                   FROM invocations i
                  WHERE i.status = 'invoked' AND i.sent_epoch IS NOT NULL
                    AND (i.unreachable_since IS NULL) = {HANDLER_IS_AWAY}
                  ORDER BY i.workspace_id, i.invocation_id LIMIT $2
                    FOR UPDATE OF i SKIP LOCKED
             )
             UPDATE invocations i SET unreachable_since = CASE WHEN i.unreachable_since IS NULL THEN $1::timestamptz END
               FROM changed WHERE i.workspace_id = changed.workspace_id AND i.invocation_id = changed.invocation_id"
        );
        sqlx::query(sqlx::AssertSqlSafe(query))
            .bind(at)
            .bind(limit)
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("looking for handlers that are gone"))?;
        Ok(())
    }

    /// Workspaces in which something waits that is due, those first that have waited longest.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn workspaces_with_due_invocations(&self, at: DateTime<Utc>) -> StoreResult<Vec<WorkspaceScope>> {
        let rows: Vec<i64> = sqlx::query_scalar(DUE_WORKSPACES)
            .bind(at)
            .bind(WORKSPACES)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("looking for waiting invocations"))?;
        Ok(rows.into_iter().map(scope_of).collect())
    }

    /// Tries a workspace's waiting invocations again, at most `limit`, the longest waiting first.
    ///
    /// # Errors
    /// When Postgres is away, or the transaction lost against others.
    pub async fn redispatch(
        &self,
        scope: WorkspaceScope,
        limit: i64,
        entropy: u64,
        at: DateTime<Utc>,
    ) -> StoreResult<Redispatch> {
        let doing = "trying invocations again";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        take_turns(&mut tx, &[scope]).await?;
        let due: Vec<Due> = sqlx::query_as(DUE)
            .bind(scope.workspace_id().get())
            .bind(at)
            .bind(limit)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        if due.is_empty() {
            return Ok(Redispatch::default());
        }
        let wanted = due.iter().map(|row| (scope, row.capability.as_str()));
        let mut candidates = Candidates::read(&mut tx, wanted).await?;
        let mut done = Redispatch { looked_at: due.len(), sent: Vec::new() };
        for (nth, row) in due.into_iter().enumerate() {
            if let Some(sent) = retry(&mut tx, scope, row, &mut candidates, (entropy, nth), at).await? {
                done.sent.push(sent);
            }
        }
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(done)
    }

    /// A provider has said that it cannot do what it was sent: its handlers do not run, and the invocation waits for
    /// another try. False when it is not (or no longer) this provider's, an agent handles it, or it has been tried often
    /// enough.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn hand_back(&self, fence: &Fence, invocation: InvocationId, at: DateTime<Utc>) -> StoreResult<bool> {
        let taken = sqlx::query(
            "WITH back AS (
                 UPDATE invocations i
                    SET status = 'pending', reserves = false, sent_epoch = NULL, sent_at = NULL, accepted_at = NULL,
                        tried = CASE WHEN i.target_node_id IS NULL AND i.node_id <> ALL (i.tried)
                                     THEN i.tried || i.node_id ELSE i.tried END,
                        unreachable_since = coalesce(i.unreachable_since, $6),
                        due_at = $6 + make_interval(secs => least($7 * 2 ^ least(i.attempt - 1, 16), $8))
                  WHERE i.workspace_id = $1 AND i.invocation_id = $5 AND i.status = 'dispatched'
                    AND i.node_id = $2 AND i.provider = $3 AND i.attempt < $9
                    AND EXISTS (SELECT FROM providers p WHERE p.workspace_id = $1 AND p.node_id = $2
                                   AND p.provider = $3 AND p.epoch = $4)
              RETURNING i.workspace_id
             ), unable AS (
                 UPDATE providers SET handlers_live = false
                  WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 AND epoch = $4
                    AND EXISTS (SELECT FROM back)
             )
             SELECT workspace_id FROM back",
        )
        .bind(fence.scope.workspace_id().get())
        .bind(fence.node_id.as_str())
        .bind(fence.provider.as_str())
        .bind(fence.epoch)
        .bind(invocation.get())
        .bind(at)
        .bind(action::backoff(1).as_secs_f64())
        .bind(action::backoff(i32::MAX).as_secs_f64())
        .bind(action::MAX_HAND_BACKS)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("handing an invocation back"))?;
        Ok(taken.is_some())
    }

    /// Removes up to `limit` invocations that had their outcome `age` ago. Returns how many.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn prune_invocations(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        let done = sqlx::query(
            "DELETE FROM invocations i
              USING (SELECT workspace_id, invocation_id FROM invocations
                      WHERE completed_at < now() - make_interval(secs => $1)
                      ORDER BY completed_at LIMIT $2 FOR UPDATE SKIP LOCKED) AS old
              WHERE i.workspace_id = old.workspace_id AND i.invocation_id = old.invocation_id",
        )
        .bind(age.as_secs_f64())
        .bind(limit)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("pruning invocations"))?;
        Ok(done.rows_affected())
    }
}

/// Tries one again; if nobody can, it waits on.
async fn retry(
    tx: &mut PgConnection,
    scope: WorkspaceScope,
    row: Due,
    candidates: &mut Candidates,
    (entropy, nth): (u64, usize),
    at: DateTime<Utc>,
) -> StoreResult<Option<Redispatched>> {
    let doing = "trying an invocation again";
    let target = row.target_node_id.as_deref().map(NodeId::new);
    let provider = row.target_provider.as_deref().map(ProviderName::new);
    let attempt = row.attempt + 1;
    let wanted = Wanted {
        scope,
        capability: &row.capability,
        target: target.as_ref(),
        provider: provider.as_ref(),
        only_capacity: row.only_capacity,
        avoided: &row.tried,
        attempt,
        entropy: entropy.wrapping_add(u64::try_from(nth).unwrap_or(0).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
    };
    let placed = candidates.place(&wanted, at);
    let mut placements = match row.placements {
        Value::Array(list) => list,
        _ => Vec::new(),
    };
    // A try that finds nobody again says what the one before it said.
    if placements.last().is_some_and(|last| last["attempt"] == attempt) {
        placements.pop();
    }
    placements.push(placed.reasons);
    if placements.len() > KEPT_PLACEMENTS {
        placements.drain(..placements.len() - KEPT_PLACEMENTS);
    }
    let able = placed.chosen;
    let pause = if able.is_some() { action::DISPATCH_TIMEOUT } else { action::backoff(row.attempt) };
    sqlx::query(
        "UPDATE invocations
            SET status = CASE WHEN $3::text IS NULL THEN 'pending' ELSE 'dispatched' END,
                attempt = CASE WHEN $3::text IS NULL THEN attempt ELSE $5 END,
                node_id = coalesce($3, node_id), provider = coalesce($4, provider),
                dispatched_at = CASE WHEN $3::text IS NULL THEN dispatched_at ELSE $6 END,
                agent_id = CASE WHEN $3::text IS NULL OR (node_id, provider) = ($3, $4) THEN agent_id END,
                reserves = $7, tells_caller = $8, due_at = $9, placements = $10,
                unreachable_since = coalesce(unreachable_since, $6)
          WHERE workspace_id = $1 AND invocation_id = $2 AND status = 'pending'",
    )
    .bind(scope.workspace_id().get())
    .bind(row.invocation_id)
    .bind(able.as_ref().map(|able| able.node_id.as_str()))
    .bind(able.as_ref().map(|able| able.provider.as_str()))
    .bind(attempt)
    .bind(at)
    .bind(able.as_ref().is_some_and(|able| able.takes_place()))
    .bind(able.as_ref().is_some_and(|able| able.tells_caller))
    .bind(at + TimeDelta::from_std(pause).unwrap_or_default())
    .bind(Value::Array(placements))
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    Ok(able.map(|able| Redispatched {
        scope,
        invocation_id: InvocationId::new(row.invocation_id),
        dispatch: Dispatch {
            node_id: NodeId::new(&able.node_id),
            provider: ProviderName::new(&able.provider),
            gateway_id: able.gateway(),
            attempt,
            tells_caller: able.tells_caller,
            agent: None,
        },
    }))
}

/// A provider is there: what it was doing is not lost, and what waits for its node, or for something that it can do, is
/// due. What brought an agent up there is left alone for now: the provider's inventory says whether the agent still runs.
pub(crate) async fn wake_waiting(
    tx: &mut PgConnection,
    scope: WorkspaceScope,
    node: &NodeId,
    provider: &ProviderName,
) -> StoreResult<()> {
    sqlx::query(
        "WITH waiting AS MATERIALIZED (
             SELECT i.workspace_id, i.invocation_id
               FROM invocations i
               JOIN node_capabilities c ON c.workspace_id = i.workspace_id AND c.name = i.capability
                    AND c.node_id = $2 AND c.provider = $3
              WHERE i.workspace_id = $1 AND i.status = 'pending'
                AND (i.target_node_id IS NULL OR i.target_node_id = $2)
                AND (i.target_provider IS NULL OR i.target_provider = $3)
                AND (i.agent_id IS NULL OR i.node_id <> $2 OR i.provider <> $3)
              ORDER BY i.invocation_id FOR UPDATE OF i SKIP LOCKED
         ), there AS (
             UPDATE invocations i SET unreachable_since = NULL
              WHERE i.workspace_id = $1 AND i.node_id = $2 AND i.provider = $3 AND i.status = 'dispatched'
                AND i.unreachable_since IS NOT NULL
         )
         UPDATE invocations i SET due_at = least(i.due_at, now())
           FROM waiting w WHERE i.workspace_id = w.workspace_id AND i.invocation_id = w.invocation_id",
    )
    .bind(scope.workspace_id().get())
    .bind(node.as_str())
    .bind(provider.as_str())
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("waking what waits for a provider"))?;
    Ok(())
}
