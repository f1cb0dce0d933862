//! Bodies of the node routes.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::{field::Timestamp, words};

/// `POST /v1/nodes`. What is left out keeps its stored value.
#[derive(Debug, Deserialize, ToSchema)]
pub struct EnrolNodeBody {
    /// A stable id of the caller's choice.
    #[serde(default)]
    pub node_id: Option<String>,
    /// The name; one leading `#` is dropped.
    pub name: String,
    /// What a broker without a stable id is recognised by.
    #[serde(default)]
    pub machine_id: Option<String>,
    /// ws (when absent), http_push or poll; fleet_ws and direct_ws of old.
    #[serde(default)]
    pub kind: Option<String>,
    /// direct or broker.
    #[serde(default)]
    pub role: Option<String>,
    /// `ws.node.v1`, `poll.v1`, or one of `http.….v1`, which follows from `delivery.auth`.
    #[serde(default)]
    pub delivery_adapter: Option<String>,
    /// How a node of kind http_push is called.
    #[serde(default)]
    #[schema(value_type = Option<NodeDelivery>)]
    pub delivery: Option<Value>,
    /// Names, or objects as the roster shows them.
    #[serde(default)]
    pub capabilities: Option<Vec<CapabilityGiven>>,
    /// 0 for unlimited.
    #[serde(default)]
    pub max_agents: Option<i64>,
    /// Free words.
    #[serde(default)]
    pub tags: Option<Vec<String>>,
    /// Free text.
    #[serde(default)]
    pub version: Option<String>,
}

/// `PATCH /v1/nodes/:name`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ChangeNodeBody {
    /// What of it is given replaces what is stored.
    #[schema(value_type = NodeDelivery)]
    pub delivery: Value,
}

/// How a node of kind http_push is called. Secrets read `[redacted]`; giving that back keeps them.
#[derive(Debug, ToSchema)]
pub struct NodeDelivery {
    /// Where deliveries are posted: https, and a public address.
    #[schema(example = "https://example.org/relay")]
    pub url: String,
    /// manual (when absent), on_2xx or response.
    #[schema(nullable = false, example = "on_2xx")]
    pub ack_mode: Option<String>,
    /// `{type, …}`: none (when absent), bearer, static_headers or hmac_sha256.
    #[schema(value_type = Option<Object>, nullable = false, example = json!({ "type": "bearer", "token": "6b1f0c9d2e8a4753" }))]
    pub auth: Option<Value>,
    /// Whether calls go through the operator's proxy.
    #[schema(nullable = false)]
    pub use_proxy: Option<bool>,
    /// seq (when absent) or none.
    #[schema(nullable = false, example = "seq")]
    pub ordering: Option<String>,
    /// `{schedule}`: `standard-webhooks`, or seconds. Absent: every 30 s until the delivery expires.
    #[schema(value_type = Option<Object>, nullable = false, example = json!({ "schedule": "standard-webhooks" }))]
    pub retry: Option<Value>,
}

/// A capability as a client gives it.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum CapabilityGiven {
    /// Its name alone.
    Name(String),
    /// As the roster shows it.
    Object {
        /// Its name.
        name: String,
        /// action, capacity, or a legacy word.
        #[serde(default)]
        kind: Option<String>,
        /// Passed through.
        #[serde(default)]
        metadata: Option<Value>,
    },
}

/// `GET /v1/nodes`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct NodesQuery {
    /// Only nodes with this capability.
    #[serde(default)]
    pub capability: Option<String>,
    /// Only the node of this name.
    #[serde(default)]
    pub name: Option<String>,
    /// online or offline.
    #[serde(default)]
    pub status: Option<String>,
    /// Where to go on: the `next_cursor` of the page before.
    #[serde(default)]
    pub cursor: Option<String>,
    /// `true`: answer with a page, which says where the next begins, instead of a list.
    #[serde(default)]
    pub history: Option<String>,
    /// How many at most.
    #[serde(default)]
    #[param(value_type = Option<i64>, minimum = 1)]
    pub limit: Option<String>,
}

/// Some of the nodes, in the form that was asked for.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Nodes {
    /// Without `history`.
    List(Vec<Node>),
    /// With it.
    Page(NodesPage),
}

/// A page of nodes.
#[derive(Debug, Serialize, ToSchema)]
pub struct NodesPage {
    /// The nodes.
    pub nodes: Vec<Node>,
    /// Where the next page begins; null when this is the last.
    pub next_cursor: Option<String>,
}

/// A capability as the roster shows it.
#[derive(Debug, ToSchema)]
pub struct ShownCapability {
    /// Its name.
    #[schema(example = "spawn:claude")]
    pub name: String,
    /// action or capacity.
    #[schema(example = "capacity")]
    pub kind: String,
    /// Passed through.
    #[schema(value_type = Option<Object>, nullable = false)]
    pub metadata: Option<Value>,
}

