//! Agents: the senders and recipients of messages. Main types: [`Agent`], [`AgentKind`] and [`AgentStatus`]; bindings
//! to nodes are in [`binding`], reports of sessions in [`session_event`], and an agent with its channels, actions and
//! deliveries in [`details`].

pub mod binding;
pub mod details;
pub mod session_event;

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::Value;

use crate::{
    AgentId, NodeId, ProviderName,
    access::rights::RightSettings,
    names::{InvalidText, TextProblem, check_name},
};

/// Silence after which an agent is reported offline.
pub const LIVENESS_TTL: Duration = Duration::from_secs(300);

/// Agent that is not deleted.
#[derive(Debug, Clone, PartialEq)]
pub struct Agent {
    pub id: AgentId,
    /// Unique among the agents of a workspace that are not deleted.
    pub name: String,
    /// Type of the agent.
    pub kind: AgentKind,
    /// Free text that describes the agent.
    pub persona: Option<String>,
    /// JSON object of the client's.
    pub metadata: Value,
    /// JSON object of the client's.
    pub capabilities: Option<Value>,
    /// Last reported status. [`Self::status_at`] takes silence into account.
    pub status: AgentStatus,
    /// Node that the agent is located on.
    pub node_id: NodeId,
    /// Machine in its address: the name of its node, the machine of its own one, or [`DIRECT_MACHINE`].
    pub machine: String,
    /// Provider of that node which runs the agent; `None` while it is unassigned.
    pub provider: Option<ProviderName>,
    /// Time of registration.
    pub created_at: DateTime<Utc>,
    /// Time of the last call or heartbeat.
    pub last_seen_at: DateTime<Utc>,
    /// Agent whose invocation started this one.
    pub spawned_by: Option<AgentId>,
    /// Deviations from the workspace's policy.
    pub rights: RightSettings,
}

impl Agent {
    /// Returns the status to report at `now`: offline after a silence of more than [`LIVENESS_TTL`].
    #[must_use]
    pub fn status_at(&self, now: DateTime<Utc>) -> AgentStatus {
        self.status.reported_at(self.last_seen_at, now)
    }

    /// Returns the address, `name@machine`. The name alone is unique; the machine tells readers where the agent runs.
    #[must_use]
    pub fn address(&self) -> String {
        address(&self.name, &self.machine)
    }

    /// Returns whether the agent is located on its own direct node.
    #[must_use]
    pub fn is_on_direct_node(&self) -> bool {
        self.node_id == NodeId::direct(self.id)
    }
}

/// Machine of agents on nodes of their own. No node and no other machine is called so.
pub const DIRECT_MACHINE: &str = "direct";
/// Maximum length of the prefix of a machine, in bytes.
const MAX_MACHINE_PREFIX_BYTES: usize = 64;

/// Returns the address of an agent.
#[must_use]
pub fn address(name: &str, machine: &str) -> String {
    format!("{name}@{machine}")
}

/// Returns the machine of an agent's own node: the prefix that its registration names, and a few characters of its id.
///
/// # Errors
/// If the prefix is blank, too long, reserved, or contains control characters or `@`.
pub fn direct_machine(prefix: &str, agent: AgentId) -> Result<String, InvalidText> {
    let field = "direct_machine_prefix";
    check_name(field, prefix, MAX_MACHINE_PREFIX_BYTES)?;
    if prefix.contains('@') {
        return Err(InvalidText { field, problem: TextProblem::Malformed });
    }
    check_machine(field, prefix)?;
    // The low digits: the high ones are those of the time, which agents that register together share.
    let mut rest = agent.get().unsigned_abs();
    let suffix: String = (0..6)
        .filter_map(|_| {
            let digit = u32::try_from(rest % 36).ok()?;
            rest /= 36;
            char::from_digit(digit, 36)
        })
        .collect();
    Ok(format!("{prefix}-{suffix}"))
}

/// Checks that a machine is not the reserved one.
///
/// # Errors
/// If it is [`DIRECT_MACHINE`].
pub fn check_machine(field: &'static str, machine: &str) -> Result<(), InvalidText> {
    if machine == DIRECT_MACHINE { Err(InvalidText { field, problem: TextProblem::ReservedMachine }) } else { Ok(()) }
}

/// Type of an agent.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, strum::EnumString, strum::IntoStaticStr, strum::VariantArray,
)]
#[strum(serialize_all = "snake_case")]
pub enum AgentKind {
    /// A software agent.
    #[default]
    Agent,
    /// A person.
    Human,
    /// A component of a system.
    System,
}

crate::columns::stored_name!(AgentKind);

/// Reported activity of an agent.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, strum::EnumString, strum::IntoStaticStr, strum::VariantArray,
)]
#[strum(serialize_all = "snake_case")]
pub enum AgentStatus {
    /// Working on something.
    #[default]
    #[strum(to_string = "active", serialize = "online")]
    Active,
    /// Ready for work.
    #[strum(to_string = "idle", serialize = "away")]
    Idle,
    /// Unable to continue.
    Blocked,
    /// Waiting for input or for another agent.
    Waiting,
    /// Disconnected, or silent for [`LIVENESS_TTL`].
    Offline,
}

crate::columns::stored_name!(AgentStatus);

impl AgentStatus {
    /// Returns the status to report for an agent that has been silent for `silent_for`.
    #[must_use]
    pub fn after_silence(self, silent_for: Duration) -> Self {
        if silent_for > LIVENESS_TTL { Self::Offline } else { self }
    }

    /// Returns the status to report at `now` for an agent that was last seen at `seen`.
    #[must_use]
    pub fn reported_at(self, seen: DateTime<Utc>, now: DateTime<Utc>) -> Self {
        // A negative silence comes from another process's clock and counts as none.
        self.after_silence((now - seen).to_std().unwrap_or(Duration::ZERO))
    }

    /// Returns `online` or `offline`, the two values that all published clients accept.
    #[must_use]
    pub const fn presence(self) -> &'static str {
        match self {
            Self::Offline => "offline",
            Self::Active | Self::Idle | Self::Blocked | Self::Waiting => "online",
        }
    }
}

/// Presence of one agent.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct AgentPresence {
    pub agent_id: AgentId,
    pub name: String,
    pub status: AgentStatus,
    pub last_seen_at: DateTime<Utc>,
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
