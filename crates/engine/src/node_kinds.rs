//! Which nodes have no socket: their agents' deliveries are due for somebody else than a gateway.

use std::{collections::HashSet, time::Duration};

use moka::sync::Cache;
use relay_domain::{
    AgentId, NodeId, WorkspaceScope,
    node::{DIRECT_ID_PREFIX, NodeKind},
};

use crate::Engine;

/// Nodes that are remembered, and for how long. A node's kind never changes.
const REMEMBERED: u64 = 100_000;
const REMEMBERED_FOR: Duration = Duration::from_secs(300);

/// The kinds of nodes.
pub(crate) type NodeKinds = Cache<(WorkspaceScope, NodeId), NodeKind>;

/// An empty memory.
pub(crate) fn node_kinds() -> NodeKinds {
    Cache::builder().max_capacity(REMEMBERED).time_to_live(REMEMBERED_FOR).build()
}

impl Engine {
    /// Hints at deliveries that were written and that no socket takes. Nodes that are not known here are looked up first; a hint that is
    /// late or lost is made up for by the sweep.
    pub(crate) fn hint_at_due<'a>(&self, written: impl Iterator<Item = (WorkspaceScope, AgentId, &'a NodeId)>) {
        let (mut due, mut unknown) = (Vec::new(), Vec::new());
        for (scope, agent, node) in written {
            // Most agents are on a node of their own, which has a socket.
            if node.as_str().starts_with(DIRECT_ID_PREFIX) {
                continue;
            }
            match self.inner.node_kinds.get(&(scope, node.clone())) {
                Some(NodeKind::Ws) => {}
                Some(_) => due.push((scope, agent)),
                None => unknown.push((scope, agent, node.clone())),
            }
        }
        if !due.is_empty() {
            self.hints().deliveries_due(&due);
        }
        if !unknown.is_empty() {
            tokio::spawn(self.clone().hint_at_unknown(unknown));
        }
    }

    async fn hint_at_unknown(self, unknown: Vec<(WorkspaceScope, AgentId, NodeId)>) {
        let nodes: HashSet<(WorkspaceScope, NodeId)> = unknown.iter().map(|(s, _, node)| (*s, node.clone())).collect();
        let nodes: Vec<(WorkspaceScope, NodeId)> = nodes.into_iter().collect();
        match self.store().node_kinds(&nodes).await {
            Ok(kinds) => kinds.into_iter().for_each(|(scope, node, kind)| {
                self.inner.node_kinds.insert((scope, node), kind);
            }),
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "the kinds of nodes were not read");
                return;
            }
        }
        let is_due =
            |scope, node: NodeId| self.inner.node_kinds.get(&(scope, node)).is_some_and(|kind| kind != NodeKind::Ws);
        let due: Vec<_> = unknown
            .into_iter()
            .filter(|(s, _, node)| is_due(*s, node.clone()))
            .map(|(s, agent, _)| (s, agent))
            .collect();
        if !due.is_empty() {
            self.hints().deliveries_due(&due);
        }
    }
}
