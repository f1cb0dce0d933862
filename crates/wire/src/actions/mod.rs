//! Request and response bodies of the action routes. Main types: [`Action`], [`InvokeBody`], [`Invocation`].

pub mod trigger;

use relay_domain::{ActionId, AgentId, InvocationId, NodeId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::field::{Id, Timestamp, ToValue as _};

/// Body of `POST /v1/actions`.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct ActionBody {
    /// Name of the action.
    #[schema(max_length = 128, example = "build")]
    pub name: String,
    /// Description for people.
    #[serde(default)]
    pub description: Option<String>,
    /// Name of the agent that handles the action. Exclusive with `handler_node`.
    #[serde(default)]
    pub handler_agent: Option<String>,
    /// Name of the node that handles the action; it must have a capability of this name.
    #[serde(default)]
    pub handler_node: Option<String>,
    /// JSON schema of the input.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub input_schema: Option<Value>,
    /// JSON schema of the output.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub output_schema: Option<Value>,
    /// Names of the agents that may invoke it; null allows all.
    #[serde(default)]
    pub available_to: Option<Vec<String>>,
}

/// Definition of an action.
#[derive(Debug, Serialize, ToSchema)]
pub struct Action {
    /// Id of the action.
    #[schema(value_type = String, example = "act_243812004871278592")]
    pub id: ActionId,
    /// Name of the action.
    #[schema(example = "build")]
    pub name: String,
    /// Description for people.
    #[schema(example = "Builds a revision.")]
    pub description: String,
    /// Name of the handling agent; null when a node handles the action, or empty for clients that do not accept null.
    #[schema(example = "builder")]
    pub handler_agent: Option<String>,
    /// Name of the node that handles the action.
    pub handler_node: Option<String>,
    /// Id of the node that handles the action.
    #[schema(value_type = Option<String>)]
    pub handler_node_id: Option<NodeId>,
    /// JSON schema of the input; `{}` accepts anything.
    #[schema(value_type = Object)]
    pub input_schema: Value,
    /// JSON schema of the output.
    #[schema(value_type = Object)]
    pub output_schema: Value,
    /// Names of the agents that may invoke it; null allows all.
    pub available_to: Option<Vec<String>>,
    /// Always true; deleted actions are not returned.
    pub is_active: bool,
    /// Time of creation.
    pub created_at: Timestamp,
}

/// Body of `POST /v1/actions/:name/invoke`.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct InvokeBody {
    /// Input of the action; `{}` when absent or null.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub input: Option<Value>,
    /// `true` delivers the outcome to the caller's mailbox, where it stays until it is acknowledged.
    #[serde(default)]
    pub durable: Option<bool>,
}

/// Accepted invocation.
#[derive(Debug, Serialize, ToSchema)]
pub struct InvocationAck {
    /// Id of the invocation.
    #[schema(value_type = String, example = "inv_243812004871278592")]
    pub invocation_id: InvocationId,
    /// Name of the invoked action.
    #[schema(example = "build")]
    pub action_name: String,
    /// Id of the agent that handles the action.
    #[schema(value_type = Option<Id>)]
    pub handler_agent_id: Option<AgentId>,
    /// Id of the node that handles the action: the one that must, otherwise the one that it was placed on.
    #[schema(value_type = Option<String>)]
    pub handler_node_id: Option<NodeId>,
    /// Id of the node that the invocation was sent to.
    #[schema(value_type = Option<String>)]
    pub dispatched_node_id: Option<NodeId>,
    /// Input of the invocation.
    #[schema(value_type = Object)]
    pub input: Value,
    /// pending, dispatched, invoked, completed or failed.
    #[schema(example = "dispatched")]
    pub status: &'static str,
    /// Time of creation.
    pub created_at: Timestamp,
}

/// Query of `GET /v1/actions/:name/invocations/:id`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct InvocationQuery {
    /// `true` adds the placement decisions to the answer.
    #[serde(default)]
    pub explain: Option<String>,
}

