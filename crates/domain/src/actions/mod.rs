//! Actions: operations that agents invoke on nodes and on other agents. Main types: [`Action`] and [`Invocation`]; used
//! by the engine's action use cases and the store.
//!
//! An invocation has exactly one outcome. It runs on one provider at a time; when that provider is lost or does not
//! respond in time, the next attempt starts under the same id (docs/protocol/node.md, "Invocation states" and "Retries
//! of invocations").

mod definition;
mod invocation;
mod placement_record;
pub mod schema_cost;
pub mod trigger;

pub use definition::Action;
pub use invocation::Invocation;
pub use placement_record::{ChosenProvider, PlacementRecord, SkippedNode};

use std::time::Duration;

/// Maximum length of an action name, in bytes.
pub const MAX_ACTION_NAME_BYTES: usize = 128;
/// Maximum length of an action description, in bytes.
pub const MAX_DESCRIPTION_BYTES: usize = 4096;
/// Maximum number of agents that an action may be restricted to.
pub const MAX_AVAILABLE_TO: usize = 256;
/// Maximum size of an invocation's input or output as JSON, in bytes; keeps the frame below 1 MiB.
pub const MAX_VALUE_BYTES: usize = 768 * 1024;
/// Maximum length of an invocation's error, in bytes; longer errors are truncated.
pub const MAX_ERROR_BYTES: usize = 4096;
/// Maximum number of action definitions in one workspace.
pub const MAX_ACTIONS: i64 = 10_000;

// At either of these two bounds a new invocation is refused with 429 `too_many_invocations`.
/// Maximum number of open invocations of one action.
pub const MAX_OPEN_PER_ACTION: i64 = 2_000;
/// Maximum number of open invocations in one workspace.
pub const MAX_OPEN_PER_WORKSPACE: i64 = 10_000;
// At the bound a new invocation is refused with 503 `handler_unavailable`.
/// Maximum number of invocations that wait for one offline provider.
pub const OFFLINE_QUEUE: i64 = 100;

// Work that its provider has accepted, or that only this node can do, stays with it (ADR 0011).
/// Time after which an unanswered invocation moves from its node to another capable node.
pub const DISPATCH_TIMEOUT: Duration = Duration::from_secs(30);
/// Time without a sign of life of its handler after which an action may be taken over.
pub const TAKE_OVER_AFTER: Duration = Duration::from_secs(60);
/// Time without a connection after which a handling agent is unavailable for new invocations. Longer than its client
/// needs to reconnect to another gateway, so that a gateway that stops costs no invocation.
pub const HANDLER_LOST_AFTER: Duration = Duration::from_secs(10);
/// Time after which an invocation whose handler is unavailable fails.
pub const UNREACHABLE_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum age of an open invocation. A later result has no recipient.
pub const INVOCATION_LIFETIME: Duration = Duration::from_secs(24 * 3600);
/// Time for which a new connection of a provider waits for results of invocations sent over its predecessor before it
/// sends them again.
pub const RESEND_GRACE: Duration = Duration::from_secs(3);
/// Time for a lost provider to reconnect before its invocations move to another provider.
pub const PROVIDER_LOST_GRACE: Duration = Duration::from_secs(2);
/// Number of attempts that providers may hand back before the invocation fails.
pub const MAX_HAND_BACKS: i32 = 5;
// The broker's own result takes precedence: it has the output, which the engine can only make up.
/// Time for which an agent listed in an inventory waits for its provider's own result of the spawn invocation.
pub const INVENTORY_RESULT_GRACE: Duration = Duration::from_secs(2);
/// Maximum age of outcomes that a reconnecting caller is notified of; it reads older outcomes over REST.
pub const OUTCOME_NOTICE_MAX_AGE: Duration = Duration::from_secs(3600);
/// First and longest delay before the next attempt of an invocation.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));

/// Error code of a handler that cannot perform the action, and of an invocation without any available handler.
pub const HANDLER_UNAVAILABLE: &str = "handler_unavailable";
/// Error code of the open invocations of a deleted action.
pub const ACTION_DELETED: &str = "action_deleted";
/// Caller name of requests made with the workspace key.
pub const WORKSPACE_CALLER: &str = "workspace";
/// Error code of a node that already runs the agent to spawn.
pub const NAME_IN_USE: &str = "spawn_agent_name_in_use";
/// Action that starts an agent on a node.
pub const SPAWN: &str = "spawn";
/// Action that ends an agent on its node.
pub const RELEASE: &str = "release";
/// Prefix of the capacities for spawning agents.
pub const SPAWN_PREFIX: &str = "spawn:";
/// Prefix of capacities that describe a node's protocol; they cannot be invoked.
pub const PROTOCOL_PREFIX: &str = "relay:";
/// Metadata key and version by which a capability requests the identity of the caller.
pub const CALLER_METADATA: (&str, &str) = ("relay.action-caller", "v1");

/// Stage of an invocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::EnumString, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum InvocationStatus {
    /// Not assigned to any node.
    Pending,
    /// Sent to a node, or about to be.
    Dispatched,
    /// Sent to the agent that handles it, or about to be.
    Invoked,
    /// Finished with an output.
    Completed,
    /// Finished with an error.
    Failed,
}

crate::columns::stored_name!(InvocationStatus);

impl InvocationStatus {
    /// Returns whether the invocation has its outcome.
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::Failed)
    }
}

/// Returns whether actions with this name are dispatched by the engine itself and cannot be defined.
#[must_use]
pub fn is_reserved(name: &str) -> bool {
    name == SPAWN || name == RELEASE || name.starts_with(PROTOCOL_PREFIX)
}

/// Returns whether a capacity with this name can be invoked.
#[must_use]
pub fn is_invokable_capacity(name: &str) -> bool {
    !is_reserved(name)
}

/// Returns the delay before the next attempt after `attempt` attempts (from 1) have failed.
#[must_use]
pub fn retry_backoff(attempt: i32) -> Duration {
    // 16 doublings are far above the longest delay. Without the clamp a large attempt would overflow the shift.
    let doublings = attempt.saturating_sub(1).clamp(0, 16).unsigned_abs();
    BACKOFF.0.saturating_mul(1 << doublings).min(BACKOFF.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_doubles_up_to_a_minute() {
        let seconds: Vec<u64> = (0..8).map(|attempt| retry_backoff(attempt).as_secs()).collect();
        assert_eq!(seconds, [5, 5, 10, 20, 40, 60, 60, 60]);
        assert_eq!(retry_backoff(i32::MAX).as_secs(), 60);
    }

    #[test]
    fn words_are_read_back() {
        for status in InvocationStatus::ALL.iter().copied() {
            assert_eq!(InvocationStatus::parse(status.as_str()), Some(status));
            assert_eq!(status.is_final(), ["completed", "failed"].contains(&status.as_str()));
        }
        assert_eq!(InvocationStatus::parse("running"), None);
    }

    #[test]
    fn actions_dispatched_by_the_engine_are_reserved() {
        for name in ["spawn", "release", "relay:delivery-cursor-v1"] {
            assert!(is_reserved(name), "{name}");
        }
        for name in ["build", "spawn:claude", "respawn"] {
            assert!(!is_reserved(name), "{name}");
        }
    }
}
