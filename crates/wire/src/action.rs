//! Bodies of the routes for actions.

use relay_domain::{ActionId, AgentId, InvocationId, NodeId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::field::{Id, Timestamp};

/// `POST /v1/actions`.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct ActionBody {
    /// What it is called.
    #[schema(max_length = 128, example = "build")]
    pub name: String,
    /// For people.
    #[serde(default)]
    pub description: Option<String>,
    /// The name of the agent that handles it. This or `handler_node`.
    #[serde(default)]
    pub handler_agent: Option<String>,
    /// The name of the node that handles it, which must have a capability of this name.
    #[serde(default)]
    pub handler_node: Option<String>,
    /// JSON schema of its input.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub input_schema: Option<Value>,
    /// JSON schema of its output.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub output_schema: Option<Value>,
    /// The names of the agents that may invoke it; null: all.
    #[serde(default)]
    pub available_to: Option<Vec<String>>,
}

/// An action.
#[derive(Debug, Serialize, ToSchema)]
pub struct Action {
    /// The action.
    #[schema(value_type = String, example = "act_243812004871278592")]
    pub id: ActionId,
    /// What it is called.
    #[schema(example = "build")]
    pub name: String,
    /// For people.
    #[schema(example = "Builds a revision.")]
    pub description: String,
    /// The name of the agent that handles it. Null when a node does; then empty for clients that take no null.
    #[schema(example = "builder")]
    pub handler_agent: Option<String>,
    /// The name of the node that handles it.
    pub handler_node: Option<String>,
    /// That node.
    #[schema(value_type = Option<String>)]
    pub handler_node_id: Option<NodeId>,
    /// JSON schema of its input; `{}` takes anything.
    #[schema(value_type = Object)]
    pub input_schema: Value,
    /// JSON schema of its output.
    #[schema(value_type = Object)]
    pub output_schema: Value,
    /// The names of the agents that may invoke it; null: all.
    pub available_to: Option<Vec<String>>,
    /// Always true: a deleted one is gone.
    pub is_active: bool,
    /// When it was defined.
    pub created_at: Timestamp,
}

/// `POST /v1/actions/:name/invoke`.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct InvokeBody {
    /// What it is given; `{}` when absent or null.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub input: Option<Value>,
    /// Whether the outcome goes into the caller's mailbox, where it stays until it is acknowledged.
    #[serde(default)]
    pub durable: Option<bool>,
}

/// That something was invoked.
#[derive(Debug, Serialize, ToSchema)]
pub struct InvocationAck {
    /// The invocation.
    #[schema(value_type = String, example = "inv_243812004871278592")]
    pub invocation_id: InvocationId,
    /// What was invoked.
    #[schema(example = "build")]
    pub action_name: String,
    /// The agent that handles it.
    #[schema(value_type = Option<Id>)]
    pub handler_agent_id: Option<AgentId>,
    /// The node that handles it, if it is one certain node's.
    #[schema(value_type = Option<String>)]
    pub handler_node_id: Option<NodeId>,
    /// The node that it was sent to.
    #[schema(value_type = Option<String>)]
    pub dispatched_node_id: Option<NodeId>,
    /// What it was given.
    #[schema(value_type = Object)]
    pub input: Value,
    /// pending, dispatched, invoked, completed or failed.
    #[schema(example = "dispatched")]
    pub status: &'static str,
    /// When it was made.
    pub created_at: Timestamp,
}

/// The query of `GET /v1/actions/:name/invocations/:id`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct InvocationQuery {
    /// `true`: tell why it went where it went.
    #[serde(default)]
    pub explain: Option<String>,
}

/// An invocation.
#[derive(Debug, Serialize, ToSchema)]
pub struct Invocation {
    /// The invocation.
    #[schema(value_type = String, example = "inv_243812004871278592")]
    pub invocation_id: InvocationId,
    /// What was invoked.
    #[schema(example = "build")]
    pub action_name: String,
    /// Who invoked it; `workspace` for the holder of the workspace's key.
    #[schema(example = "243812050000000001")]
    pub caller_id: String,
    /// That caller's name.
    #[schema(example = "ada")]
    pub caller_name: String,
    /// What it was given.
    #[schema(value_type = Object)]
    pub input: Value,
    /// What it brought. What is no object comes as `{"value": …}`.
    #[schema(value_type = Option<Object>)]
    pub output: Option<Value>,
    /// pending, dispatched, invoked, completed or failed.
    #[schema(example = "completed")]
    pub status: String,
    /// Why it failed.
    pub error: Option<String>,
    /// How long it took, in milliseconds.
    pub duration_ms: Option<i64>,
    /// The node that it was sent to last.
    pub dispatched_node_id: Option<String>,
    /// When it was sent there.
    pub dispatched_at: Option<Timestamp>,
    /// When the node that has it said that it is at work. Only where it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub accepted_at: Option<Timestamp>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it had its outcome.
    pub completed_at: Option<Timestamp>,
    /// Why it went where it went, the newest attempt last. Only with `explain=true`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub placements: Option<Vec<PlacementReport>>,
}

/// How one attempt was placed.
#[derive(Debug, Serialize, ToSchema)]
pub struct PlacementReport {
    /// Which attempt, from 1.
    pub attempt: i64,
    /// When.
    pub at: Option<Timestamp>,
    /// What a node had to have.
    #[schema(example = "build")]
    pub capability: String,
    /// The only node that might do it.
    pub target_node_id: Option<String>,
    /// The one that was chosen, with what was known of it.
    #[schema(value_type = Option<Object>)]
    pub chosen: Value,
    /// How many had the capability.
    pub candidates: i64,
    /// Those that could not be chosen, each with its reason: not_live, draining, handlers_not_live, full, avoided, not_targeted,
    /// lacks_capability.
    #[schema(value_type = Vec<Object>)]
    pub skipped: Value,
    /// How many more could not be chosen.
    pub skipped_unnamed: i64,
}

/// `POST /v1/actions/:name/invocations/:id/complete`.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct CompleteBody {
    /// What it brought.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub output: Option<Value>,
    /// Why it failed. This or `output`.
    #[serde(default)]
    pub error: Option<String>,
    /// How long it took, in milliseconds.
    #[serde(default)]
    pub duration_ms: Option<f64>,
}
