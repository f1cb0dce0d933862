//! Keeping out: workspaces are suspended, nodes drained. Gateways hear of it within a second.

use relay_domain::WorkspaceScope;

use super::Admin;
use crate::{EngineError, EngineResult};

impl Admin {
    /// Suspends a workspace, or lets it go on. Tells whether that changed anything.
    ///
    /// # Errors
    /// When it is deleted, or storage is away.
    pub async fn suspend(&self, scope: WorkspaceScope, suspended: bool) -> EngineResult<bool> {
        self.store.set_suspended(scope, suspended).await?.ok_or(EngineError::WorkspaceNotFound)
    }

    /// Drains a node by id or name: nothing new is placed there from now on, and its sockets are closed after
    /// `grace_seconds`. With `None` it may come back. Returns its id.
    ///
    /// # Errors
    /// When there is no such node, or storage is away.
    pub async fn drain_node(
        &self,
        scope: WorkspaceScope,
        node: &str,
        grace_seconds: Option<i32>,
    ) -> EngineResult<String> {
        let drained = self.store.set_drained(scope, node, grace_seconds).await?;
        drained.ok_or_else(|| EngineError::NodeNotFound(node.to_owned()))
    }

    /// How much a node still does: processes that are connected, and invocations that it was given.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn work_of_node(&self, scope: WorkspaceScope, node: &str) -> EngineResult<(i64, i64)> {
        Ok(self.store.work_of_node(scope, node).await?)
    }
}
