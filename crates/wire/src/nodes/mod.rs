//! Request and response bodies of the node routes; main types: [`EnrolNodeBody`], [`Node`] and [`Binding`].
//! The frames of the node socket: those that nodes send in [`frame`], those of the engine in [`deliver_frame`] and
//! [`invoke_frame`], as a node reads them in [`engine_frame`], the data of its answers in [`replies`]. The requests to
//! endpoints of `http_push` nodes in [`push_request`].

pub mod deliver_frame;
pub mod engine_frame;
pub mod frame;
pub mod invoke_frame;
pub mod push_request;
pub mod replies;

use relay_domain::JsonText;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::{field::Timestamp, words};

/// Body of `POST /v1/nodes`. Absent fields keep their stored value.
#[derive(Debug, Clone, Deserialize, ToSchema)]
pub struct EnrolNodeBody {
    /// Stable id chosen by the caller.
    #[serde(default)]
    pub node_id: Option<String>,
    /// Name of the node; one leading `#` is removed.
    pub name: String,
    /// Id of the machine, which identifies a broker without a stable node id.
    #[serde(default)]
    pub machine_id: Option<String>,
    /// Kind: ws (default), http_push or poll; fleet_ws and direct_ws are legacy words.
    #[serde(default)]
    pub kind: Option<String>,
    /// direct or broker.
    #[serde(default)]
    pub role: Option<String>,
    /// `ws.node.v1`, `poll.v1`, or one of `http.….v1`, which follows from `delivery.auth`.
    #[serde(default)]
    pub delivery_adapter: Option<String>,
    /// Delivery settings of a node of kind http_push.
    #[serde(default)]
    #[schema(value_type = Option<NodeDelivery>)]
    pub delivery: Option<Value>,
    /// Capabilities: names, or objects as in the roster.
    #[serde(default)]
    pub capabilities: Option<Vec<CapabilityInput>>,
    /// Maximum number of agents; 0 for unlimited.
    #[serde(default)]
    pub max_agents: Option<i64>,
    /// Free-form tags of the node.
    #[serde(default)]
    pub tags: Option<Vec<String>>,
    /// Free-form version of the software.
    #[serde(default)]
    pub version: Option<String>,
    /// `false` keeps the token of an existing node: the one in the header `X-Relaycast-Node-Token`. By default a new
    /// token replaces it, and sockets of the old one close.
    #[serde(default)]
    #[schema(nullable = false)]
    pub rotate: Option<bool>,
}

/// Body of `PATCH /v1/nodes/:name`. Absent fields keep their stored value.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct ChangeNodeBody {
    /// New name of the node; one leading `#` is removed.
    #[serde(default)]
    #[schema(nullable = false)]
    pub name: Option<String>,
    /// Id of the machine, which identifies a broker without a stable node id.
    #[serde(default)]
    #[schema(nullable = false)]
    pub machine_id: Option<String>,
    /// Delivery settings to replace; absent ones keep their value.
    #[serde(default)]
    #[schema(value_type = Option<NodeDelivery>, nullable = false)]
    pub delivery: Option<Value>,
    /// Capabilities: names, or objects as in the roster. Those of connected providers are not affected.
    #[serde(default)]
    #[schema(nullable = false)]
    pub capabilities: Option<Vec<CapabilityInput>>,
    /// Maximum number of agents; 0 for unlimited.
    #[serde(default)]
    #[schema(nullable = false)]
    pub max_agents: Option<i64>,
    /// Free-form tags of the node.
    #[serde(default)]
    #[schema(nullable = false)]
    pub tags: Option<Vec<String>>,
    /// Free-form version of the software.
    #[serde(default)]
    #[schema(nullable = false)]
    pub version: Option<String>,
}

