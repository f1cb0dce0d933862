//! Invocations to create: their handlers and callers.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, InvocationId, NodeId, ProviderName, WorkspaceScope};
use serde_json::Value;

use crate::access::idempotency::IdempotencyKey;

#[derive(Debug, Clone)]
pub enum Handler {
    /// This agent, at its current location.
    Agent(AgentId),
    /// Any node with the capability.
    Node {
        /// Capability that the node must advertise, and the action's name in the frame.
        capability: String,
        /// Restricts placement to this node.
        target: Option<NodeId>,
        /// Restricts placement to this provider of the target node.
        provider: Option<ProviderName>,
        /// Excludes actions with the same name as the capacity.
        only_capacity: bool,
        /// Behaviour if no provider is eligible now.
        wait_policy: WaitPolicy,
    },
}

/// Rule for queueing an invocation until its target node is available.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitPolicy {
    /// Refuse the invocation.
    Never,
    /// Queue if a matching provider declared that its invocations queue.
    AsDeclared,
    Always,
}

/// Caller of an invocation.
#[derive(Debug, Clone)]
pub struct Invoker {
    /// Calling agent; `None` for the workspace key.
    pub agent_id: Option<AgentId>,
    pub name: String,
}

/// Invocation to create.
#[derive(Debug, Clone)]
pub struct NewInvocation {
    pub scope: WorkspaceScope,
    /// Id chosen by the engine. Inserting the same id again changes nothing, so a batch with an unknown commit outcome
    /// can be repeated.
    pub id: InvocationId,
    pub action_name: String,
    pub handler: Handler,
    pub caller: Invoker,
    pub input: Value,
    /// `true` if the outcome is delivered to the caller's mailbox.
    pub durable: bool,
    pub key: Option<IdempotencyKey>,
    /// Random number that breaks ties in the placement.
    pub entropy: u64,
    pub at: DateTime<Utc>,
}
