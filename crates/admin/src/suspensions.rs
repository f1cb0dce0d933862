//! Suspension of workspaces and draining of nodes. Gateways notice within a second.

use relay_domain::{NodeId, WorkspaceScope};
use relay_store::workspaces::suspensions::NodeWorkload;

use super::Admin;
use relay_engine::{EngineError, EngineResult, error::Missing};

impl Admin {
    /// Suspends or resumes a workspace. Returns true if that changed its state.
    ///
    /// # Errors
    /// When it is deleted.
    pub async fn suspend(&self, scope: WorkspaceScope, suspended: bool) -> EngineResult<bool> {
        self.store.set_suspended(scope, suspended).await?.ok_or(EngineError::NotFound(Missing::Workspace))
    }

    /// Drains a node by id or name: it gets no new placements, and its sockets close after `grace_seconds`. `None` ends
    /// the drain. Returns the node's id.
    ///
    /// # Errors
    /// When there is no such node.
    pub async fn drain_node(
        &self,
        scope: WorkspaceScope,
        node: &str,
        grace_seconds: Option<i32>,
    ) -> EngineResult<NodeId> {
        let drained = self.store.set_drained(scope, node, grace_seconds).await?;
        drained.ok_or_else(|| EngineError::NotFound(Missing::Node(node.to_owned())))
    }

    /// Returns the work of a node that a drain waits for.
    pub async fn node_workload(&self, scope: WorkspaceScope, node: &NodeId) -> EngineResult<NodeWorkload> {
        Ok(self.store.node_workload(scope, node).await?)
    }
}