/// Delivery settings of a node of kind http_push. Secrets are shown as `[redacted]`; sending that back keeps them.
#[derive(Debug, ToSchema)]
pub struct NodeDelivery {
    /// URL for deliveries: https, with a public address.
    #[schema(example = "https://example.org/relay")]
    pub url: String,
    /// Ack mode: manual (default), on_2xx or response.
    #[schema(nullable = false, example = "on_2xx")]
    pub ack_mode: Option<String>,
    /// Authentication `{type, …}`: none (default), bearer, static_headers or hmac_sha256.
    #[schema(value_type = Option<Object>, nullable = false, example = json!({ "type": "bearer", "token": "6b1f0c9d2e8a4753" }))]
    pub auth: Option<Value>,
    /// `true` sends calls through the operator's proxy.
    #[schema(nullable = false)]
    pub use_proxy: Option<bool>,
    /// Ordering: seq (default) or none.
    #[schema(nullable = false, example = "seq")]
    pub ordering: Option<String>,
    /// Retry policy `{schedule}`: `standard-webhooks`, or seconds. Absent: every 30 s until the delivery expires.
    #[schema(value_type = Option<Object>, nullable = false, example = json!({ "schedule": "standard-webhooks" }))]
    pub retry: Option<Value>,
}

/// Capability in a request.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(untagged)]
#[schema(as = CapabilityGiven)]
pub enum CapabilityInput {
    /// The name alone.
    Name(String),
    /// An object as in the roster.
    Object {
        /// Its name.
        name: String,
        /// action, capacity, or a legacy word.
        #[serde(default)]
        kind: Option<String>,
        /// Free-form metadata, passed through.
        #[serde(default)]
        metadata: Option<Value>,
    },
}

/// Query of `GET /v1/nodes`.
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
    /// Cursor of the next page: the `next_cursor` of the previous one.
    #[serde(default)]
    pub cursor: Option<String>,
    /// `true` returns a page with a cursor instead of a list.
    #[serde(default)]
    pub history: Option<String>,
    /// Maximum number of entries.
    #[serde(default)]
    #[param(value_type = Option<i64>, minimum = 1)]
    pub limit: Option<String>,
}

/// List or page of nodes.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Nodes {
    /// Response without `history`.
    List(Vec<Node>),
    /// Response with `history=true`.
    Page(NodesPage),
}

/// Page of nodes.
#[derive(Debug, Serialize, ToSchema)]
pub struct NodesPage {
    // Before the nodes: a list that is sent in parts is the last empty array of its answer, and a name may have `[]`.
    /// Cursor of the next page; null on the last page.
    pub next_cursor: Option<String>,
    /// Nodes of the page.
    pub nodes: Vec<Node>,
}

/// Capability in the roster.
#[derive(Debug, ToSchema)]
pub struct ShownCapability {
    /// Name of the capability.
    #[schema(example = "spawn:claude")]
    pub name: String,
    /// action or capacity.
    #[schema(example = "capacity")]
    pub kind: String,
    /// Free-form metadata, passed through.
    #[schema(value_type = Option<Object>, nullable = false)]
    pub metadata: Option<Value>,
}

/// Roster entry of a node.
#[derive(Debug, Serialize, ToSchema)]
pub struct Node {
    /// Id of the node.
    pub id: String,
    /// Name of the node.
    pub name: String,
    /// ws, http_push or poll.
    #[schema(value_type = words::NodeKind)]
    pub kind: &'static str,
    /// direct or broker.
    #[schema(value_type = words::NodeRole)]
    pub role: &'static str,
    /// Id of the machine, which identifies a broker without a stable node id.
    pub machine_id: Option<String>,
    /// Adapter that deliveries use.
    pub delivery_adapter: String,
    /// Delivery settings of an http_push node.
    #[schema(value_type = Option<Object>)]
    pub delivery: Option<Value>,
    /// Capabilities, `{name, kind, metadata?}` each.
    #[schema(value_type = Vec<ShownCapability>)]
    pub capabilities: Vec<JsonText>,
    /// Free-form tags of the node.
    pub tags: Vec<String>,
    /// Version of the software; empty if unknown.
    pub version: String,
    /// online or offline.
    #[schema(value_type = words::NodeStatus)]
    pub status: &'static str,
    /// `true` if a provider is connected and has sent a recent heartbeat.
    pub live: bool,
    /// `true` if its handlers run.
    pub handlers_live: bool,
    /// Load from 0 to 1; 0 if it is not measured.
    pub load: f64,
    /// Number of agents bound to the node.
    pub active_agents: i64,
    /// `true` if the node is not live: some of its agents may have ended since.
    pub active_agents_stale: bool,
    /// Number of reservations for agents being spawned.
    pub reserved_agents: i64,
    /// Maximum number of agents; 0 for unlimited.
    pub max_agents: i32,
    /// Processes that serve the node.
    pub providers: Vec<NodeProvider>,
    /// Time of the last sign of life.
    pub last_heartbeat_at: Option<Timestamp>,
    /// Time of the first enrolment.
    pub created_at: Timestamp,
}

