//! Comparison of an agent's location with a node that a client names. Called by the engine for addresses such as
//! `agent@node`.

use relay_domain::{AgentId, NodeId, WorkspaceScope};

use crate::{Store, StoreError, StoreResult};

/// Location of an agent, compared with a node name or machine id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgentLocation {
    /// `true` if the agent is on its own direct node.
    pub is_direct: bool,
    /// `true` if the agent is on a node of that name, or on that machine.
    pub matches: bool,
    /// `true` if the text is the name of one node and the machine id of others.
    pub is_ambiguous: bool,
}

impl Store {
    /// Compares the location of an agent with a node name or machine id. `None` when there is no agent of that name.
    pub async fn agent_location(
        &self,
        scope: WorkspaceScope,
        name: &str,
        machine: &str,
    ) -> StoreResult<Option<AgentLocation>> {
        let row: Option<(AgentId, NodeId, bool, bool)> = sqlx::query_as(
            // An agent without an enrolled node has no row in `nodes` and matches nothing.
            "SELECT a.agent_id, a.node_id, coalesce(n.name = $3 OR n.machine_id = $3, false),
                    EXISTS (SELECT FROM nodes WHERE workspace_id = $1 AND name = $3)
                    AND EXISTS (SELECT FROM nodes WHERE workspace_id = $1 AND machine_id = $3 AND name <> $3)
               FROM agents a LEFT JOIN nodes n ON n.workspace_id = a.workspace_id AND n.node_id = a.node_id
              WHERE a.workspace_id = $1 AND a.name = $2 AND a.deleted_at IS NULL",
        )
        .bind(scope.workspace_id())
        .bind(name)
        .bind(machine)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the location of an agent"))?;
        Ok(row.map(|(agent, node, matches, is_ambiguous)| AgentLocation {
            is_direct: node == NodeId::direct(agent),
            matches,
            is_ambiguous,
        }))
    }
}