/// Invocation of an action.
#[derive(Debug, Serialize, ToSchema)]
pub struct Invocation {
    /// Id of the invocation.
    #[schema(value_type = String, example = "inv_243812004871278592")]
    pub invocation_id: InvocationId,
    /// Name of the invoked action.
    #[schema(example = "build")]
    pub action_name: String,
    /// Id of the caller; `workspace` for the workspace key.
    #[schema(example = "243812050000000001")]
    pub caller_id: String,
    /// Name of the caller.
    #[schema(example = "ada")]
    pub caller_name: String,
    /// Input of the invocation.
    #[schema(value_type = Object)]
    pub input: Value,
    /// Output of the invocation, as the handler sent it. Rust clients receive a value that is no object as
    /// `{"value": …}`.
    #[schema(value_type = Option<Value>)]
    pub output: Option<Value>,
    /// pending, dispatched, invoked, completed or failed.
    #[schema(example = "completed")]
    pub status: String,
    /// Error of a failed invocation.
    pub error: Option<String>,
    /// Duration in milliseconds.
    pub duration_ms: Option<i64>,
    /// Id of the node of the latest attempt.
    pub dispatched_node_id: Option<String>,
    /// Time at which the latest attempt was sent.
    pub dispatched_at: Option<Timestamp>,
    /// Time at which the node reported that the work has begun. Absent for nodes that do not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub accepted_at: Option<Timestamp>,
    /// Time of creation.
    pub created_at: Timestamp,
    /// Time of the outcome.
    pub completed_at: Option<Timestamp>,
    /// Placement decisions, newest attempt last. Only with `explain=true`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub placements: Option<Vec<PlacementReport>>,
}

/// Placement decision of one attempt.
#[derive(Debug, Serialize, ToSchema)]
pub struct PlacementReport {
    /// Number of the attempt, from 1.
    pub attempt: i64,
    /// Time of the decision.
    pub at: Option<Timestamp>,
    /// Required capability.
    #[schema(example = "build")]
    pub capability: String,
    /// Id of the only eligible node, if it was fixed.
    pub target_node_id: Option<String>,
    /// The chosen node with the facts that it was chosen by.
    #[schema(value_type = Option<Object>)]
    pub chosen: Value,
    /// Number of nodes with the capability.
    pub candidates: i64,
    /// Ineligible nodes with their reasons: not_live, draining, handlers_not_live, full, avoided, not_targeted,
    /// lacks_capability.
    #[schema(value_type = Vec<Object>)]
    pub skipped: Value,
    /// Number of further ineligible nodes.
    pub skipped_unnamed: i64,
}

/// Body of `POST /v1/actions/:name/invocations/:id/complete`.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct CompleteBody {
    /// Output of the invocation.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub output: Option<Value>,
    /// Error of a failed invocation. Exclusive with `output`.
    #[serde(default)]
    pub error: Option<String>,
    /// Duration in milliseconds.
    #[serde(default)]
    pub duration_ms: Option<f64>,
}

/// Converts an output into the form that callers receive. Typed clients accept only an object or null, so any other
/// value becomes `{"value": …}`.
#[must_use]
pub fn output_object(output: Option<&Value>) -> Option<Value> {
    match output {
        None | Some(Value::Null) => None,
        Some(object @ Value::Object(_)) => Some(object.clone()),
        Some(value) => Some(ScalarOutput { value }.to_value()),
    }
}

#[derive(Serialize)]
struct ScalarOutput<'a> {
    value: &'a Value,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_output_is_shown_as_an_object_or_null() {
        for (output, shown) in [
            (None, None),
            (Some(json!(null)), None),
            (Some(json!({ "sum": 4 })), Some(json!({ "sum": 4 }))),
            (Some(json!(4)), Some(json!({ "value": 4 }))),
            (Some(json!([1, 2])), Some(json!({ "value": [1, 2] }))),
        ] {
            assert_eq!(output_object(output.as_ref()), shown, "{output:?}");
        }
    }
}