/// Roster entry of a provider.
#[derive(Debug, Serialize, ToSchema)]
pub struct NodeProvider {
    /// Name of the provider.
    #[schema(example = "broker")]
    pub name: String,
    /// `true` if it is connected and has sent a recent heartbeat.
    pub live: bool,
    /// `true` if its handlers run.
    pub handlers_live: bool,
    /// Load from 0 to 1; 0 if it is not measured.
    pub load: f64,
    /// Number of running agents in its last heartbeat.
    pub active_agents: i32,
    /// Number of reservations for agents being spawned.
    pub reserved_agents: i64,
    /// Maximum number of agents; 0 for unlimited.
    pub max_agents: i32,
    /// Version of the software; empty if unknown.
    pub version: String,
    /// Time of the last sign of life.
    pub last_heartbeat_at: Timestamp,
}

/// Response of `POST /v1/nodes`.
#[derive(Debug, Serialize, ToSchema)]
pub struct EnrolledNode {
    /// The node itself.
    #[serde(flatten)]
    pub node: Node,
    /// The only valid token: a new one, shown only in this response, or the presented one with `rotate: false`.
    #[schema(example = "nt_live_6b1f0c9d2e8a4753b1f0c9d2e8a47536")]
    pub token: String,
}

/// Body of `POST /v1/nodes/:name/agents`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct BindAgentBody {
    /// Name of the agent.
    #[serde(alias = "agent")]
    pub agent_name: String,
    /// Handle for resuming the agent's session.
    #[serde(default)]
    pub session_ref: Option<String>,
    /// Stored without effect.
    #[serde(default)]
    pub priority: Option<i32>,
}

/// Binding of an agent to a node.
#[derive(Debug, Serialize, ToSchema)]
pub struct Binding {
    /// Id of the binding, `anb_…`.
    pub id: String,
    /// Id of the agent.
    pub agent_id: String,
    /// Name of the agent.
    pub agent_name: String,
    /// Id of the node.
    pub node_id: String,
    /// Name of the node.
    pub node_name: String,
    /// Kind of the node.
    #[schema(value_type = words::NodeKind)]
    pub node_kind: &'static str,
    /// Role of the node.
    #[schema(value_type = words::NodeRole)]
    pub node_role: &'static str,
    /// active, or disabled by its endpoint; superseded bindings are not listed.
    #[schema(example = "active")]
    pub status: &'static str,
    /// Handle for resuming the agent's session.
    pub session_ref: Option<String>,
    /// Priority as given in the request.
    pub priority: i32,
    /// Time of creation.
    pub created_at: Timestamp,
    /// Time of the last renewal.
    pub updated_at: Option<Timestamp>,
    /// Settled floor of the agent's mailbox.
    pub delivery_ack_seq: i64,
}

/// Response of `POST /v1/agent/node-token`.
#[derive(Debug, Serialize, ToSchema)]
pub struct NodeToken {
    /// Id of the agent's own node.
    pub node_id: String,
    /// Name of the node.
    pub node_name: String,
    /// The only valid token, shown only in this response.
    #[schema(example = "nt_live_6b1f0c9d2e8a4753b1f0c9d2e8a47536")]
    pub token: String,
}
