//! Bodies of the routes that bring agents up and end them.

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

/// `POST /v1/agents/spawn`. Fields that are not named here go to the node all the same.
#[derive(Debug, ToSchema)]
pub struct SpawnBody {
    /// What the agent is called.
    #[schema(example = "writer")]
    pub name: String,
    /// What it runs in: a node with the capability `spawn:<cli>` is looked for.
    #[schema(example = "claude")]
    pub cli: Option<String>,
    /// The capability itself, instead of `cli`.
    #[schema(example = "spawn:claude")]
    pub capability: Option<String>,
    /// The only node that may, by name; `self` is the caller's own. Also read as `node` or `target`.
    pub target_node: Option<String>,
    /// A session to take up again: goes to the node that last ran it.
    pub session_ref: Option<String>,
    /// What it is to do.
    pub task: Option<String>,
    /// A channel that it joins.
    #[schema(example = "general")]
    pub channel: Option<String>,
    /// More channels that it joins.
    pub channels: Option<Vec<String>>,
    /// Who it is.
    pub persona: Option<String>,
    /// Which model it runs with.
    pub model: Option<String>,
    /// For its harness; passed on.
    #[schema(rename = "harnessConfig", value_type = Option<Object>)]
    pub harness_config: Option<Value>,
    /// Passed on.
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Value>,
    /// Whether the outcome goes into the caller's mailbox, where it stays until it is acknowledged.
    pub durable: Option<bool>,
}

/// `POST /v1/agents/release`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ReleaseBody {
    /// The agent's name.
    #[schema(example = "writer")]
    pub name: String,
    /// Why, for its node.
    #[serde(default)]
    #[schema(max_length = 2048)]
    pub reason: Option<String>,
    /// Whether it is deleted once it has ended. False unless given.
    #[serde(default)]
    pub delete_agent: Option<bool>,
    /// SHA-256 of its token in hexadecimal: it is ended only if it has this one still.
    #[serde(default)]
    #[schema(pattern = "^[0-9a-fA-F]{64}$")]
    pub expected_token_hash: Option<String>,
    /// Whether the outcome goes into the caller's mailbox, where it stays until it is acknowledged.
    #[serde(default)]
    pub durable: Option<bool>,
}

/// `POST /v1/agents/release-exact`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ReleaseExactBody {
    /// What is to be released.
    #[serde(flatten)]
    pub release: ReleaseBody,
    /// The agent's id.
    #[schema(example = "243812004871278592")]
    pub expected_agent_id: String,
}
