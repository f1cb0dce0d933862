//! Actions: what agents may ask nodes and other agents to do, and what becomes of one such call.
//!
//! An invocation has one outcome. It is tried on one provider at a time; a provider that is lost, or does not
//! answer in time, is followed by the next attempt under the same id (contract: node.md 8.2 and 8.3).

use std::time::Duration;

/// Bytes of an action's name.
pub const MAX_ACTION_NAME_BYTES: usize = 128;
/// Bytes of an action's description.
pub const MAX_DESCRIPTION_BYTES: usize = 4096;
/// Agents that an action may be restricted to.
pub const MAX_AVAILABLE_TO: usize = 256;
/// Bytes of an invocation's input or output as JSON: a frame with it stays below 1 MiB.
pub const MAX_VALUE_BYTES: usize = 768 * 1024;
/// Bytes of an invocation's error; more is cut off.
pub const MAX_ERROR_BYTES: usize = 4096;
/// Definitions of actions in one workspace.
pub const MAX_ACTIONS: i64 = 10_000;

/// Invocations of one action that may be open at once.
pub const MAX_OPEN_PER_ACTION: i64 = 2_000;
/// Invocations of one workspace that may be open at once.
pub const MAX_OPEN_PER_WORKSPACE: i64 = 10_000;
/// Invocations that may wait for one provider to come back.
pub const OFFLINE_QUEUE: i64 = 100;

/// An invocation that another node could do is taken away from a node that has not answered for so long.
pub const DISPATCH_TIMEOUT: Duration = Duration::from_secs(30);
/// An invocation whose handler cannot be reached for so long has failed.
pub const UNREACHABLE: Duration = Duration::from_secs(120);
/// No invocation is open for longer than this: a handler that answers later answers nobody.
pub const LIFETIME: Duration = Duration::from_secs(24 * 3600);
/// How long a connection that has taken over waits for results of what its predecessor was sent, before it sends
/// that again.
pub const RESEND_GRACE: Duration = Duration::from_secs(3);
/// How long a provider that is gone has to come back before what it was doing goes elsewhere.
pub const LOST_GRACE: Duration = Duration::from_secs(2);
/// Attempts at most that a provider may end by saying that it cannot do it; then the invocation fails.
pub const MAX_HAND_BACKS: i32 = 5;
/// How long the agent that an inventory lists waits for its provider's own result of the invocation.
pub const CAME_UP_QUIET: Duration = Duration::from_secs(2);
/// A caller that comes back is told outcomes of this age at most; older ones it has to read.
pub const TOLD_AFTERWARDS: Duration = Duration::from_secs(3600);
/// The first pause before an invocation is tried elsewhere, and the longest.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));

/// What a handler says that cannot do it, and what an invocation says that nobody could do.
pub const HANDLER_UNAVAILABLE: &str = "handler_unavailable";
/// What the holder of the workspace's key is called as a caller.
pub const WORKSPACE_CALLER: &str = "workspace";
/// What a node says that is asked to bring up an agent which it runs already.
pub const NAME_IN_USE: &str = "spawn_agent_name_in_use";
/// The action that brings an agent up on a node.
pub const SPAWN: &str = "spawn";
/// The action that ends an agent on its node.
pub const RELEASE: &str = "release";
/// What the capacities to bring up agents begin with.
pub const SPAWN_PREFIX: &str = "spawn:";
/// Capacities of this prefix say how to talk to a node; nobody invokes them.
pub const PROTOCOL_PREFIX: &str = "relay:";
/// What a capability's metadata says when its handler wants to know who calls, and the version that is served.
pub const CALLER_METADATA: (&str, &str) = ("relay.action-caller", "v1");

/// Where an invocation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Status {
    /// No node has it.
    Pending,
    /// A node has it, or is about to be sent it.
    Dispatched,
    /// The agent that handles it has it, or is about to be sent it.
    Invoked,
    /// Done.
    Completed,
    /// Will not be done.
    Failed,
}

impl Status {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Pending, Self::Dispatched, Self::Invoked, Self::Completed, Self::Failed];

    /// The word on the wire and in storage.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Dispatched => "dispatched",
            Self::Invoked => "invoked",
            Self::Completed => "completed",
            Self::Failed => "failed",
        }
    }

    /// Reads the word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == word)
    }

    /// Whether it has its outcome.
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::Failed)
    }
}

/// Whether an action of this name is dispatched by the engine itself and cannot be defined.
#[must_use]
pub fn is_reserved(name: &str) -> bool {
    name == SPAWN || name == RELEASE || name.starts_with(PROTOCOL_PREFIX)
}

/// Whether anybody may invoke a capacity of this name.
#[must_use]
pub fn is_invokable_capacity(name: &str) -> bool {
    !is_reserved(name)
}

/// How long after its `attempt`th try (from 1) failed an invocation is tried again.
#[must_use]
pub fn backoff(attempt: i32) -> Duration {
    let doublings = attempt.saturating_sub(1).clamp(0, 16).unsigned_abs();
    BACKOFF.0.saturating_mul(1 << doublings).min(BACKOFF.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_doubles_up_to_a_minute() {
        let seconds: Vec<u64> = (0..8).map(|attempt| backoff(attempt).as_secs()).collect();
        assert_eq!(seconds, [5, 5, 10, 20, 40, 60, 60, 60]);
        assert_eq!(backoff(i32::MAX).as_secs(), 60);
    }

    #[test]
    fn words_are_read_back() {
        for status in Status::ALL {
            assert_eq!(Status::parse(status.as_str()), Some(status));
            assert_eq!(status.is_final(), ["completed", "failed"].contains(&status.as_str()));
        }
        assert_eq!(Status::parse("running"), None);
    }

    #[test]
    fn what_the_engine_dispatches_itself_is_reserved() {
        for name in ["spawn", "release", "relay:delivery-cursor-v1"] {
            assert!(is_reserved(name), "{name}");
        }
        for name in ["build", "spawn:claude", "respawn"] {
            assert!(!is_reserved(name), "{name}");
        }
    }
}
