//! [`Invocation`]: one call of an action, with its attempts and its outcome.

use chrono::{DateTime, Utc};
use serde_json::Value;

use super::{InvocationStatus, PlacementRecord};
use crate::{AgentId, InvocationId, NodeId, ProviderName, WorkspaceScope};

/// One call of an action.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct Invocation {
    #[cfg_attr(feature = "sqlx", sqlx(rename = "workspace_id"))]
    pub scope: WorkspaceScope,
    pub invocation_id: InvocationId,
    pub action_name: String,
    /// Capability that the node must advertise; `None` if an agent handles it.
    pub capability: Option<String>,
    pub handler_agent_id: Option<AgentId>,
    /// Restricts placement to this node.
    pub target_node_id: Option<NodeId>,
    /// Calling agent; `None` for the workspace key.
    pub caller_id: Option<AgentId>,
    pub caller_name: String,
    pub input: Value,
    pub output: Option<Value>,
    pub error: Option<String>,
    /// Duration in milliseconds, reported by the handler or measured by the engine.
    pub duration_ms: Option<i64>,
    pub status: InvocationStatus,
    /// Number of attempts so far.
    pub attempt: i32,
    /// Node of the newest attempt.
    pub node_id: Option<NodeId>,
    /// Provider of the newest attempt.
    pub provider: Option<ProviderName>,
    /// Time at which that provider was chosen.
    pub dispatched_at: Option<DateTime<Utc>>,
    /// Time at which the current provider accepted the invocation.
    pub accepted_at: Option<DateTime<Utc>>,
    /// `true` if the outcome is delivered to the caller's mailbox.
    pub durable: bool,
    /// Agent that the invocation started.
    pub agent_id: Option<AgentId>,
    /// Decisions of the latest attempts, oldest first.
    #[cfg_attr(feature = "sqlx", sqlx(json))]
    pub placements: Vec<PlacementRecord>,
    pub created_at: DateTime<Utc>,
    pub completed_at: Option<DateTime<Utc>>,
}
