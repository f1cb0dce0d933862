//! [`Action`]: the definition of an action as callers see it.

use chrono::{DateTime, Utc};
use serde_json::Value;

use crate::{ActionId, AgentId, NodeId, ProviderName};

/// Definition of an action with the names of its handler.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct Action {
    pub action_id: ActionId,
    pub name: String,
    pub description: String,
    /// `true` if the name resolves to this action in the whole workspace; otherwise only together with its node.
    pub claims_name: bool,
    pub handler_agent_id: Option<AgentId>,
    pub handler_agent: Option<String>,
    pub handler_node_id: Option<NodeId>,
    pub handler_node: Option<String>,
    /// Provider whose capability defined the action. `None` if it was defined over REST: then any provider of the node
    /// handles it.
    pub provider: Option<ProviderName>,
    /// JSON schema that an input must satisfy.
    pub input_schema: Value,
    /// JSON schema of the output; not enforced.
    pub output_schema: Value,
    /// Names of the agents that may invoke it; `None` allows every agent.
    pub available_to: Option<Vec<String>>,
    pub created_at: DateTime<Utc>,
}
