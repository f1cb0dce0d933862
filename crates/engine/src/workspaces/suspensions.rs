//! Suspended workspaces and drained nodes, as cached by every process for up to a second.

use std::{
    collections::HashSet,
    sync::{Arc, PoisonError, RwLock, Weak},
    time::Duration,
};

use relay_domain::{NodeId, WorkspaceId, WorkspaceScope};
use tokio::sync::watch;

use crate::{EngineError, EngineResult, Inner, due_work::WorkKind};

/// Interval of refreshes, which read two indexes that are nearly always empty. Suspensions have no hint, and hold
/// within a second.
const READ_EVERY: Duration = Duration::from_millis(500);

#[derive(Debug, Default, PartialEq, Eq)]
struct SuspendedSet {
    suspended: HashSet<WorkspaceId>,
    drained: HashSet<(WorkspaceScope, NodeId)>,
}

/// Cache of suspended workspaces and drained nodes.
#[derive(Debug)]
pub struct Suspensions {
    current: RwLock<Arc<SuspendedSet>>,
    changes: watch::Sender<u64>,
}

impl Default for Suspensions {
    fn default() -> Self {
        Self { current: RwLock::default(), changes: watch::Sender::new(0) }
    }
}

impl Suspensions {
    fn current(&self) -> Arc<SuspendedSet> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn is_suspended(&self, workspace: WorkspaceId) -> bool {
        self.current().suspended.contains(&workspace)
    }

    /// Refuses callers of a suspended workspace.
    ///
    /// # Errors
    /// [`EngineError::WorkspaceSuspended`].
    pub(crate) fn check_not_suspended(&self, scope: WorkspaceScope) -> EngineResult<()> {
        if self.is_suspended(scope.workspace_id()) { Err(EngineError::WorkspaceSuspended) } else { Ok(()) }
    }

    /// True if the sockets of a node must close and none may open.
    #[must_use]
    pub fn is_suspended_or_drained(&self, scope: WorkspaceScope, node: &NodeId) -> bool {
        let current = self.current();
        current.suspended.contains(&scope.workspace_id())
            // No node is drained most of the time: the key is then not built.
            || !current.drained.is_empty() && current.drained.contains(&(scope, node.clone()))
    }

    /// Changes whenever the set of suspended workspaces or drained nodes changes.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}

/// Refreshes the cache.
pub(crate) async fn refresh(inner: &Inner) -> EngineResult<()> {
    let rows = inner.core.store.suspensions().await?;
    let fresh =
        SuspendedSet { suspended: rows.suspended.into_iter().collect(), drained: rows.drained.into_iter().collect() };
    if *inner.suspensions.current() != fresh {
        // The set before the signal, whose receivers read it at once.
        *inner.suspensions.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(fresh);
        inner.suspensions.changes.send_modify(|changes| *changes += 1);
        inner.observers.cache.notify_access_change();
    }
    Ok(())
}

/// Refreshes the cache until the engine is dropped. While Postgres is unavailable, the last state counts.
pub(crate) async fn run(engine: Weak<Inner>) {
    let due = engine.upgrade().map(|inner| inner.due_work.watch(WorkKind::Suspensions, READ_EVERY));
    let Some(mut due) = due else { return };
    loop {
        tokio::time::sleep(READ_EVERY).await;
        // An empty list stays empty until there is a row. The last suspension ends without one.
        let is_empty = engine.upgrade().is_some_and(|inner| *inner.suspensions.current() == SuspendedSet::default());
        if is_empty && !due.wait().await {
            return;
        }
        let Some(inner) = engine.upgrade() else { return };
        if let Err(error) = refresh(&inner).await {
            tracing::debug!(error = &error as &dyn std::error::Error, "failed to refresh suspensions, will retry");
        }
    }
}
