//! Retries of invocations: reclaims them from lost or silent providers, and places queued ones again.
//! [`HANDLER_UNREACHABLE`] and [`wake_waiting`] are shared with outcomes and provider registration; the rest is called
//! by the engine's invocation worker.

use const_format::formatcp;
use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{
    InvocationId, NodeId, ProviderName, WorkspaceId, WorkspaceScope,
    actions::{self, PlacementRecord, RELEASE, SPAWN, SPAWN_PREFIX},
    nodes::NODE_TTL,
};
use sqlx::types::Json;

use crate::{
    Store, StoreError, StoreResult,
    actions::{
        candidates::{Candidates, PlacementQuery},
        invoke::Dispatch,
    },
    codes::WS,
    connections::DatabaseSession,
    decode::decode_rows,
    nodes::fence::{Fence, ProviderKey},
};

/// Maximum number of placement decisions kept with an invocation.
const KEPT_PLACEMENTS: usize = 10;
/// Maximum number of workspaces in one scan for due invocations.
const WORKSPACES_PER_SCAN: i64 = 1000;

/// Invocation that was placed again.
#[derive(Debug)]
pub struct RedispatchedInvocation {
    pub scope: WorkspaceScope,
    pub invocation_id: InvocationId,
    pub dispatch: Dispatch,
}

/// Result of one pass over the queued invocations of a workspace.
#[derive(Debug, Default)]
pub struct RedispatchBatch {
    /// Invocations that have a provider now.
    pub sent: Vec<RedispatchedInvocation>,
    /// Number of examined invocations.
    pub examined: usize,
}

/// Condition: an invocation is open. In the order of the index, so that no plan reads those of the last days.
pub(crate) const HAS_OPEN: &str =
    "(SELECT true FROM invocations WHERE completed_at IS NULL ORDER BY due_at LIMIT 1) IS NOT NULL";

// Starts the grace period in which a lost provider may reconnect before its invocations move elsewhere.
const MARK_UNREACHABLE: &str = "
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

// Resends an unassigned agent's invocation through another connected provider of its node, once the provider that
// received it has been disconnected and silent for the liveness time.
const RESET_STRAY: &str = "
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

/// SQL condition on an invocation `i` with a handling agent: the agent's current node has no connected provider for it.
/// Nodes of kind `http_push` and `poll` have no connection, so they are never unreachable.
pub(crate) const HANDLER_UNREACHABLE: &str = formatcp!(
    "coalesce((
    SELECT coalesce(n.kind, '{WS}') = '{WS}' AND NOT EXISTS (
           SELECT FROM providers p
            WHERE p.workspace_id = a.workspace_id AND p.node_id = a.node_id
              AND (a.provider IS NULL OR p.provider = a.provider) AND p.gateway_id IS NOT NULL)
      FROM agents a
      LEFT JOIN nodes n ON n.workspace_id = a.workspace_id AND n.node_id = a.node_id
     WHERE a.workspace_id = i.workspace_id AND a.agent_id = i.handler_agent_id), true)"
);

// A provider that is connected and silent loses the invocation only if another provider may take it; its late answer
// still counts until then. A provider that accepted the invocation may stay silent, and so may one that has started the
// agent, because its inventory reports the agent's end. `agent_id` stays set after a loss: the agent may still run when
// its provider reconnects, and `accepted_at` if no other node may take it.
// The exponent is bounded: the power of a large attempt would overflow before `least` could limit the pause.
const RECLAIM: &str = "
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
   SET status = 'pending', reserves = false, sent_epoch = NULL, sent_at = NULL,
       accepted_at = CASE WHEN i.target_node_id IS NOT NULL THEN i.accepted_at END,
       tried = CASE WHEN i.target_node_id IS NULL AND i.node_id <> ALL (i.tried) THEN i.tried || i.node_id
                    ELSE i.tried END,
       unreachable_since = coalesce(i.unreachable_since, $1),
       due_at = $1 + make_interval(secs => least($3 * 2 ^ least(i.attempt - 1, 16), $4))
  FROM lost
 WHERE i.workspace_id = lost.workspace_id AND i.invocation_id = lost.invocation_id AND i.status = 'dispatched'
RETURNING i.workspace_id";

