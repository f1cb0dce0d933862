//! Spawned agents: their link to the invocation, and the comparison of a provider's inventory with its open spawns.
//! Main type: [`InventoryReconciliation`]; called by registrations of spawned agents and by [`crate::nodes::hosting`].

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{AgentId, InvocationId, actions};
use relay_wire::{agents::spawn::SpawnOutput, field::ToValue as _};
use serde_json::Value;

use crate::{Store, StoreError, StoreResult, connections::DatabaseSession, nodes::fence::Fence};

/// Agent that an inventory lists as the result of an invocation.
#[derive(Debug, Clone)]
pub struct SpawnedAgent {
    pub invocation: InvocationId,
    pub agent_id: AgentId,
    pub name: String,
    /// Handle for resuming its session.
    pub session_ref: Option<String>,
}

impl SpawnedAgent {
    /// Creates the output of the invocation, for a provider that reports none of its own.
    fn output(&self) -> Value {
        let (agent_id, invocation_id) = (self.agent_id, self.invocation);
        SpawnOutput { agent_id, name: &self.name, invocation_id, session_ref: self.session_ref.as_deref() }.to_value()
    }
}

/// Number of spawns by the effect that an inventory has on them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InventoryReconciliation {
    /// Still open at this provider.
    pub open: i64,
    /// Their agents are listed.
    pub completed: i64,
    /// Their agents are missing, so they are dispatched again.
    pub rescheduled: i64,
}

/// Part of a statement that records the calling agent of an invocation as the spawner of its agent. `$from` has the
/// invocations and their agents; `$1` is the workspace.
///
/// It is written once, and only for an agent that is younger than the invocation: a spawn under the name of an older
/// agent gives no power over it. A spawn that an action asked for with `node.spawn` belongs to the caller of that
/// action, which is still open on the same node and names the same agent.
macro_rules! record_spawner {
    ($from:literal) => {
        concat!(
            "spawners AS (
                UPDATE agents a
                   SET spawned_by = coalesce(i.caller_id, (
                       SELECT o.caller_id FROM invocations o
                        WHERE o.workspace_id = $1 AND o.node_id = i.node_id AND o.status = 'dispatched'
                          AND o.capability = i.capability AND o.invocation_id < i.invocation_id
                          AND o.caller_id IS NOT NULL AND o.input ->> 'name' = a.name
                        ORDER BY o.invocation_id DESC LIMIT 1))
                  FROM ",
            $from,
            " AS started
                  JOIN invocations i ON i.workspace_id = $1 AND i.invocation_id = started.invocation_id
                 WHERE a.workspace_id = $1 AND a.agent_id = started.agent_id AND a.spawned_by IS NULL
                   AND a.created_at >= i.created_at
             )"
        )
    };
}

impl Store {
    /// Links an agent that registered on a provider to its invocation, which ends the reservation of capacity. Returns
    /// `false` when the invocation is not open at this provider.
    pub async fn link_spawned_agent(
        &self,
        fence: &Fence,
        invocation: InvocationId,
        agent: AgentId,
    ) -> StoreResult<bool> {
        // A pending invocation counts too: it may have been rescheduled while the provider was unavailable.
        let linked: bool = sqlx::query_scalar(concat!(
            // The agent first, as inventories lock it.
            "WITH agent AS MATERIALIZED (
                SELECT agent_id FROM agents WHERE workspace_id = $1 AND agent_id = $5 FOR NO KEY UPDATE
             ), linked AS (
                UPDATE invocations i SET agent_id = agent.agent_id, reserves = false
                  FROM agent
                 WHERE i.workspace_id = $1 AND i.invocation_id = $4 AND i.status IN ('dispatched', 'pending')
                   AND i.node_id = $2 AND i.provider = $3
                RETURNING i.invocation_id, i.agent_id
             ), ",
            record_spawner!("linked"),
            " SELECT EXISTS (SELECT FROM linked)"
        ))
        .bind(fence.scope.workspace_id())
        .bind(&fence.node_id)
        .bind(&fence.provider)
        .bind(invocation)
        .bind(agent)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("linking an agent to its invocation"))?;
        Ok(linked)
    }
}

