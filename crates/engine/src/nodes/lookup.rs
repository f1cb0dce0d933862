//! Lookups of nodes that other nouns need too.

use relay_domain::{WorkspaceScope, names::strip_hash, nodes::Node};

use crate::{EngineError, EngineResult, core::Core, error::Missing};

impl Core {
    /// Finds a node by name or id.
    pub(crate) async fn stored_node(&self, scope: WorkspaceScope, name_or_id: &str) -> EngineResult<Node> {
        let wanted = strip_hash(name_or_id);
        self.store.node(scope, wanted).await?.ok_or_else(|| EngineError::NotFound(Missing::Node(wanted.to_owned())))
    }
}
