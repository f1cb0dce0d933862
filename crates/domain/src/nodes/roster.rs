//! Nodes as the roster shows them: [`Node`] has the stored properties, [`RosterNode`] combines them with those of its
//! providers. The store reads them; the engine, the gateway and relayctl show them.

use std::{borrow::Cow, collections::HashSet};

use chrono::{DateTime, Utc};
use serde::Deserialize;
use serde_json::Value;

use super::{NodeKind, NodeRole, effective_max_agents};
use crate::{AgentId, JsonText, NodeId, ProviderName};

/// Reachability of a node or a provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Liveness {
    /// Connected, with a heartbeat within [`NODE_TTL`](super::NODE_TTL); or of a kind that never connects.
    Online,
    /// Without a connection, or silent.
    Offline,
}

impl Liveness {
    /// Returns the name used on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Online => "online",
            Self::Offline => "offline",
        }
    }

    /// Returns true for [`Self::Online`].
    #[must_use]
    pub const fn is_online(self) -> bool {
        match self {
            Self::Online => true,
            Self::Offline => false,
        }
    }
}

impl From<bool> for Liveness {
    fn from(online: bool) -> Self {
        if online { Self::Online } else { Self::Offline }
    }
}

/// Stored properties of a node.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    pub node_id: NodeId,
    /// Unique in the workspace.
    pub name: String,
    /// Transport of its deliveries.
    pub kind: NodeKind,
    /// One agent or many.
    pub role: NodeRole,
    /// Identifies a broker that enrols without a node id.
    pub machine_id: Option<String>,
    /// Name of the delivery protocol.
    pub delivery_adapter: String,
    /// Capabilities set over REST, as JSON objects.
    pub capabilities: Vec<JsonText>,
    /// Tags in the words of the node's owner.
    pub tags: Vec<String>,
    /// Version of the software, as text.
    pub version: Option<String>,
    /// Maximum number of agents set over REST; 0 means unlimited.
    pub max_agents: i32,
    /// Delivery settings without secrets; only for [`NodeKind::HttpPush`].
    pub delivery: Option<Value>,
    /// Number of agents that are bound to it.
    pub bound_agents: i64,
    /// Time of the first enrolment.
    pub created_at: DateTime<Utc>,
}

/// Provider of a node as listed in the roster.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeProvider {
    /// Node that it serves.
    pub node_id: NodeId,
    /// Unique in the node.
    pub name: ProviderName,
    /// Advertised capabilities, as JSON objects.
    pub capabilities: Vec<JsonText>,
    /// Tags in the words of the node's owner.
    pub tags: Vec<String>,
    /// Version of the software, as text.
    pub version: Option<String>,
    /// Maximum number of agents; 0 means unlimited.
    pub max_agents: i32,
    /// Number of agents in its last report.
    pub active_agents: i32,
    /// Slots reserved by dispatched invocations.
    pub reserved_agents: i64,
    /// Load from 0 to 1.
    pub load: f64,
    /// `true` if it reported that its handlers run.
    pub handlers_live: bool,
    /// Time of the last heartbeat.
    pub last_heartbeat_at: DateTime<Utc>,
    /// Reachability at the time of the query.
    pub liveness: Liveness,
}

impl NodeProvider {
    /// Returns whether its handlers run and are reachable.
    #[must_use]
    pub const fn runs_handlers(&self) -> bool {
        self.liveness.is_online() && self.handlers_live
    }
}

/// Name of a capability, without the rest of its text.
#[derive(Deserialize)]
struct NamedCapability<'a> {
    // A name with an escape cannot be borrowed from the text.
    #[serde(borrow)]
    name: Cow<'a, str>,
}

/// Node with its providers.
#[derive(Debug, Clone, PartialEq)]
pub struct RosterNode {
    /// Stored properties.
    pub node: Node,
    /// Providers in the order of their registration.
    pub providers: Vec<NodeProvider>,
}

impl RosterNode {
    /// Returns the reachability of the node. Kinds without a socket have no connection that could be lost.
    #[must_use]
    pub fn liveness(&self) -> Liveness {
        let connected = self.providers.iter().any(|provider| provider.liveness.is_online());
        Liveness::from(!self.node.kind.has_socket() || connected)
    }

    /// Returns the capabilities of the providers, offline ones included, then those set over REST; the first of a name
    /// counts.
    #[must_use]
    pub fn capabilities(&self) -> Vec<&JsonText> {
        let mut names = HashSet::new();
        let advertised = self.providers.iter().flat_map(|provider| &provider.capabilities);
        advertised
            .chain(&self.node.capabilities)
            .filter(|capability| {
                let named = serde_json::from_str::<NamedCapability<'_>>(capability.get());
                named.is_ok_and(|named| names.insert(named.name))
            })
            .collect()
    }

    /// Returns the tags of the node, then those of its providers, without duplicates.
    #[must_use]
    pub fn tags(&self) -> Vec<&str> {
        let mut tags: Vec<&str> = self.node.tags.iter().map(String::as_str).collect();
        for tag in self.providers.iter().flat_map(|provider| &provider.tags) {
            if !tags.contains(&tag.as_str()) {
                tags.push(tag);
            }
        }
        tags
    }

