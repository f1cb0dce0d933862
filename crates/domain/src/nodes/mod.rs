//! Nodes: their kinds and roles, and the kinds of their capabilities. Nodes with their providers are in [`roster`],
//! placement of work is in [`placement`], replacement of a provider's connection in [`takeover`], rules of tags in
//! [`tags`]. Main types: [`Node`], [`NodeProvider`], [`NodeKind`], [`NodeRole`], [`CapabilityKind`].

pub mod placement;
pub mod roster;
pub mod tags;
pub mod takeover;

pub use roster::{Liveness, Node, NodeProvider, RosterNode};

use std::time::Duration;

/// Silence after which a provider is not live. Direct clients send a heartbeat every 30 s.
pub const NODE_TTL: Duration = Duration::from_secs(45);
/// Time from the end of a gateway's lease until its sockets count as closed. On a loaded machine a gateway that works
/// may renew its lease late.
pub const GATEWAY_GRACE: Duration = Duration::from_secs(5);
/// Time without a connection for which a node counts as temporarily unavailable: only the agents themselves move away
/// from it. As long as invocations wait for an unavailable handler.
pub const TEMPORARY_ABSENCE: Duration = crate::actions::UNREACHABLE_TIMEOUT;
/// Time since a node was last live for which its name stays its own, and since a provider was for which it keeps its
/// place among [`MAX_PROVIDERS`].
pub const NODE_RETENTION: Duration = Duration::from_secs(24 * 3600);
/// Prefix of the names of implicit direct nodes.
pub const DIRECT_NAME_PREFIX: &str = "direct-";
/// Prefix of the ids of implicit direct nodes.
pub const DIRECT_ID_PREFIX: &str = "node_direct_";
/// Delivery adapter of nodes with a socket.
pub const WS_ADAPTER: &str = "ws.node.v1";
/// Default and maximum page size of a node list.
pub const LISTED_NODES: (i64, i64) = (1_000, 5_000);
/// Providers of a node, those without a connection included. Fleets have a handful; each may have 64 KiB of
/// capabilities, which the node shows together.
pub const MAX_PROVIDERS: i64 = 64;
/// Maximum number of bindings in the list of a node.
pub const MAX_LISTED_BINDINGS: i64 = 20_000;

/// Role of a node: one agent or many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::EnumString, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum NodeRole {
    /// The connection of a single agent.
    Direct,
    /// A process that hosts many agents.
    Broker,
}

crate::columns::stored_name!(NodeRole);

/// Transport of deliveries to a node's agents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::EnumString, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum NodeKind {
    /// Frames over the node's socket.
    Ws,
    /// Requests to the node's URL.
    HttpPush,
    /// Claims over REST by the agents.
    Poll,
}

crate::columns::stored_name!(NodeKind);

impl NodeKind {
    /// Returns whether nodes of this kind connect over a socket. The others have no connection that could be lost, and
    /// their deliveries are not sent by a gateway.
    #[must_use]
    pub const fn has_socket(self) -> bool {
        match self {
            Self::Ws => true,
            Self::HttpPush | Self::Poll => false,
        }
    }

    /// Parses the kind in a client's request; legacy names imply a role. Returns `None` for unknown names.
    #[must_use]
    pub fn parse_requested(word: &str) -> Option<(Self, Option<NodeRole>)> {
        match word {
            "fleet_ws" => Some((Self::Ws, Some(NodeRole::Broker))),
            "direct_ws" => Some((Self::Ws, Some(NodeRole::Direct))),
            _ => Self::parse(word).map(|kind| (kind, None)),
        }
    }
}

/// Kind of a capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::EnumString, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum CapabilityKind {
    /// Something that this node does; it defines an action.
    Action,
    /// Something that any node with the capability does, such as running agents.
    Capacity,
}

crate::columns::stored_name!(CapabilityKind);

impl CapabilityKind {
    /// Returns the kind of a capability: the declared kind if it is canonical, otherwise derived from the name.
    #[must_use]
    pub fn classify(name: &str, declared: Option<&str>) -> Self {
        let is_capacity =
            name == "spawn" || name == "release" || name.starts_with("spawn:") || name.starts_with("relay:");
        let derived = if is_capacity { Self::Capacity } else { Self::Action };
        declared.and_then(Self::parse).unwrap_or(derived)
    }
}

/// Returns the capacity of a node: the sum over its providers, or the value set over REST if it has none. 0 means
/// unlimited, and one unlimited provider makes the node unlimited.
#[must_use]
pub fn effective_max_agents(given: i32, providers: &[i32]) -> i32 {
    if providers.is_empty() {
        given
    } else if providers.contains(&0) {
        0
    } else {
        providers.iter().fold(0, |sum, n| sum.saturating_add(*n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_unlimited_provider_makes_the_node_unlimited() {
        for (given, providers, expected) in
            [(3, vec![], 3), (3, vec![8], 8), (3, vec![8, 2], 10), (3, vec![8, 0], 0), (0, vec![], 0)]
        {
            assert_eq!(effective_max_agents(given, &providers), expected, "{given} {providers:?}");
        }
    }

    #[test]
    fn a_capability_is_classified_by_kind_then_by_name() {
        for (name, kind, expected) in [
            ("spawn:claude", None, CapabilityKind::Capacity),
            ("spawn:claude", Some("spawn"), CapabilityKind::Capacity),
            ("release", None, CapabilityKind::Capacity),
            ("build", None, CapabilityKind::Action),
            ("build", Some("run"), CapabilityKind::Action),
            ("build", Some("capacity"), CapabilityKind::Capacity),
            ("spawn:x", Some("action"), CapabilityKind::Action),
        ] {
            assert_eq!(CapabilityKind::classify(name, kind), expected, "{name} {kind:?}");
        }
    }

    #[test]
    fn legacy_kinds_imply_a_role() {
        assert_eq!(NodeKind::parse_requested("fleet_ws"), Some((NodeKind::Ws, Some(NodeRole::Broker))));
        assert_eq!(NodeKind::parse_requested("direct_ws"), Some((NodeKind::Ws, Some(NodeRole::Direct))));
        assert_eq!(NodeKind::parse_requested("poll"), Some((NodeKind::Poll, None)));
        assert_eq!(NodeKind::parse_requested("smoke"), None);
    }
}
