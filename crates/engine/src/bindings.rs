//! Bindings made by REST: moving agents between nodes.

use std::time::Duration;

use relay_domain::{
    NodeId, WorkspaceScope,
    names::{MAX_NOTE_BYTES, check_length},
    node::MAX_LISTED_BINDINGS,
};
pub use relay_store::BindingRow;
use relay_store::{BindOutcome, NodeRow};

use crate::{Engine, EngineError, EngineResult, auth::Credential};

/// A REST bind tells its caller where the mailbox stands, and the broker must know it before the first
/// frame. So the gateways hear of the move this long after the answer was made.
const ANSWER_FIRST: Duration = Duration::from_millis(50);

/// A request to bind an agent to a node.
#[derive(Debug)]
pub struct BindAgent {
    /// The agent.
    pub agent_name: String,
    /// What the broker resumes the agent's session by.
    pub session_ref: Option<String>,
    /// Kept, not used.
    pub priority: Option<i32>,
}

/// An agent located on a node.
#[derive(Debug, Clone)]
pub struct Binding {
    /// The agent and its mailbox.
    pub row: BindingRow,
    /// The node.
    pub node: NodeRow,
}

impl Binding {
    /// Its id. An agent on its own node has a binding that nobody made, with an id that follows from it.
    #[must_use]
    pub fn id(&self) -> String {
        self.row.binding_id.clone().unwrap_or_else(|| format!("anb_direct_{}", self.row.agent_id))
    }
}

impl Engine {
    /// The agents located on a node, by name.
    ///
    /// # Errors
    /// When there is no such node.
    pub async fn bindings(&self, caller: &Credential, node: &str) -> EngineResult<Vec<Binding>> {
        let scope = caller.scope();
        let node = self.node_row(scope, node).await?;
        let id = NodeId::new(node.node_id.clone());
        let shown = caller.view().filters.agent_ids.as_deref();
        let rows = self.store().bindings(scope, &id, shown, MAX_LISTED_BINDINGS).await?;
        Ok(rows.into_iter().map(|row| Binding { row, node: node.clone() }).collect())
    }

    /// Moves an agent to a node. Replay there begins after this has been answered.
    ///
    /// # Errors
    /// When there is no such node or agent, or the node is full.
    pub async fn bind_agent(&self, scope: WorkspaceScope, node: &str, request: &BindAgent) -> EngineResult<Binding> {
        check_length("session_ref", request.session_ref.as_deref().unwrap_or_default(), MAX_NOTE_BYTES)?;
        let node = self.node_row(scope, node).await?;
        let node_id = NodeId::new(node.node_id.clone());
        let binding_id = format!("anb_{}", self.next_id());
        let outcome = self
            .store()
            .bind_agent(
                scope,
                &node_id,
                &request.agent_name,
                &binding_id,
                request.session_ref.as_deref(),
                request.priority,
            )
            .await?;
        match outcome {
            BindOutcome::NoAgent => Err(EngineError::AgentNotFound(request.agent_name.clone())),
            BindOutcome::Full { max_agents } => Err(EngineError::NodeCapacityExceeded { node: node.name, max_agents }),
            BindOutcome::Bound { agent, from } => {
                let mut nodes = vec![from];
                if !nodes.contains(&node_id) {
                    nodes.push(node_id.clone());
                }
                self.announce_move(scope, nodes);
                let row = self.store().bindings(scope, &node_id, Some(&[agent]), 1).await?.into_iter().next();
                // Moved on by somebody else in this very moment.
                let row = row.ok_or_else(|| EngineError::NodeAgentBindingNotFound {
                    agent: request.agent_name.clone(),
                    node: node.name.clone(),
                })?;
                Ok(Binding { row, node })
            }
        }
    }

    /// Lets an agent fall back to its own node.
    ///
    /// # Errors
    /// When there is no such node, or the agent is not bound to it.
    pub async fn unbind_agent(&self, scope: WorkspaceScope, node: &str, agent_name: &str) -> EngineResult<()> {
        let node = self.node_row(scope, node).await?;
        let id = NodeId::new(node.node_id);
        let Some(agent) = self.store().unbind_agent(scope, &id, agent_name).await? else {
            return Err(EngineError::NodeAgentBindingNotFound { agent: agent_name.to_owned(), node: node.name });
        };
        self.announce_move(scope, vec![id, NodeId::direct(agent)]);
        Ok(())
    }

    fn announce_move(&self, scope: WorkspaceScope, nodes: Vec<NodeId>) {
        let engine = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(ANSWER_FIRST).await;
            engine.hints().agents_moved(scope, nodes);
        });
    }
}