/// A roster entry.
#[derive(Debug, Serialize, ToSchema)]
pub struct Node {
    /// The node.
    pub id: String,
    /// Its name.
    pub name: String,
    /// ws, http_push or poll.
    #[schema(value_type = words::NodeKind)]
    pub kind: String,
    /// direct or broker.
    #[schema(value_type = words::NodeRole)]
    pub role: String,
    /// What it is recognised by without an id.
    pub machine_id: Option<String>,
    /// How deliveries reach it.
    pub delivery_adapter: String,
    /// Where to, for nodes that are pushed to.
    #[schema(value_type = Option<Object>)]
    pub delivery: Option<Value>,
    /// `{name, kind, metadata?}` each.
    #[schema(value_type = Vec<ShownCapability>)]
    pub capabilities: Vec<Value>,
    /// Free words.
    pub tags: Vec<String>,
    /// Free text; empty if the node has not told it.
    pub version: String,
    /// online or offline.
    #[schema(value_type = words::NodeStatus)]
    pub status: &'static str,
    /// Whether a provider is connected and was heard of lately.
    pub live: bool,
    /// Whether its handlers run.
    pub handlers_live: bool,
    /// From 0 to 1; 0 when nobody measured.
    pub load: f64,
    /// Agents that it has.
    pub active_agents: i32,
    /// Places promised to agents on their way.
    pub reserved_agents: i64,
    /// Agents that it takes; 0 for unlimited.
    pub max_agents: i32,
    /// The processes that serve it.
    pub providers: Vec<NodeProvider>,
    /// When it was last heard of.
    pub last_heartbeat_at: Option<Timestamp>,
    /// When it was first enrolled.
    pub created_at: Timestamp,
}

/// A process that serves a node, in the roster.
#[derive(Debug, Serialize, ToSchema)]
pub struct NodeProvider {
    /// Its name.
    #[schema(example = "broker")]
    pub name: String,
    /// Whether it is connected and was heard of lately.
    pub live: bool,
    /// Whether its handlers run.
    pub handlers_live: bool,
    /// From 0 to 1; 0 when nobody measured.
    pub load: f64,
    /// Agents that it has.
    pub active_agents: i32,
    /// Places promised to agents on their way.
    pub reserved_agents: i64,
    /// Agents that it takes; 0 for unlimited.
    pub max_agents: i32,
    /// Free text; empty if it has not told it.
    pub version: String,
    /// When it was last heard of.
    pub last_heartbeat_at: Timestamp,
}

/// Answer to `POST /v1/nodes`.
#[derive(Debug, Serialize, ToSchema)]
pub struct EnrolledNode {
    /// The node.
    #[serde(flatten)]
    pub node: Node,
    /// Its only valid token, shown this once.
    #[schema(example = "nt_live_6b1f0c9d2e8a4753b1f0c9d2e8a47536")]
    pub token: String,
}

/// `POST /v1/nodes/:name/agents`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct BindAgentBody {
    /// Whom.
    #[serde(alias = "agent")]
    pub agent_name: String,
    /// What the broker resumes the agent's session by.
    #[serde(default)]
    pub session_ref: Option<String>,
    /// Kept, not used.
    #[serde(default)]
    pub priority: Option<i32>,
}

/// An agent located on a node.
#[derive(Debug, Serialize, ToSchema)]
pub struct Binding {
    /// `anb_…`
    pub id: String,
    /// The agent.
    pub agent_id: String,
    /// Its name.
    pub agent_name: String,
    /// The node.
    pub node_id: String,
    /// Its name.
    pub node_name: String,
    /// Its kind.
    #[schema(value_type = words::NodeKind)]
    pub node_kind: String,
    /// Its role.
    #[schema(value_type = words::NodeRole)]
    pub node_role: String,
    /// active, or disabled by its endpoint; other locations are not listed.
    #[schema(example = "active")]
    pub status: &'static str,
    /// What the broker resumes the agent's session by.
    pub session_ref: Option<String>,
    /// As given.
    pub priority: i32,
    /// Since when.
    pub created_at: Timestamp,
    /// When it was last renewed.
    pub updated_at: Option<Timestamp>,
    /// The agent's mailbox is settled up to here.
    pub delivery_ack_seq: i64,
}

/// Answer to `POST /v1/agent/node-token`.
#[derive(Debug, Serialize, ToSchema)]
pub struct NodeToken {
    /// The agent's own node.
    pub node_id: String,
    /// Its name.
    pub node_name: String,
    /// Its only valid token, shown this once.
    #[schema(example = "nt_live_6b1f0c9d2e8a4753b1f0c9d2e8a47536")]
    pub token: String,
}
