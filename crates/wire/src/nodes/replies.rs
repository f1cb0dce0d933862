//! Answers to the frames of a node. Main types: [`NodeRegistered`], [`InventorySynced`] and [`RegisteredAgent`].

use relay_domain::JsonText;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Node, frame::Provider};
use crate::field::Timestamp;

/// Name of the rules of registration: one accepted or refused entry for each capability.
const REGISTRATION_CONTRACT: &str = "relay:node-registration-v1";

/// `data` of the reply to `node.register`: the roster entry without the fields that published clients do not expect,
/// and what the registration adds.
#[derive(Debug, Serialize)]
pub struct NodeRegistered<'a> {
    id: String,
    name: String,
    kind: &'static str,
    role: &'static str,
    machine_id: Option<String>,
    delivery_adapter: String,
    delivery: Option<Value>,
    capabilities: Vec<JsonText>,
    tags: Vec<String>,
    version: String,
    status: &'static str,
    live: bool,
    handlers_live: bool,
    load: f64,
    active_agents: i64,
    last_heartbeat_at: Option<Timestamp>,
    max_agents: i32,
    created_at: Timestamp,
    provider: Provider,
    accepted_capabilities: Vec<AcceptedCapability<'a>>,
    /// Rules of registration that the engine follows (docs/protocol/node.md, "node.register").
    registration_contract: &'static str,
}

/// Capability as the engine understood it.
#[derive(Debug, Serialize)]
pub struct AcceptedCapability<'a> {
    /// Name of the capability.
    pub name: &'a str,
    /// `action` or `capacity`.
    pub kind: &'static str,
    /// Always `true`.
    pub accepted: bool,
}

impl<'a> NodeRegistered<'a> {
    /// Combines the roster entry with the provider that registered and its capabilities.
    #[must_use]
    pub fn new(node: Node, provider: Provider, accepted_capabilities: Vec<AcceptedCapability<'a>>) -> Self {
        Self {
            id: node.id,
            name: node.name,
            kind: node.kind,
            role: node.role,
            machine_id: node.machine_id,
            delivery_adapter: node.delivery_adapter,
            delivery: node.delivery,
            capabilities: node.capabilities,
            tags: node.tags,
            version: node.version,
            status: node.status,
            live: node.live,
            handlers_live: node.handlers_live,
            load: node.load,
            active_agents: node.active_agents,
            last_heartbeat_at: node.last_heartbeat_at,
            max_agents: node.max_agents,
            created_at: node.created_at,
            provider,
            accepted_capabilities,
            registration_contract: REGISTRATION_CONTRACT,
        }
    }

    /// Shows capabilities and tags of one provider in place of those of the node.
    pub fn narrow_to_provider(&mut self, capabilities: Vec<JsonText>, tags: Vec<String>) {
        (self.capabilities, self.tags) = (capabilities, tags);
    }
}

/// `data` of the reply to `inventory.sync`.
#[derive(Debug, Serialize)]
pub struct InventorySynced {
    /// Number of agents that the inventory bound or brought online.
    pub rebound_agents: usize,
    /// Number of entries that conflict with another location, and were skipped.
    pub rejected_agents: usize,
    /// The first of them, with their reasons.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rejected: Vec<RejectedAgent>,
    /// Number of open invocations of the provider.
    pub open_invocations: i64,
    /// Number of invocations that the inventory completed.
    pub completed_invocations: i64,
    /// Number of invocations that will be sent again.
    pub rescheduled_invocations: i64,
}

/// Skipped entry of an inventory.
#[derive(Debug, Serialize)]
pub struct RejectedAgent {
    /// Id of the agent, as listed.
    pub agent_id: String,
    /// Name of the agent, as listed.
    pub name: String,
    /// Code of the error that the entry alone would get.
    pub code: String,
}

/// `data` of the reply to `agent.register` and `agent.recover`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisteredAgent {
    /// Id of the agent.
    pub agent_id: String,
    /// The agent's only valid token.
    pub token: String,
    /// Name of the agent; empty if an engine leaves it out.
    #[serde(default)]
    pub name: String,
    /// Settled floor of its mailbox, if the cursor was negotiated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delivery_ack_seq: Option<u64>,
}
