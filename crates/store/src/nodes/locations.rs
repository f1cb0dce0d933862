//! Gateways that serve agents now, for notices that concern no other process.

use relay_domain::{AgentId, GatewayId, WorkspaceId, WorkspaceScope, nodes::NodeKind};
use sqlx::FromRow;

use crate::{Store, StoreError, StoreResult, mailboxes::cursors::split_keys};

/// Node of an agent, and a gateway that may serve the agent there.
#[derive(Debug, Clone)]
pub struct AgentLocation {
    pub scope: WorkspaceScope,
    pub agent_id: AgentId,
    pub kind: NodeKind,
    /// `None` if no provider of the agent is connected.
    pub gateway_id: Option<GatewayId>,
}

#[derive(FromRow)]
struct LocationRow {
    workspace_id: WorkspaceId,
    agent_id: AgentId,
    kind: NodeKind,
    gateway_id: Option<GatewayId>,
}

impl Store {
    /// Returns the locations of these agents. An agent that is not assigned to a provider has one for each gateway
    /// that its node is connected to.
    pub async fn gateways_of_agents(&self, agents: &[(WorkspaceScope, AgentId)]) -> StoreResult<Vec<AgentLocation>> {
        let (workspaces, ids) = split_keys(agents);
        // An implicit direct node has no row and no connection, so its agent has no location.
        let rows: Vec<LocationRow> = sqlx::query_as(
            "SELECT DISTINCT a.workspace_id, a.agent_id, n.kind, p.gateway_id
               FROM unnest($1::bigint[], $2::bigint[]) AS k (workspace_id, agent_id)
               JOIN agents a USING (workspace_id, agent_id)
               JOIN nodes n ON n.workspace_id = a.workspace_id AND n.node_id = a.node_id
               LEFT JOIN providers p ON p.workspace_id = a.workspace_id AND p.node_id = a.node_id
                                    AND p.gateway_id IS NOT NULL AND (a.provider IS NULL OR a.provider = p.provider)",
        )
        .bind(workspaces)
        .bind(ids)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the locations of agents"))?;
        let location = |row: LocationRow| AgentLocation {
            scope: WorkspaceScope::from_engine_row(row.workspace_id),
            agent_id: row.agent_id,
            kind: row.kind,
            gateway_id: row.gateway_id,
        };
        Ok(rows.into_iter().map(location).collect())
    }
}
