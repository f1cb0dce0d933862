//! Deletion of nodes. Main type: [`DeletedNode`]; called by the engine's roster use cases.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, NodeId, WorkspaceScope,
    access::token::TokenHash,
    agents::AgentStatus,
    events::kind,
    nodes::{NodeKind, NodeRole},
};
use relay_wire::{events::recorded_data::NodeEnrolled, field::ToValue as _};

use crate::{
    Store, StoreError, StoreResult,
    agents::sessions,
    connections::DatabaseSession,
    events::{self, Event, RecordedEvents, status_event},
    nodes::presence::Broker,
};

/// Deleted node, with all that depended on it.
#[derive(Debug)]
pub struct DeletedNode {
    /// Revoked token of the node.
    pub token: Option<TokenHash>,
    /// Agents that were located on it, and are located on their own nodes now.
    pub agents: Vec<AgentId>,
    pub recorded: RecordedEvents,
}

/// Row of the node itself.
#[derive(sqlx::FromRow)]
struct NodeRow {
    name: String,
    kind: NodeKind,
    role: NodeRole,
}

/// Agent that was located on the node.
#[derive(sqlx::FromRow)]
struct LeftAgent {
    agent_id: AgentId,
    name: String,
    status: AgentStatus,
    /// `true` if it ran on the node.
    was_hosted: bool,
}

// Agents are locked in id order. An agent of a direct node keeps its location, which is implicit.
const RETURN_AGENTS: &str = "
WITH located AS MATERIALIZED (
    SELECT agent_id, name, status, coalesce(hosted_on = $2, false) AS was_hosted FROM agents
     WHERE workspace_id = $1 AND node_id = $2 AND deleted_at IS NULL
     ORDER BY agent_id FOR UPDATE
), returned AS (
    UPDATE agents a
       SET node_id = 'node_direct_' || a.agent_id, provider = NULL, binding_id = NULL, bound_at = NULL,
           rebound_at = NULL, session_ref = NULL, resumable = NULL, hosted_on = NULL, priority = 0,
           status = 'offline', last_seen_at = greatest(a.last_seen_at, $3)
      FROM located l WHERE a.workspace_id = $1 AND a.agent_id = l.agent_id
)
SELECT agent_id, name, status, was_hosted FROM located ORDER BY agent_id";

// What was addressed to this node can never be served: the worker's next pass fails it. The rest goes back to the
// queue. A spawn whose agent was already listed there is completed by the worker.
const RELEASE_INVOCATIONS: &str = "
WITH unfinished AS MATERIALIZED (
    SELECT invocation_id FROM invocations
     WHERE workspace_id = $1 AND completed_at IS NULL AND came_up IS NULL AND status IN ('dispatched', 'pending')
       AND (target_node_id = $2 OR node_id = $2 AND status = 'dispatched')
     ORDER BY invocation_id FOR UPDATE
)
UPDATE invocations i
   SET status = 'pending', reserves = false, sent_epoch = NULL, sent_at = NULL, accepted_at = NULL, due_at = $3,
       tried = CASE WHEN i.target_node_id IS NULL AND i.node_id <> ALL (i.tried) THEN i.tried || i.node_id
                    ELSE i.tried END,
       unreachable_since = CASE WHEN i.target_node_id = $2 THEN '-infinity'
                                ELSE coalesce(i.unreachable_since, $3) END
  FROM unfinished u
 WHERE i.workspace_id = $1 AND i.invocation_id = u.invocation_id";

impl Store {
    /// Deletes a node with its providers, capabilities, definitions of actions and token. Its agents go offline and
    /// return to their own nodes. Returns `None` when there is no such node.
    pub async fn delete_node(
        &self,
        scope: WorkspaceScope,
        node: &NodeId,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<DeletedNode>> {
        let doing = "deleting a node";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // First, because it locks the node: registrations of its providers and bindings to it wait, and find no node.
        let deleted: Option<NodeRow> =
            sqlx::query_as("DELETE FROM nodes WHERE workspace_id = $1 AND node_id = $2 RETURNING name, kind, role")
                .bind(scope.workspace_id())
                .bind(node)
                .fetch_optional(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
        let Some(deleted) = deleted else { return Ok(None) };
        // Without their rows, the connections of the node fail on their epochs.
        let was_connected: bool = sqlx::query_scalar(
            "WITH removed AS (DELETE FROM providers WHERE workspace_id = $1 AND node_id = $2 RETURNING gateway_id)
             SELECT EXISTS (SELECT FROM removed WHERE gateway_id IS NOT NULL)",
        )
        .bind(scope.workspace_id())
        .bind(node)
        .fetch_one(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let left: Vec<LeftAgent> = sqlx::query_as(RETURN_AGENTS)
            .bind(scope.workspace_id())
            .bind(node)
            .bind(at)
            .fetch_all(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        delete_definitions(&mut tx, scope, node).await?;
        sqlx::query(RELEASE_INVOCATIONS)
            .bind(scope.workspace_id())
            .bind(node)
            .bind(at)
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let token: Option<TokenHash> = sqlx::query_scalar(
            "DELETE FROM tokens WHERE workspace_id = $1 AND node_id = $2 AND kind = 'node' RETURNING token_hash",
        )
        .bind(scope.workspace_id())
        .bind(node)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let mut events = deletion_events(scope, node, &deleted, was_connected, &left);
        let ended: Vec<AgentId> = left.iter().filter(|agent| agent.was_hosted).map(|agent| agent.agent_id).collect();
        events.extend(sessions::exit_events(&mut tx, scope, node, &ended, "node_deleted").await?);
        let recorded = events::append(&mut tx, scope, at, events).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        let agents = left.into_iter().map(|agent| agent.agent_id).collect();
        Ok(Some(DeletedNode { token, agents, recorded }))
    }
}

/// Deletes the capabilities of a node's providers, and the actions that they or REST defined for it.
async fn delete_definitions(tx: &mut DatabaseSession, scope: WorkspaceScope, node: &NodeId) -> StoreResult<()> {
    for statement in [
        "DELETE FROM node_capabilities WHERE workspace_id = $1 AND node_id = $2",
        "DELETE FROM actions WHERE workspace_id = $1 AND handler_node_id = $2",
    ] {
        sqlx::query(statement)
            .bind(scope.workspace_id())
            .bind(node)
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx("deleting the actions of a node"))?;
    }
    Ok(())
}

fn deletion_events(
    scope: WorkspaceScope,
    node: &NodeId,
    deleted: &NodeRow,
    was_connected: bool,
    left: &[LeftAgent],
) -> Vec<Event> {
    let were_online = left.iter().filter(|agent| agent.status != AgentStatus::Offline);
    let mut events: Vec<Event> =
        were_online.map(|agent| status_event(agent.agent_id, &agent.name, AgentStatus::Offline)).collect();
    if was_connected && deleted.role == NodeRole::Broker {
        let broker = Broker { scope, node_id: node.clone(), name: deleted.name.clone() };
        events.push(broker.offline_event("deleted"));
    }
    let data = NodeEnrolled {
        node_id: node.as_str(),
        node_name: &deleted.name,
        kind: deleted.kind.as_str(),
        role: deleted.role.as_str(),
    };
    events.push(Event::new(kind::NODE_DELETED, data.to_value()));
    events
}
