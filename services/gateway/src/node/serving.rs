//! Which connection serves an agent, as the rest of this gateway knows it.

use std::sync::{Arc, atomic::AtomicI64};

use relay_domain::{AgentId, NodeId, WorkspaceScope, metric_names};
use relay_engine::mailbox::Fence;

use super::{
    notice::Missed,
    registry::{Handle, Registry, ServedBy},
};

impl Registry {
    /// The connection serves an agent now, unless a newer one of the same provider does. It keeps the session's progress
    /// in `next`.
    pub(super) fn serve(&self, handle: &Handle, fence: &Fence, agent: AgentId, next: &Arc<AtomicI64>) {
        let served = ServedBy {
            handle: handle.clone(),
            node_id: fence.node_id.clone(),
            provider: fence.provider.clone(),
            next: Arc::clone(next),
            // It may have been away until now.
            missed: Some(Missed::now()),
        };
        let mut maps = self.maps();
        let other = maps.agents.get(&(fence.scope, agent)).and_then(|served| maps.peers.get(&served.handle.id));
        let superseded = other.and_then(|peer| peer.fence.as_ref()).is_some_and(|other| {
            other.node_id == fence.node_id && other.provider == fence.provider && other.epoch > fence.epoch
        });
        if superseded {
            return;
        }
        if fence.node_id == NodeId::direct(agent) {
            maps.direct.entry(fence.scope).or_default().agents.insert(agent);
        }
        if maps.agents.insert((fence.scope, agent), served).is_none() {
            metrics::gauge!(metric_names::CONNECTED_AGENTS).increment(1);
        }
    }

    /// The connection that serves an agent, and its node.
    pub(super) fn served_by(&self, scope: WorkspaceScope, agent: AgentId) -> Option<(u64, NodeId)> {
        self.maps().agents.get(&(scope, agent)).map(|served| (served.handle.id, served.node_id.clone()))
    }

    /// The connection no longer serves an agent. Another one that does keeps its place.
    pub(super) fn unserve(&self, handle: &Handle, scope: WorkspaceScope, agent: AgentId) {
        let mut maps = self.maps();
        if maps.agents.get(&(scope, agent)).is_some_and(|served| served.handle.id == handle.id) {
            maps.agents.remove(&(scope, agent));
            if let Some(direct) = maps.direct.get_mut(&scope) {
                direct.agents.remove(&agent);
                if direct.agents.is_empty() {
                    maps.direct.remove(&scope);
                }
            }
            metrics::gauge!(metric_names::CONNECTED_AGENTS).decrement(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::{ProviderName, WorkspaceId};

    use super::*;

    #[test]
    fn an_agent_belongs_to_the_newest_connection_of_its_provider() {
        let registry = Registry::default();
        let (scope, agent) = (WorkspaceScope::from_engine_row(WorkspaceId::new(1)), AgentId::new(7));
        let node_id = NodeId::direct(agent);
        let next = Arc::default();
        let enter = |epoch| {
            let provider = ProviderName::default_provider();
            let fence = Fence { scope, node_id: node_id.clone(), provider, epoch };
            let (handle, _inbox) = registry.enter(scope, &node_id);
            registry.bind(&handle, &fence);
            (handle, fence)
        };
        let ((older, old_fence), (newer, new_fence)) = (enter(1), enter(2));
        registry.serve(&newer, &new_fence, agent, &next);
        registry.serve(&older, &old_fence, agent, &next);
        assert_eq!(registry.served_by(scope, agent).map(|(id, _)| id), Some(newer.id));
        registry.unserve(&older, scope, agent);
        assert_eq!(registry.served_by(scope, agent).map(|(id, _)| id), Some(newer.id));
        registry.unserve(&newer, scope, agent);
        assert_eq!(registry.served_by(scope, agent), None);
        registry.serve(&older, &old_fence, agent, &next);
        registry.serve(&newer, &new_fence, agent, &next);
        assert_eq!(registry.served_by(scope, agent).map(|(id, _)| id), Some(newer.id));
    }
}