    /// Returns the version of the most recent provider, otherwise that of the node.
    #[must_use]
    pub fn version(&self) -> Option<&str> {
        self.most_recent().and_then(|provider| provider.version.as_deref()).or(self.node.version.as_deref())
    }

    /// Returns the last heartbeat of an online provider, otherwise of any.
    #[must_use]
    pub fn last_heartbeat_at(&self) -> Option<DateTime<Utc>> {
        self.most_recent().map(|provider| provider.last_heartbeat_at)
    }

    /// Returns whether the handlers of an online provider run.
    #[must_use]
    pub fn runs_handlers(&self) -> bool {
        self.providers.iter().any(NodeProvider::runs_handlers)
    }

    /// Returns the highest load of its providers.
    #[must_use]
    pub fn load(&self) -> f64 {
        self.providers.iter().map(|provider| provider.load).fold(0.0, f64::max)
    }

    /// Returns whether the number of bound agents may be outdated: no provider says which of them still run.
    #[must_use]
    pub fn is_count_stale(&self) -> bool {
        !self.liveness().is_online()
    }

    /// Returns the number of reserved slots of all providers.
    #[must_use]
    pub fn reserved_agents(&self) -> i64 {
        self.providers.iter().map(|provider| provider.reserved_agents).sum()
    }

    /// Returns the maximum number of agents; 0 means unlimited.
    #[must_use]
    pub fn max_agents(&self) -> i32 {
        let limits: Vec<i32> = self.providers.iter().map(|provider| provider.max_agents).collect();
        effective_max_agents(self.node.max_agents, &limits)
    }

    fn most_recent(&self) -> Option<&NodeProvider> {
        self.providers.iter().max_by_key(|provider| (provider.liveness.is_online(), provider.last_heartbeat_at))
    }
}

/// Filter and page of a node list.
#[derive(Debug, Clone, Default)]
pub struct NodeFilter {
    pub name: Option<String>,
    /// Only nodes with a capability of this name.
    pub capability: Option<String>,
    pub liveness: Option<Liveness>,
    /// Only nodes that one of these agents is located on.
    pub hosts: Option<Vec<AgentId>>,
    /// Only nodes after this position; the node at the position need not exist.
    pub after: Option<NodeListPosition>,
    pub limit: i64,
}

/// Position in a list of nodes: that of its last node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeListPosition {
    pub role: NodeRole,
    pub name: String,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn provider(name: &str, liveness: Liveness, capability: Value, max_agents: i32) -> NodeProvider {
        NodeProvider {
            node_id: NodeId::new("n"),
            name: ProviderName::new(name),
            capabilities: vec![capability.into()],
            tags: vec!["gpu".into()],
            version: Some(name.into()),
            max_agents,
            active_agents: 2,
            reserved_agents: 1,
            load: if liveness.is_online() { 0.25 } else { 0.5 },
            handlers_live: !liveness.is_online(),
            last_heartbeat_at: DateTime::UNIX_EPOCH,
            liveness,
        }
    }

    fn node(kind: NodeKind) -> Node {
        Node {
            node_id: NodeId::new("n"),
            name: "box".into(),
            kind,
            role: NodeRole::Broker,
            machine_id: None,
            delivery_adapter: super::super::WS_ADAPTER.into(),
            capabilities: vec![
                json!({ "name": "build", "kind": "action" }).into(),
                json!({ "name": "test", "kind": "action" }).into(),
            ],
            tags: vec!["gpu".into(), "own".into()],
            version: None,
            max_agents: 3,
            delivery: None,
            bound_agents: 3,
            created_at: DateTime::UNIX_EPOCH,
        }
    }

    #[test]
    fn roster_combines_a_node_with_its_providers() {
        let online = provider("a", Liveness::Online, json!({ "name": "build", "kind": "capacity" }), 8);
        let offline = provider("b", Liveness::Offline, json!({ "name": "spawn:x", "kind": "capacity" }), 2);
        let entry = RosterNode { node: node(NodeKind::Ws), providers: vec![online, offline] };
        let kind = |capability: &&JsonText| {
            let capability = capability.to_value();
            format!("{} {}", capability["name"], capability["kind"]).replace('"', "")
        };
        let kinds: Vec<_> = entry.capabilities().iter().map(kind).collect();
        assert_eq!(kinds, ["build capacity", "spawn:x capacity", "test action"]);
        assert_eq!(entry.liveness(), Liveness::Online);
        assert!(!entry.runs_handlers(), "only online providers' handlers count");
        assert_eq!((entry.max_agents(), entry.reserved_agents()), (10, 2));
        assert_eq!(entry.load(), 0.5);
        assert_eq!(entry.version(), Some("a"));
        assert_eq!(entry.tags(), ["gpu", "own"]);
    }

    #[test]
    fn only_nodes_with_a_socket_can_be_offline() {
        for (kind, expected) in [
            (NodeKind::Ws, Liveness::Offline),
            (NodeKind::HttpPush, Liveness::Online),
            (NodeKind::Poll, Liveness::Online),
        ] {
            let entry = RosterNode { node: node(kind), providers: Vec::new() };
            assert_eq!(entry.liveness(), expected, "{kind:?}");
            assert_eq!(entry.is_count_stale(), !expected.is_online(), "{kind:?}");
        }
    }
}
