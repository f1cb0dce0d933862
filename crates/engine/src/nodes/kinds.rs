//! Kinds of nodes: agents on nodes without a socket get their deliveries from other consumers than a gateway.

use std::{collections::HashSet, time::Duration};

use moka::sync::Cache;
use relay_domain::{
    AgentId, NodeId, WorkspaceScope,
    nodes::{DIRECT_ID_PREFIX, NodeKind},
};
use relay_tasks::spawn_isolated;

use crate::core::Core;

/// Bounds of the cache. A node's kind never changes.
const MAX_KINDS: u64 = 100_000;
const KIND_TTL: Duration = Duration::from_secs(300);

/// Node kinds, cached. Cheap to clone.
#[derive(Clone)]
pub(crate) struct NodeKinds {
    core: Core,
    cache: Cache<(WorkspaceScope, NodeId), NodeKind>,
}

impl NodeKinds {
    pub(crate) fn new(core: Core) -> Self {
        Self { core, cache: Cache::builder().max_capacity(MAX_KINDS).time_to_live(KIND_TTL).build() }
    }

    /// Hints that deliveries were written for nodes without a socket. Unknown nodes are looked up first; the sweep
    /// makes up for a late or lost hint.
    pub(crate) fn hint_due_deliveries<'a>(&self, written: impl Iterator<Item = (WorkspaceScope, AgentId, &'a NodeId)>) {
        let (mut due, mut unknown) = (Vec::new(), Vec::new());
        for (scope, agent, node) in written {
            // Most agents are on their own node, which has a socket.
            if node.as_str().starts_with(DIRECT_ID_PREFIX) {
                continue;
            }
            match self.cache.get(&(scope, node.clone())) {
                Some(kind) if kind.has_socket() => {}
                Some(_) => due.push((scope, agent)),
                None => unknown.push((scope, agent, node.clone())),
            }
        }
        if !due.is_empty() {
            self.core.hints.deliveries_due(&due);
        }
        if !unknown.is_empty() {
            // Not awaited: the committer calls this between two batches, and must not wait for a read.
            spawn_isolated("request", self.clone().hint_after_lookup(unknown));
        }
    }

    async fn hint_after_lookup(self, unknown: Vec<(WorkspaceScope, AgentId, NodeId)>) {
        let nodes: HashSet<(WorkspaceScope, NodeId)> = unknown.iter().map(|(s, _, node)| (*s, node.clone())).collect();
        let nodes: Vec<(WorkspaceScope, NodeId)> = nodes.into_iter().collect();
        match self.core.store.node_kinds(&nodes).await {
            Ok(kinds) => kinds.into_iter().for_each(|(scope, node, kind)| {
                self.cache.insert((scope, node), kind);
            }),
            Err(error) => {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "failed to read node kinds, the sweep will find the deliveries"
                );
                return;
            }
        }
        // A node that was deleted meanwhile has no kind, and needs no hint.
        let is_due = |scope, node: NodeId| self.cache.get(&(scope, node)).is_some_and(|kind| !kind.has_socket());
        let due: Vec<_> = unknown
            .into_iter()
            .filter(|(s, _, node)| is_due(*s, node.clone()))
            .map(|(s, agent, _)| (s, agent))
            .collect();
        if !due.is_empty() {
            self.core.hints.deliveries_due(&due);
        }
    }
}
