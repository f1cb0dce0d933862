//! What kinds of agents there are and what they can be doing.

use std::time::Duration;

/// An agent that was silent for this long is reported offline.
pub const LIVENESS_TTL: Duration = Duration::from_secs(300);

/// What an agent is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum AgentKind {
    /// A program.
    #[default]
    Agent,
    /// A person.
    Human,
    /// Part of a system.
    System,
}

impl AgentKind {
    /// The word on the wire and in storage.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Human => "human",
            Self::System => "system",
        }
    }

    /// Reads the word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Agent, Self::Human, Self::System].into_iter().find(|kind| kind.as_str() == word)
    }
}

/// What an agent is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum AgentStatus {
    /// At work.
    #[default]
    Active,
    /// Has nothing to do.
    Idle,
    /// Cannot go on.
    Blocked,
    /// Waits for somebody.
    Waiting,
    /// Away.
    Offline,
}

impl AgentStatus {
    /// The word in storage and in events.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Idle => "idle",
            Self::Blocked => "blocked",
            Self::Waiting => "waiting",
            Self::Offline => "offline",
        }
    }

    /// Reads a word from storage or from a client; clients may also say `online` (active) and `away` (idle).
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "active" | "online" => Self::Active,
            "idle" | "away" => Self::Idle,
            "blocked" => Self::Blocked,
            "waiting" => Self::Waiting,
            "offline" => Self::Offline,
            _ => return None,
        })
    }

    /// The status as reported, given how long the agent has been silent.
    #[must_use]
    pub fn after_silence(self, silent_for: Duration) -> Self {
        if silent_for > LIVENESS_TTL { Self::Offline } else { self }
    }

    /// The word that published clients know: `online` or `offline`.
    #[must_use]
    pub const fn presence(self) -> &'static str {
        match self {
            Self::Offline => "offline",
            Self::Active | Self::Idle | Self::Blocked | Self::Waiting => "online",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_words_read_back() {
        for kind in [AgentKind::Agent, AgentKind::Human, AgentKind::System] {
            assert_eq!(AgentKind::parse(kind.as_str()), Some(kind));
        }
        for word in ["active", "idle", "blocked", "waiting", "offline"] {
            assert_eq!(AgentStatus::parse(word).map(AgentStatus::as_str), Some(word));
        }
        assert_eq!(AgentStatus::parse("released"), None);
    }

    #[test]
    fn a_silent_agent_is_offline() {
        assert_eq!(AgentStatus::Blocked.after_silence(LIVENESS_TTL).presence(), "online");
        assert_eq!(AgentStatus::Active.after_silence(LIVENESS_TTL + Duration::from_secs(1)).presence(), "offline");
    }
}
