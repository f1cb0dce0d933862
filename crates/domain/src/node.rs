//! Nodes: their kinds, and what a node with several providers looks like as a whole.

use std::time::Duration;

/// A provider that was silent for this long is not live. Direct clients heartbeat every 30 s.
pub const NODE_TTL: Duration = Duration::from_secs(45);
/// Names starting like this belong to the implicit direct nodes.
pub const DIRECT_NAME_PREFIX: &str = "direct-";
/// Ids starting like this belong to the implicit direct nodes.
pub const DIRECT_ID_PREFIX: &str = "node_direct_";
/// The delivery adapter of socket nodes.
pub const WS_ADAPTER: &str = "ws.node.v1";
/// What a list of nodes answers with unless a limit is given, and at most.
pub const LISTED_NODES: (i64, i64) = (1_000, 5_000);
/// Bindings that a node's list answers with, at most.
pub const MAX_LISTED_BINDINGS: i64 = 20_000;
/// The capability with which a broker reports the names of its live agents: information, no ability.
pub const LIVE_AGENTS_CAPABILITY: &str = "relay:live-agents:v1";

/// How many agents a node serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NodeRole {
    /// One.
    Direct,
    /// Many.
    Broker,
}

impl NodeRole {
    /// The word on the wire and in storage.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Broker => "broker",
        }
    }

    /// Reads the word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Direct, Self::Broker].into_iter().find(|role| role.as_str() == word)
    }
}

/// How deliveries reach a node's agents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NodeKind {
    /// Over its socket.
    Ws,
    /// By calling its URL.
    HttpPush,
    /// Its agents ask for them.
    Poll,
}

impl NodeKind {
    /// The word on the wire and in storage.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ws => "ws",
            Self::HttpPush => "http_push",
            Self::Poll => "poll",
        }
    }

    /// Reads the word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Ws, Self::HttpPush, Self::Poll].into_iter().find(|kind| kind.as_str() == word)
    }

    /// Reads what a client asked for: legacy words carry the role with them. `None` for a word without a meaning.
    #[must_use]
    pub fn requested(word: &str) -> Option<(Self, Option<NodeRole>)> {
        match word {
            "fleet_ws" => Some((Self::Ws, Some(NodeRole::Broker))),
            "direct_ws" => Some((Self::Ws, Some(NodeRole::Direct))),
            _ => Self::parse(word).map(|kind| (kind, None)),
        }
    }
}

/// The kind of a capability: the canonical word wins, else the name decides.
#[must_use]
pub fn capability_kind(name: &str, declared: Option<&str>) -> &'static str {
    match declared {
        Some("capacity") => "capacity",
        Some("action") => "action",
        _ if name == "spawn" || name == "release" || name.starts_with("spawn:") || name.starts_with("relay:") => {
            "capacity"
        }
        _ => "action",
    }
}

/// How many agents the node takes: the sum over its providers, or what was given by REST when it has
/// none. 0 means unlimited, and one unlimited provider makes the node unlimited.
#[must_use]
pub fn max_agents(given: i32, providers: &[i32]) -> i32 {
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
            assert_eq!(max_agents(given, &providers), expected, "{given} {providers:?}");
        }
    }

    #[test]
    fn a_capability_is_classed_by_its_kind_and_else_by_its_name() {
        for (name, kind, expected) in [
            ("spawn:claude", None, "capacity"),
            ("spawn:claude", Some("spawn"), "capacity"),
            ("release", None, "capacity"),
            ("build", None, "action"),
            ("build", Some("run"), "action"),
            ("build", Some("capacity"), "capacity"),
            ("spawn:x", Some("action"), "action"),
        ] {
            assert_eq!(capability_kind(name, kind), expected, "{name} {kind:?}");
        }
    }

    #[test]
    fn old_kind_words_carry_their_role() {
        assert_eq!(NodeKind::requested("fleet_ws"), Some((NodeKind::Ws, Some(NodeRole::Broker))));
        assert_eq!(NodeKind::requested("direct_ws"), Some((NodeKind::Ws, Some(NodeRole::Direct))));
        assert_eq!(NodeKind::requested("poll"), Some((NodeKind::Poll, None)));
        assert_eq!(NodeKind::requested("smoke"), None);
    }
}
