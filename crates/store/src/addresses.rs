//! Where an agent is, for those who name a place beside it.

use relay_domain::{AgentId, NodeId, WorkspaceScope};
use sqlx::Row as _;

use crate::{Store, StoreError, StoreResult};

/// An agent's place, compared with one that was named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Whereabouts {
    /// On its own direct node.
    pub direct: bool,
    /// On a node of that name, or on that machine.
    pub there: bool,
    /// The word names one node, and the machine of others.
    pub ambiguous: bool,
}

impl Store {
    /// Where a living agent of that name is, seen from a node name or machine id. `None` when there is none.
    ///
    /// # Errors
    /// When Postgres does not answer.
    pub async fn whereabouts(
        &self,
        scope: WorkspaceScope,
        name: &str,
        machine: &str,
    ) -> StoreResult<Option<Whereabouts>> {
        let row = sqlx::query(
            "SELECT a.agent_id, a.node_id, coalesce(n.name = $3 OR n.machine_id = $3, false),
                    EXISTS (SELECT FROM nodes WHERE workspace_id = $1 AND name = $3)
                    AND EXISTS (SELECT FROM nodes WHERE workspace_id = $1 AND machine_id = $3 AND name <> $3)
               FROM agents a LEFT JOIN nodes n ON n.workspace_id = a.workspace_id AND n.node_id = a.node_id
              WHERE a.workspace_id = $1 AND a.name = $2 AND a.deleted_at IS NULL",
        )
        .bind(scope.workspace_id().get())
        .bind(name)
        .bind(machine)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("finding out where an agent is"))?;
        Ok(row.map(|row| Whereabouts {
            direct: row.get::<String, _>(1) == NodeId::direct(AgentId::new(row.get(0))).as_str(),
            there: row.get(2),
            ambiguous: row.get(3),
        }))
    }
}