// Liveness is lost for longer than any reconnection takes. An invocation that was addressed to the lost node by name
// moves as well, unless the node accepted it or started its agent; one that was queued for the node and never placed
// has a target only. The former provider's epoch was raised when it was disconnected, and the next attempt has another
// node, so a late result of the former one is refused. A release stays, because no other node runs the agent, and so
// does what a policy for spawns had: elsewhere the capacity would be used without it. What was addressed to a deleted
// node fails.
const MOVE_EXPIRED: &str = formatcp!(
    "
WITH expired AS MATERIALIZED (
    SELECT i.workspace_id, i.invocation_id, l.node_id
      FROM invocations i
     CROSS JOIN LATERAL (SELECT coalesce(i.node_id, i.target_node_id) AS node_id,
                                coalesce(i.provider, i.target_provider) AS provider) AS l
     WHERE i.completed_at IS NULL AND l.node_id IS NOT NULL AND i.capability <> '{RELEASE}'
       AND i.accepted_at IS NULL AND i.agent_id IS NULL AND i.came_up IS NULL
       AND i.unreachable_since IS DISTINCT FROM '-infinity'
       AND (i.status = 'dispatched' OR i.status = 'pending' AND i.target_node_id = l.node_id)
       AND NOT EXISTS (
           SELECT FROM providers p
            WHERE p.workspace_id = i.workspace_id AND p.node_id = l.node_id
              AND (l.provider IS NULL OR p.provider = l.provider)
              AND (p.gateway_id IS NOT NULL OR p.last_heartbeat_at > $3))
       AND NOT EXISTS (
           SELECT FROM node_capabilities own
            WHERE own.workspace_id = i.workspace_id AND own.node_id = l.node_id
              AND (l.provider IS NULL OR own.provider = l.provider)
              AND own.name = i.capability AND own.kind = 'action'
              AND (own.name = '{SPAWN}' OR starts_with(own.name, '{SPAWN_PREFIX}')))
       AND EXISTS (
           SELECT FROM node_capabilities c
             JOIN providers p USING (workspace_id, node_id, provider)
            WHERE c.workspace_id = i.workspace_id AND c.name = i.capability AND c.node_id <> l.node_id
              AND (c.kind = 'capacity' OR NOT i.only_capacity) AND p.gateway_id IS NOT NULL AND p.handlers_live)
     ORDER BY i.workspace_id, i.invocation_id LIMIT $2
       FOR UPDATE OF i SKIP LOCKED
)
UPDATE invocations i
   SET status = 'pending', target_node_id = NULL, target_provider = NULL, reserves = false, sent_epoch = NULL,
       sent_at = NULL, due_at = $1, unreachable_since = coalesce(i.unreachable_since, $1),
       tried = CASE WHEN expired.node_id <> ALL (i.tried) THEN i.tried || expired.node_id ELSE i.tried END
  FROM expired
 WHERE i.workspace_id = expired.workspace_id AND i.invocation_id = expired.invocation_id"
);

// One row per workspace, so that a long queue in one workspace does not delay the others.
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

/// Queued invocation whose next attempt is due.
#[derive(sqlx::FromRow)]
struct DueInvocation {
    invocation_id: InvocationId,
    capability: String,
    target_node_id: Option<NodeId>,
    target_provider: Option<ProviderName>,
    only_capacity: bool,
    attempt: i32,
    tried: Vec<NodeId>,
    placements: Json<Vec<PlacementRecord>>,
}

impl Store {
    /// Returns invocations to the queue if their provider is lost, or did not answer in time and another provider may
    /// take them; those of a node whose liveness expired are due at once, for any node. Releases their reservations.
    /// Returns the number of reclaimed invocations, at most twice `limit`.
    pub async fn reclaim_lost_invocations(&self, limit: i64, at: DateTime<Utc>) -> StoreResult<u64> {
        let doing = "reclaiming invocations";
        // Each statement is a transaction of its own and changes nothing when it is repeated: if this process stops in
        // between, the next step continues.
        sqlx::query(MARK_UNREACHABLE)
            .bind(at)
            .bind(limit)
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        self.mark_unreachable_handlers(limit, at).await?;
        sqlx::query(RESET_STRAY)
            .bind(at - NODE_TTL)
            .bind(limit)
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        // Before RECLAIM, which would let the untargeted invocations of an expired node wait for their back-off.
        let moved = sqlx::query(MOVE_EXPIRED)
            .bind(at)
            .bind(limit)
            .bind(at - NODE_TTL)
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let first = actions::retry_backoff(1);
        let longest = actions::retry_backoff(i32::MAX);
        let reclaimed = sqlx::query(RECLAIM)
            .bind(at)
            .bind(limit)
            .bind(first.as_secs_f64())
            .bind(longest.as_secs_f64())
            .bind(at - actions::PROVIDER_LOST_GRACE)
            .execute(&self.pool)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        Ok(moved.rows_affected() + reclaimed.rows_affected())
    }

