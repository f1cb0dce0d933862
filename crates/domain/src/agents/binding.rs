//! Bindings of agents to nodes.

use chrono::{DateTime, Utc};

use crate::{AgentId, ProviderName, mailboxes::stream::Seq};

/// Binding of an agent to the node that it is located on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// Id of an explicit binding; `None` for an agent on its own direct node. [`Self::id`] always has one.
    pub binding_id: Option<String>,
    /// Id of the bound agent.
    pub agent_id: AgentId,
    /// Name of the bound agent.
    pub agent_name: String,
    /// Provider of the node that runs the agent; `None` while it is unassigned.
    pub provider: Option<ProviderName>,
    /// Handle with which the broker resumes the agent's session.
    pub session_ref: Option<String>,
    /// Stored for clients; the engine does not use it.
    pub priority: i32,
    /// Time of binding, or of registration.
    pub bound_at: DateTime<Utc>,
    /// Time of the last move.
    pub rebound_at: Option<DateTime<Utc>>,
    /// Settled floor of the agent's mailbox.
    pub settled_floor: Seq,
    /// `true` if the endpoint of the node answered that it no longer exists, which ends http_push for this agent.
    pub is_disabled: bool,
}

impl Binding {
    /// Returns the id of the binding. The implicit binding to a direct node has an id derived from the agent's.
    #[must_use]
    pub fn id(&self) -> String {
        self.binding_id.clone().unwrap_or_else(|| format!("anb_direct_{}", self.agent_id.get()))
    }
}
