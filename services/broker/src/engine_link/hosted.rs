//! The agents of this node, as reported to the engine.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, RwLock},
};

use relay_wire::nodes::frame::InventoryEntry;
use tokio::sync::Notify;

use crate::mailbox::SharedMailbox;

/// Agent whose process runs, starts or is restarted.
#[derive(Debug, Clone)]
pub(crate) struct HostedAgent {
    pub(crate) agent_id: String,
    pub(crate) token: String,
    pub(crate) invocation_id: Option<String>,
    pub(crate) session_ref: Option<String>,
    pub(crate) mailbox: Arc<SharedMailbox>,
}

/// Hosted agents by name.
#[derive(Debug, Default)]
pub(super) struct HostedAgents {
    // Never held over an await: readers get clones.
    agents: RwLock<BTreeMap<String, HostedAgent>>,
    /// Notified when the engine has to hear of a change.
    pub(super) changed: Notify,
}

impl HostedAgents {
    pub(super) fn insert(&self, name: &str, agent: HostedAgent) {
        self.agents.write().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), agent);
    }

    /// Removes an agent, unless it was registered again under another id meanwhile.
    pub(super) fn remove(&self, name: &str, agent_id: &str) -> bool {
        let mut agents = self.agents.write().unwrap_or_else(PoisonError::into_inner);
        let is_same = agents.get(name).is_some_and(|agent| agent.agent_id == agent_id);
        is_same && agents.remove(name).is_some()
    }

    pub(super) fn mailbox(&self, name: &str) -> Option<Arc<SharedMailbox>> {
        let agents = self.agents.read().unwrap_or_else(PoisonError::into_inner);
        agents.get(name).map(|agent| agent.mailbox.clone())
    }

    pub(super) fn mailboxes(&self) -> Vec<(String, Arc<SharedMailbox>)> {
        let agents = self.agents.read().unwrap_or_else(PoisonError::into_inner);
        agents.iter().map(|(name, agent)| (name.clone(), agent.mailbox.clone())).collect()
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.agents.read().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }

    pub(super) fn inventory(&self) -> Vec<InventoryEntry> {
        let agents = self.agents.read().unwrap_or_else(PoisonError::into_inner);
        let entry = |(name, agent): (&String, &HostedAgent)| InventoryEntry {
            agent_id: agent.agent_id.clone(),
            name: name.clone(),
            invocation_id: agent.invocation_id.clone(),
            session_ref: agent.session_ref.clone(),
        };
        agents.iter().map(entry).collect()
    }
}
