//! Bindings over REST: moving agents between nodes.

use std::{sync::Arc, time::Duration};

use relay_domain::{
    NodeId, WorkspaceScope,
    agents::binding::Binding,
    names::{MAX_NOTE_BYTES, check_length},
    nodes::{MAX_LISTED_BINDINGS, Node, NodeKind},
};
use relay_store::{BindOutcome, NewBinding, UnboundAgent};
use relay_tasks::spawn_isolated;
use relay_wire::nodes::BindAgentBody;

use super::Agents;
use crate::{
    EngineError, EngineResult,
    access::callers::{AgentCaller, Credential},
    error::{Conflict, Missing},
};

/// The response of a bind tells the broker where the mailbox stands, and the broker must know that before the first
/// frame. So the gateways learn of the move this long after the response was made.
const ANNOUNCE_DELAY: Duration = Duration::from_millis(50);

/// Binding with the node that the agent is bound to.
#[derive(Debug, Clone)]
pub struct NodeBinding {
    pub binding: Binding,
    pub node: Node,
}

impl Agents {
    /// Lists the agents located on a node, by name.
    ///
    /// # Errors
    /// When there is no such node for this caller.
    pub async fn bindings(&self, caller: &Credential, node: &str) -> EngineResult<Vec<NodeBinding>> {
        let scope = caller.scope();
        let node = self.core.stored_node(scope, node).await?;
        let shown = caller.view().filters.agent_ids.as_deref();
        let bindings = self.core.store.bindings(scope, &node.node_id, shown, MAX_LISTED_BINDINGS).await?;
        // As for a missing node: the observer may see none of its agents.
        if shown.is_some() && bindings.is_empty() {
            return Err(EngineError::NotFound(Missing::Node(node.name)));
        }
        Ok(bindings.into_iter().map(|binding| NodeBinding { binding, node: node.clone() }).collect())
    }

    /// Moves an agent to a node. Replay there begins after the response.
    ///
    /// # Errors
    /// When there is no such node or agent, or the node is full.
    pub async fn bind(&self, scope: WorkspaceScope, node: &str, request: &BindAgentBody) -> EngineResult<NodeBinding> {
        check_length("session_ref", request.session_ref.as_deref().unwrap_or_default(), MAX_NOTE_BYTES)?;
        let node = self.core.stored_node(scope, node).await?;
        let node_id = node.node_id.clone();
        let binding_id = format!("anb_{}", self.core.next_id());
        let new = NewBinding {
            node: &node_id,
            agent_name: &request.agent_name,
            binding_id: &binding_id,
            session_ref: request.session_ref.as_deref(),
            priority: request.priority,
        };
        match self.core.store.bind_agent(scope, new, self.core.now()).await? {
            BindOutcome::NoAgent => Err(EngineError::NotFound(Missing::Agent(request.agent_name.clone()))),
            BindOutcome::NoNode => Err(EngineError::NotFound(Missing::Node(node.name))),
            BindOutcome::Full { max_agents } => {
                Err(EngineError::Conflict(Conflict::NodeCapacity { node: node.name, max_agents }))
            }
            BindOutcome::Bound { agent, from, recorded } => {
                self.core.announce(recorded);
                if node.kind == NodeKind::HttpPush {
                    // Workers would find the mailbox at their next poll, an eighth of a second later on average.
                    self.core.hints.deliveries_due(&[(scope, agent)]);
                }
                // Both ends: gateways of the old node stop serving the agent, those of the new one begin.
                let mut nodes = vec![from];
                if !nodes.contains(&node_id) {
                    nodes.push(node_id.clone());
                }
                self.announce_move(scope, nodes);
                let binding = self.core.store.bindings(scope, &node_id, Some(&[agent]), 1).await?.into_iter().next();
                // Another request may have moved the agent meanwhile.
                let binding = binding.ok_or_else(|| {
                    EngineError::NotFound(Missing::NodeAgentBinding {
                        agent: request.agent_name.clone(),
                        node: node.name.clone(),
                    })
                })?;
                Ok(NodeBinding { binding, node })
            }
        }
    }

    /// Moves an agent back to its own node.
    ///
    /// # Errors
    /// When there is no such node, or the agent is not bound to it.
    pub async fn unbind(&self, scope: WorkspaceScope, node: &str, agent_name: &str) -> EngineResult<()> {
        let node = self.core.stored_node(scope, node).await?;
        let id = node.node_id;
        let Some(unbound) = self.core.store.unbind_agent(scope, &id, agent_name, self.core.now()).await? else {
            return Err(EngineError::NotFound(Missing::NodeAgentBinding {
                agent: agent_name.to_owned(),
                node: node.name,
            }));
        };
        self.announce_unbound(scope, unbound);
        Ok(())
    }

    /// Moves the calling agent back to its own node, wherever it is bound, and frees its place there.
    pub async fn unbind_self(&self, caller: &AgentCaller) -> EngineResult<()> {
        let (scope, agent) = (caller.scope, caller.agent_id);
        if let Some(unbound) = self.core.store.unbind_from_any_node(scope, agent, self.core.now()).await? {
            self.announce_unbound(scope, unbound);
        }
        Ok(())
    }

    fn announce_unbound(&self, scope: WorkspaceScope, unbound: UnboundAgent) {
        self.core.announce(unbound.recorded);
        self.announce_move(scope, vec![unbound.node, NodeId::direct(unbound.agent)]);
    }

    fn announce_move(&self, scope: WorkspaceScope, nodes: Vec<NodeId>) {
        let hints = Arc::clone(&self.core.hints);
        spawn_isolated("request", async move {
            tokio::time::sleep(ANNOUNCE_DELAY).await;
            hints.agents_moved(scope, nodes);
        });
    }
}
