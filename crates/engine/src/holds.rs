//! Who is kept out: suspended workspaces and drained nodes, as every process knows them within a second.

use std::{
    collections::HashSet,
    sync::{Arc, PoisonError, RwLock, Weak},
    time::Duration,
};

use relay_domain::{NodeId, WorkspaceId, WorkspaceScope};
use tokio::sync::watch;

use crate::{Engine, EngineError, EngineResult, Inner};

/// How old what is known may be. Reading it is two looks into indexes that are nearly always empty.
const READ_EVERY: Duration = Duration::from_secs(1);

/// What is known.
#[derive(Debug, Default, PartialEq, Eq)]
struct Known {
    suspended: HashSet<WorkspaceId>,
    drained: HashSet<(WorkspaceScope, NodeId)>,
}

/// Who is kept out.
#[derive(Debug)]
pub(crate) struct Holds {
    known: RwLock<Arc<Known>>,
    changes: watch::Sender<u64>,
}

impl Default for Holds {
    fn default() -> Self {
        Self { known: RwLock::default(), changes: watch::Sender::new(0) }
    }
}

impl Holds {
    fn known(&self) -> Arc<Known> {
        Arc::clone(&self.known.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn is_suspended(&self, workspace: WorkspaceId) -> bool {
        self.known().suspended.contains(&workspace)
    }
}

impl Engine {
    /// Refuses callers of a suspended workspace.
    ///
    /// # Errors
    /// [`EngineError::WorkspaceSuspended`].
    pub(crate) fn refuse_suspended(&self, scope: WorkspaceScope) -> EngineResult<()> {
        if self.inner.holds.is_suspended(scope.workspace_id()) { Err(EngineError::WorkspaceSuspended) } else { Ok(()) }
    }

    /// Whether the sockets of a node are to be closed and none opened.
    #[must_use]
    pub fn is_held(&self, scope: WorkspaceScope, node: &NodeId) -> bool {
        let known = self.inner.holds.known();
        known.suspended.contains(&scope.workspace_id())
            || !known.drained.is_empty() && known.drained.contains(&(scope, node.clone()))
    }

    /// Changes whenever somebody else is kept out than before: a good moment for [`Engine::is_held`].
    #[must_use]
    pub fn holds_changed(&self) -> watch::Receiver<u64> {
        self.inner.holds.changes.subscribe()
    }
}

/// Reads who is kept out.
pub(crate) async fn refresh(inner: &Inner) -> EngineResult<()> {
    let rows = inner.store.holds().await?;
    let fresh = Known { suspended: rows.suspended.into_iter().collect(), drained: rows.drained.into_iter().collect() };
    if *inner.holds.known() != fresh {
        *inner.holds.known.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(fresh);
        inner.holds.changes.send_modify(|changes| *changes += 1);
        inner.observers.recheck();
    }
    Ok(())
}

/// Goes on reading it until the engine is gone. With Postgres away, what is known counts.
pub(crate) async fn run(engine: Weak<Inner>) {
    loop {
        tokio::time::sleep(READ_EVERY).await;
        let Some(inner) = engine.upgrade() else { return };
        if let Err(error) = refresh(&inner).await {
            tracing::debug!(error = &error as &dyn std::error::Error, "who is kept out could not be read");
        }
    }
}
