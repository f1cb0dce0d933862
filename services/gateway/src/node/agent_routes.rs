//! Routing table of this gateway: the connection that serves each agent.
//!
//! Used by `connection` and `hosting`, which register agents here, and by `registry` and `notices`, which look them
//! up.

use std::sync::{Arc, atomic::AtomicI64};

use relay_domain::{AgentId, NodeId, WorkspaceScope, metric_names};
use relay_engine::mailboxes::serving::Fence;

use super::{
    notices::MissedWindow,
    registry::{AgentRoute, Handle, Registry},
};

impl Registry {
    /// Routes an agent to this connection, unless a newer epoch of the same provider already serves it. `next` is
    /// shared with the connection, which keeps it at the next seq to send.
    pub(super) fn route_agent(&self, handle: &Handle, fence: &Fence, agent: AgentId, next: &Arc<AtomicI64>) {
        let served = AgentRoute {
            handle: handle.clone(),
            node_id: fence.node_id.clone(),
            provider: fence.provider.clone(),
            next: Arc::clone(next),
            // The agent may have been disconnected until now.
            missed: Some(MissedWindow::starting_now()),
        };
        let mut maps = self.maps();
        let other = maps.agents.get(&(fence.scope, agent)).and_then(|served| maps.peers.get(&served.handle.id));
        let superseded = other.and_then(|peer| peer.fence.as_ref()).is_some_and(|other| {
            other.node_id == fence.node_id && other.provider == fence.provider && other.epoch > fence.epoch
        });
        // A late read of the older connection must not take the route from the newer one, which would get no copies.
        if superseded {
            return;
        }
        if fence.node_id == NodeId::direct(agent) {
            maps.direct.entry(fence.scope).or_default().agents.insert(agent);
        }
        if maps.agents.insert((fence.scope, agent), served).is_none() {
            metrics::gauge!(metric_names::CONNECTED_AGENTS).increment(1);
        }
        drop(maps);
        // A delivery may have been committed since the read of the agent's position, and its copy have found no route.
        self.compare_later([(fence.scope, agent)]);
    }

    /// Returns the connection that serves an agent, and its node.
    pub(super) fn find_route(&self, scope: WorkspaceScope, agent: AgentId) -> Option<(u64, NodeId)> {
        self.maps().agents.get(&(scope, agent)).map(|served| (served.handle.id, served.node_id.clone()))
    }

    /// Removes the route of an agent. A route that another connection has set meanwhile stays.
    pub(super) fn unroute_agent(&self, handle: &Handle, scope: WorkspaceScope, agent: AgentId) {
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
    use relay_domain::{ProviderName, WorkspaceId, access::token::TokenHash};

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
            let (handle, _inbox) = registry.add_peer(scope, &node_id, TokenHash::from_token("nt_live_x"));
            registry.bind_peer(&handle, &fence);
            (handle, fence)
        };
        let ((older, old_fence), (newer, new_fence)) = (enter(1), enter(2));
        registry.route_agent(&newer, &new_fence, agent, &next);
        registry.route_agent(&older, &old_fence, agent, &next);
        assert_eq!(registry.find_route(scope, agent).map(|(id, _)| id), Some(newer.id));
        registry.unroute_agent(&older, scope, agent);
        assert_eq!(registry.find_route(scope, agent).map(|(id, _)| id), Some(newer.id));
        registry.unroute_agent(&newer, scope, agent);
        assert_eq!(registry.find_route(scope, agent), None);
        registry.route_agent(&older, &old_fence, agent, &next);
        registry.route_agent(&newer, &new_fence, agent, &next);
        assert_eq!(registry.find_route(scope, agent).map(|(id, _)| id), Some(newer.id));
    }
}