    /// Sets `unreachable_since` on invocations of agents that lost their connection, and clears it for agents that have
    /// one again.
    async fn mark_unreachable_handlers(&self, limit: i64, at: DateTime<Utc>) -> StoreResult<()> {
        let query = format!(
            "WITH changed AS MATERIALIZED (
                 SELECT i.workspace_id, i.invocation_id
                   FROM invocations i
                  WHERE i.status = 'invoked' AND i.sent_epoch IS NOT NULL
                    AND (i.unreachable_since IS NULL) = {HANDLER_UNREACHABLE}
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
            .map_err(StoreError::from_sqlx("marking unreachable handlers"))?;
        Ok(())
    }

    /// Returns the workspaces with due invocations, the longest waiting first.
    pub async fn workspaces_with_due_invocations(&self, at: DateTime<Utc>) -> StoreResult<Vec<WorkspaceScope>> {
        let rows: Vec<WorkspaceId> = sqlx::query_scalar(DUE_WORKSPACES)
            .bind(at)
            .bind(WORKSPACES_PER_SCAN)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading workspaces with due invocations"))?;
        Ok(rows.into_iter().map(WorkspaceScope::from_engine_row).collect())
    }

    /// Places a workspace's due invocations again, at most `limit`, the longest waiting first.
    pub async fn redispatch(
        &self,
        scope: WorkspaceScope,
        limit: i64,
        entropy: u64,
        at: DateTime<Utc>,
    ) -> StoreResult<RedispatchBatch> {
        let doing = "redispatching invocations";
        // A single workspace is waited for, so none is busy.
        let (mut tx, _) = self.begin_placing(std::iter::once(scope), doing).await?;
        let due = sqlx::query(DUE)
            .bind(scope.workspace_id())
            .bind(at)
            .bind(limit)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let due: Vec<DueInvocation> = decode_rows("invocations", &due)?;
        if due.is_empty() {
            return Ok(RedispatchBatch::default());
        }
        let wanted = due.iter().map(|row| (scope, row.capability.as_str(), row.target_node_id.as_ref()));
        let mut candidates = Candidates::read(&mut tx, wanted).await?;
        let mut done = RedispatchBatch { examined: due.len(), sent: Vec::new() };
        for (nth, row) in due.into_iter().enumerate() {
            if let Some(sent) = redispatch_one(&mut tx, scope, row, &mut candidates, (entropy, nth), at).await? {
                done.sent.push(sent);
            }
        }
        // After an unknown outcome the gateways find placed invocations by their scan, and the next step finds the
        // others.
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(done)
    }

    /// Returns an invocation to the queue because its provider cannot handle it, and marks the provider's handlers as
    /// not live. Returns `false` if the invocation is not assigned to this provider, an agent handles it, or it has
    /// reached the maximum number of attempts.
    pub async fn return_invocation(
        &self,
        fence: &Fence,
        invocation: InvocationId,
        at: DateTime<Utc>,
    ) -> StoreResult<bool> {
        // One statement: the invocation must not be due again while the provider that cannot handle it is still
        // eligible.
        let returned = sqlx::query(
            "WITH returned AS (
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
                    AND EXISTS (SELECT FROM returned)
             )
             SELECT workspace_id FROM returned",
        )
        .bind(fence.scope.workspace_id())
        .bind(&fence.node_id)
        .bind(&fence.provider)
        .bind(fence.epoch)
        .bind(invocation)
        .bind(at)
        .bind(actions::retry_backoff(1).as_secs_f64())
        .bind(actions::retry_backoff(i32::MAX).as_secs_f64())
        .bind(actions::MAX_HAND_BACKS)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("returning an invocation"))?;
        Ok(returned.is_some())
    }

    /// Deletes up to `limit` invocations that were completed more than `age` ago. Returns the number of deleted ones.
    pub async fn prune_invocations(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        // SKIP LOCKED: workers that prune at the same time take different rows.
        let done = sqlx::query(
            "DELETE FROM invocations i
              USING (SELECT workspace_id, invocation_id FROM invocations
                      WHERE completed_at < relay_now() - make_interval(secs => $1)
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

/// Places one invocation again. Without an eligible provider it stays in the queue with a longer delay.
async fn redispatch_one(
    tx: &mut DatabaseSession,
    scope: WorkspaceScope,
    row: DueInvocation,
    candidates: &mut Candidates,
    (entropy, nth): (u64, usize),
    at: DateTime<Utc>,
) -> StoreResult<Option<RedispatchedInvocation>> {
    let doing = "redispatching an invocation";
    let attempt = row.attempt + 1;
    let wanted = PlacementQuery {
        scope,
        capability: &row.capability,
        target: row.target_node_id.as_ref(),
        provider: row.target_provider.as_ref(),
        only_capacity: row.only_capacity,
        avoided: &row.tried,
        attempt,
        // Multiples of the golden ratio, because the invocations of one pass must not all break their ties alike.
        entropy: entropy.wrapping_add(u64::try_from(nth).unwrap_or(0).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
    };
    let placed = candidates.place(&wanted, at);
    let Json(mut placements) = row.placements;
    // A failed placement keeps the attempt number, so its decision replaces the previous one.
    if placements.last().is_some_and(|last| last.attempt == attempt) {
        placements.pop();
    }
    placements.push(placed.record);
    if placements.len() > KEPT_PLACEMENTS {
        placements.drain(..placements.len() - KEPT_PLACEMENTS);
    }
    let chosen = placed.chosen;
    let pause = if chosen.is_some() { actions::DISPATCH_TIMEOUT } else { actions::retry_backoff(row.attempt) };
    sqlx::query(
        "UPDATE invocations
            SET status = CASE WHEN $3::text IS NULL THEN 'pending' ELSE 'dispatched' END,
                attempt = CASE WHEN $3::text IS NULL THEN attempt ELSE $5 END,
                node_id = coalesce($3, node_id), provider = coalesce($4, provider),
                dispatched_at = CASE WHEN $3::text IS NULL THEN dispatched_at ELSE $6 END,
                accepted_at = CASE WHEN $3::text IS NULL THEN accepted_at END,
                agent_id = CASE WHEN $3::text IS NULL OR (node_id, provider) = ($3, $4) THEN agent_id END,
                reserves = $7, tells_caller = $8, due_at = $9, placements = $10,
                unreachable_since = coalesce(unreachable_since, $6)
          WHERE workspace_id = $1 AND invocation_id = $2 AND status = 'pending'",
    )
    .bind(scope.workspace_id())
    .bind(row.invocation_id)
    .bind(chosen.as_ref().map(|provider| &provider.node_id))
    .bind(chosen.as_ref().map(|provider| &provider.provider))
    .bind(attempt)
    .bind(at)
    .bind(chosen.as_ref().is_some_and(|provider| provider.occupies_slot()))
    .bind(chosen.as_ref().is_some_and(|provider| provider.tells_caller))
    .bind(at + pause)
    .bind(Json(placements))
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    Ok(chosen.map(|chosen| RedispatchedInvocation {
        scope,
        invocation_id: row.invocation_id,
        dispatch: Dispatch {
            node_id: chosen.node_id,
            provider: chosen.provider,
            gateway_id: chosen.gateway_id,
            attempt,
            tells_caller: chosen.tells_caller,
            agent: None,
        },
    }))
}

/// Handles the registration of a provider: clears the loss mark of its invocations, and makes queued invocations due
/// that it may take. Spawn invocations that started an agent there stay queued: the provider's inventory tells whether
/// the agent still runs. `SKIP LOCKED` leaves out rows that a redispatch is placing already.
pub(crate) async fn wake_waiting(tx: &mut DatabaseSession, key: ProviderKey<'_>) -> StoreResult<()> {
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
         ), reconnected AS (
             UPDATE invocations i SET unreachable_since = NULL
              WHERE i.workspace_id = $1 AND i.node_id = $2 AND i.provider = $3 AND i.status = 'dispatched'
                AND i.unreachable_since IS NOT NULL
         )
         UPDATE invocations i SET due_at = least(i.due_at, relay_now())
           FROM waiting w WHERE i.workspace_id = w.workspace_id AND i.invocation_id = w.invocation_id",
    )
    .bind(key.scope.workspace_id())
    .bind(key.node)
    .bind(key.provider)
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("waking the queue of a provider"))?;
    Ok(())
}
