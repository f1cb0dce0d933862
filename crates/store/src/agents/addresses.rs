//! Comparison of agents' locations with nodes that a client names. Called by the engine for addresses such as
//! `agent@node`.

use relay_domain::WorkspaceScope;

use crate::{Store, StoreError, StoreResult};

/// Agent of the name in an address, with its location compared to the machine in it.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct AddressedAgent {
    pub name: String,
    pub machine: String,
    /// `true` if the agent is on its own direct node.
    pub is_direct: bool,
    /// `true` if the agent is on a node of that name, or on that machine.
    pub matches: bool,
    /// `true` if the machine is the name of one node and the machine id of others.
    pub is_ambiguous: bool,
}

impl Store {
    /// Compares the locations of the agents that exist among these pairs of a name and a machine.
    pub async fn addressed_agents(
        &self,
        scope: WorkspaceScope,
        pairs: &[(&str, &str)],
    ) -> StoreResult<Vec<AddressedAgent>> {
        let (names, machines): (Vec<&str>, Vec<&str>) = pairs.iter().copied().unzip();
        sqlx::query_as(
            // An agent without an enrolled node has no row in `nodes`.
            "SELECT k.name, k.machine, d.is_direct,
                    coalesce(n.name = k.machine OR n.machine_id = k.machine, false)
                    OR coalesce(d.is_direct AND n.machine_id IS NULL AND a.direct_machine_id = k.machine, false)
                       AS matches,
                    EXISTS (SELECT FROM nodes WHERE workspace_id = $1 AND name = k.machine)
                    AND EXISTS (SELECT FROM nodes WHERE workspace_id = $1 AND machine_id = k.machine
                                                    AND name <> k.machine) AS is_ambiguous
               FROM unnest($2::text[], $3::text[]) AS k (name, machine)
               JOIN agents a ON a.workspace_id = $1 AND a.name = k.name AND a.deleted_at IS NULL
               CROSS JOIN LATERAL (SELECT a.node_id = 'node_direct_' || a.agent_id AS is_direct) AS d
               LEFT JOIN nodes n ON n.workspace_id = a.workspace_id AND n.node_id = a.node_id",
        )
        .bind(scope.workspace_id())
        .bind(names)
        .bind(machines)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading the locations of addressed agents"))
    }
}
