//! Bodies of the node routes.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::field::Timestamp;

/// `POST /v1/nodes`. What is left out keeps its stored value.
#[derive(Debug, Deserialize)]
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
    /// `ws.node.v1`.
    #[serde(default)]
    pub delivery_adapter: Option<String>,
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

/// A capability as a client gives it.
#[derive(Debug, Deserialize)]
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
#[derive(Debug, Default, Deserialize)]
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
    /// How many at most.
    #[serde(default)]
    pub limit: Option<String>,
}

/// A roster entry.
#[derive(Debug, Serialize)]
pub struct Node {
    /// The node.
    pub id: String,
    /// Its name.
    pub name: String,
    /// ws, http_push or poll.
    pub kind: String,
    /// direct or broker.
    pub role: String,
    /// What it is recognised by without an id.
    pub machine_id: Option<String>,
    /// How deliveries reach it.
    pub delivery_adapter: String,
    /// Where to, for nodes that are pushed to.
    pub delivery: Option<Value>,
    /// `{name, kind, metadata?}` each.
    pub capabilities: Vec<Value>,
    /// Free words.
    pub tags: Vec<String>,
    /// Free text.
    pub version: Option<String>,
    /// online or offline.
    pub status: &'static str,
    /// Whether a provider is connected and was heard of lately.
    pub live: bool,
    /// Whether its handlers run.
    pub handlers_live: bool,
    /// From 0 to 1; 0 when nobody measured.
    pub load: f64,
    /// Agents that it has.
    pub active_agents: i32,
    /// Agents that it takes; 0 for unlimited.
    pub max_agents: i32,
    /// When it was last heard of.
    pub last_heartbeat_at: Option<Timestamp>,
    /// When it was first enrolled.
    pub created_at: Timestamp,
}

/// Answer to `POST /v1/nodes`.
#[derive(Debug, Serialize)]
pub struct EnrolledNode {
    /// The node.
    #[serde(flatten)]
    pub node: Node,
    /// Its only valid token, shown this once.
    pub token: String,
}

/// `POST /v1/nodes/:name/agents`.
#[derive(Debug, Deserialize)]
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
#[derive(Debug, Serialize)]
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
    pub node_kind: String,
    /// Its role.
    pub node_role: String,
    /// Always active: an agent has one location, and others are not listed.
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
#[derive(Debug, Serialize)]
pub struct NodeToken {
    /// The agent's own node.
    pub node_id: String,
    /// Its name.
    pub node_name: String,
    /// Its only valid token, shown this once.
    pub token: String,
}