/// Compares a provider's inventory with its open spawns. The caller has locked the provider's row, so that no other
/// connection takes the provider over meanwhile. Invocations may still be dispatched to it, because placement reads
/// providers without a lock.
pub(crate) async fn reconcile_spawns(
    tx: &mut DatabaseSession,
    fence: &Fence,
    spawned: &[SpawnedAgent],
    at: DateTime<Utc>,
) -> StoreResult<InventoryReconciliation> {
    let doing = "comparing an inventory with invocations";
    let (completed, rescheduled, open): (i64, i64, i64) = sqlx::query_as(concat!(
        // A spawn that was rescheduled while the provider was unavailable, and is still pending, belongs to the
        // provider again when it lists the agent. A spawn that was sent recently may not be in the inventory yet, so it
        // is not missing.
        "WITH open AS MATERIALIZED (
             SELECT invocation_id, capability, sent_at, accepted_at FROM invocations
              WHERE workspace_id = $1 AND node_id = $2 AND provider = $3
                AND invocation_id = ANY ($4::bigint[] || ARRAY(
                    SELECT invocation_id FROM invocations
                     WHERE workspace_id = $1 AND node_id = $2 AND provider = $3 AND status = 'dispatched'))
                AND status IN ('dispatched', 'pending')
              ORDER BY invocation_id FOR UPDATE
         ), listed AS (
             UPDATE invocations i
                SET agent_id = l.agent_id, came_up = l.output::json, came_up_at = coalesce(i.came_up_at, $7),
                    reserves = false, unreachable_since = NULL
               FROM unnest($4::bigint[], $5::bigint[], $6::text[]) AS l (invocation_id, agent_id, output)
               JOIN open USING (invocation_id)
              WHERE i.workspace_id = $1 AND i.invocation_id = l.invocation_id
          RETURNING i.invocation_id, i.agent_id
         ), ",
        record_spawner!("listed"),
        ", missing AS (
             UPDATE invocations i
                SET status = 'pending', reserves = false, sent_epoch = NULL, sent_at = NULL, due_at = $7,
                    agent_id = NULL, came_up = NULL, came_up_at = NULL,
                    tried = CASE WHEN i.target_node_id IS NULL AND i.node_id <> ALL (i.tried)
                                 THEN i.tried || i.node_id ELSE i.tried END,
                    unreachable_since = coalesce(i.unreachable_since, $7)
               FROM open
              WHERE i.workspace_id = $1 AND i.invocation_id = open.invocation_id AND i.invocation_id <> ALL ($4)
                AND starts_with(open.capability, $8) AND open.sent_at < $9 AND open.accepted_at IS NULL
          RETURNING i.invocation_id
         )
         SELECT (SELECT count(*) FROM listed), (SELECT count(*) FROM missing),
                (SELECT count(*) FROM open) - (SELECT count(*) FROM missing)"
    ))
    .bind(fence.scope.workspace_id())
    .bind(&fence.node_id)
    .bind(&fence.provider)
    .bind(spawned.iter().map(|agent| agent.invocation).collect::<Vec<_>>())
    .bind(spawned.iter().map(|agent| agent.agent_id).collect::<Vec<_>>())
    .bind(spawned.iter().map(|agent| agent.output().to_string()).collect::<Vec<_>>())
    .bind(at)
    .bind(actions::SPAWN_PREFIX)
    // The conversion of 30 s does not fail.
    .bind(at - TimeDelta::from_std(actions::DISPATCH_TIMEOUT).unwrap_or(TimeDelta::MAX))
    .fetch_one(tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    // The count of open invocations includes the listed ones, which count as completed.
    Ok(InventoryReconciliation { open: open - completed, completed, rescheduled })
}
