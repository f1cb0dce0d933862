//! Agents that come up by an invocation, and what a provider's inventory says of those.

use chrono::{DateTime, TimeDelta, Utc};
use relay_domain::{AgentId, InvocationId, action};
use serde_json::{Value, json};
use sqlx::PgConnection;

use crate::{Store, StoreError, StoreResult, hosting::Fence};

/// An agent that an inventory lists as brought up by an invocation.
#[derive(Debug, Clone)]
pub struct CameUp {
    /// The invocation.
    pub invocation: InvocationId,
    /// The agent.
    pub agent_id: AgentId,
    /// Its name.
    pub name: String,
    /// Handle for resuming its session.
    pub session_ref: Option<String>,
}

impl CameUp {
    /// What the invocation brought, unless its provider says it in its own words.
    fn output(&self) -> Value {
        json!({
            "agent_id": self.agent_id, "name": self.name, "invocation_id": self.invocation,
            "session_ref": self.session_ref,
        })
    }
}

/// What an inventory meant for invocations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reconciled {
    /// Still open at this provider.
    pub open: i64,
    /// Whose agent it lists.
    pub completed: i64,
    /// Whose agent it should list and does not: they go elsewhere.
    pub rescheduled: i64,
}

impl Store {
    /// An agent registered on a provider for an invocation of its: the place that was kept for it is taken now.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn agent_came_up(&self, fence: &Fence, invocation: InvocationId, agent: AgentId) -> StoreResult<bool> {
        let linked = sqlx::query(
            "UPDATE invocations SET agent_id = $5, reserves = false
              WHERE workspace_id = $1 AND invocation_id = $4 AND status IN ('dispatched', 'pending')
                AND node_id = $2 AND provider = $3",
        )
        .bind(fence.scope.workspace_id().get())
        .bind(fence.node_id.as_str())
        .bind(fence.provider.as_str())
        .bind(invocation.get())
        .bind(agent.get())
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("linking an agent with its invocation"))?;
        Ok(linked.rows_affected() == 1)
    }
}

/// Compares a provider's inventory with what it was told to bring up. The provider row is locked.
pub(crate) async fn reconcile(
    tx: &mut PgConnection,
    fence: &Fence,
    came_up: &[CameUp],
    at: DateTime<Utc>,
) -> StoreResult<Reconciled> {
    let doing = "comparing an inventory with invocations";
    let (completed, rescheduled, open): (i64, i64, i64) = sqlx::query_as(
        // What was taken back while the provider was away and went nowhere since is its own again once it lists the agent.
        "WITH here AS MATERIALIZED (
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
               JOIN here USING (invocation_id)
              WHERE i.workspace_id = $1 AND i.invocation_id = l.invocation_id
          RETURNING i.invocation_id
         ), missing AS (
             UPDATE invocations i
                SET status = 'pending', reserves = false, sent_epoch = NULL, sent_at = NULL, due_at = $7,
                    agent_id = NULL, came_up = NULL, came_up_at = NULL,
                    tried = CASE WHEN i.target_node_id IS NULL AND i.node_id <> ALL (i.tried)
                                 THEN i.tried || i.node_id ELSE i.tried END,
                    unreachable_since = coalesce(i.unreachable_since, $7)
               FROM here
              WHERE i.workspace_id = $1 AND i.invocation_id = here.invocation_id AND i.invocation_id <> ALL ($4)
                AND starts_with(here.capability, $8) AND here.sent_at < $9 AND here.accepted_at IS NULL
          RETURNING i.invocation_id
         )
         SELECT (SELECT count(*) FROM listed), (SELECT count(*) FROM missing),
                (SELECT count(*) FROM here) - (SELECT count(*) FROM missing)",
    )
    .bind(fence.scope.workspace_id().get())
    .bind(fence.node_id.as_str())
    .bind(fence.provider.as_str())
    .bind(came_up.iter().map(|up| up.invocation.get()).collect::<Vec<_>>())
    .bind(came_up.iter().map(|up| up.agent_id.get()).collect::<Vec<_>>())
    .bind(came_up.iter().map(|up| up.output().to_string()).collect::<Vec<_>>())
    .bind(at)
    .bind(action::SPAWN_PREFIX)
    .bind(at - TimeDelta::from_std(action::DISPATCH_TIMEOUT).unwrap_or_default())
    .fetch_one(tx)
    .await
    .map_err(StoreError::from_sqlx(doing))?;
    Ok(Reconciled { open: open - completed, completed, rescheduled })
}
