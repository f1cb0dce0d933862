//! Request bodies for spawning and releasing agents.

use relay_domain::{AgentId, InvocationId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// Output of the invocation that spawned an agent, unless its provider reported one.
#[derive(Debug, Serialize)]
pub struct SpawnOutput<'a> {
    /// Id of the agent.
    pub agent_id: AgentId,
    /// Name of the agent.
    pub name: &'a str,
    /// Id of the invocation.
    pub invocation_id: InvocationId,
    /// Handle for resuming its session.
    pub session_ref: Option<&'a str>,
}

/// Body of `POST /v1/agents/spawn`. Further fields are passed to the node.
#[derive(Debug, ToSchema)]
pub struct SpawnBody {
    /// Name of the agent.
    #[schema(example = "writer")]
    pub name: String,
    /// CLI to run: selects nodes with the capability `spawn:<cli>`.
    #[schema(example = "claude")]
    pub cli: Option<String>,
    /// Required capability, instead of `cli`.
    #[schema(example = "spawn:claude")]
    pub capability: Option<String>,
    /// Name of the only eligible node; `self` is the caller's own. Also accepted as `node` or `target`.
    pub target_node: Option<String>,
    /// Session to resume: goes to the node that last ran it.
    pub session_ref: Option<String>,
    /// Task of the agent.
    pub task: Option<String>,
    /// Channel to join.
    #[schema(example = "general")]
    pub channel: Option<String>,
    /// Further channels to join.
    pub channels: Option<Vec<String>>,
    /// Persona: a description of the agent.
    pub persona: Option<String>,
    /// Model to use.
    pub model: Option<String>,
    /// Configuration of the harness, passed on.
    #[schema(rename = "harnessConfig", value_type = Option<Object>)]
    pub harness_config: Option<Value>,
    /// Free-form metadata, passed on.
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Value>,
    /// `true` delivers the outcome to the caller's mailbox, where it stays until it is acknowledged.
    pub durable: Option<bool>,
}

/// Body of `POST /v1/agents/release`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ReleaseBody {
    /// Name of the agent.
    #[schema(example = "writer")]
    pub name: String,
    /// Reason for its node.
    #[serde(default)]
    #[schema(max_length = 2048)]
    pub reason: Option<String>,
    /// `true` deletes the agent after it has ended. False by default.
    #[serde(default)]
    pub delete_agent: Option<bool>,
    /// SHA-256 of its token in hexadecimal. The agent is released only if its token still matches.
    #[serde(default)]
    #[schema(pattern = "^[0-9a-fA-F]{64}$")]
    pub expected_token_hash: Option<String>,
    /// `true` delivers the outcome to the caller's mailbox, where it stays until it is acknowledged.
    #[serde(default)]
    pub durable: Option<bool>,
}

/// Body of `POST /v1/agents/release-exact`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ReleaseExactBody {
    /// The release request.
    #[serde(flatten)]
    pub release: ReleaseBody,
    /// Id that the agent must have.
    #[schema(example = "243812004871278592")]
    pub expected_agent_id: String,
}

/// Input of the release that a node carries out.
#[derive(Debug, Serialize)]
pub struct ReleaseInput<'a> {
    /// Name of the agent.
    pub name: &'a str,
    /// Reason that the caller gave.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'a str>,
    /// Whether the agent is deleted after its release.
    pub delete_agent: bool,
    /// Token hash that the caller expects, for nodes that compare it with the token they hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected_token_hash: Option<&'a str>,
}

/// Output of a release that needed no node.
#[derive(Debug, Serialize)]
pub struct Released<'a> {
    /// Always `true`.
    pub released: bool,
    /// Name of the agent.
    pub name: &'a str,
}
