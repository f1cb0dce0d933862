//! Calls that most tests start with.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::api::{Api, Reply};
use super::node_socket::NodeSocket;

/// Registered agent with its token.
#[derive(Clone, Debug)]
pub struct Agent {
    /// Immutable id of the agent.
    pub id: String,
    /// Name of the agent, used for routing.
    pub name: String,
    /// Token of the agent, `at_live_…`.
    pub token: String,
}

/// Node with its token.
#[derive(Clone, Debug)]
pub struct NodeToken {
    /// Id of the node.
    pub node_id: String,
    /// Name of the node.
    pub name: String,
    /// Token of the node, `nt_live_…`.
    pub token: String,
}

impl Api {
    /// Creates a workspace and returns a client with its key. A random suffix makes the name unique.
    pub async fn create_workspace(base: &str, name: &str) -> Result<Self> {
        let anonymous = Self::anonymous(base);
        let unique = format!("{name}-{}", &uuid::Uuid::new_v4().simple().to_string()[..8]);
        let data = anonymous.post("/v1/workspaces", json!({ "name": unique })).await?.success()?;
        Ok(anonymous.with_token(text(&data, "api_key")?))
    }

    /// Registers an agent (call with the workspace key).
    pub async fn register_agent(&self, name: &str) -> Result<Agent> {
        let data = self.post("/v1/agents", json!({ "name": name, "type": "agent" })).await?.success()?;
        Ok(Agent {
            id: text(&data, "id")?.to_owned(),
            name: text(&data, "name")?.to_owned(),
            token: text(&data, "token")?.to_owned(),
        })
    }

    /// Returns a client of this agent at the same gateway.
    pub fn as_agent(&self, agent: &Agent) -> Self {
        self.with_token(&agent.token)
    }

    /// Creates a channel (call with the workspace key or an agent token).
    pub async fn create_channel(&self, name: &str) -> Result<Value> {
        self.post("/v1/channels", json!({ "name": name })).await?.success()
    }

    /// Joins a channel (call with an agent token).
    pub async fn join(&self, channel: &str) -> Result<()> {
        self.post_empty(&format!("/v1/channels/{channel}/join")).await?.success()?;
        Ok(())
    }

    /// Posts to a channel (call with an agent token).
    pub async fn post_message(&self, channel: &str, message: &str) -> Result<Reply> {
        let body = json!({ "text": message, "mode": "wait" });
        self.post(&format!("/v1/channels/{channel}/messages"), body).await
    }

    /// Sends a direct message (call with an agent token).
    pub async fn dm(&self, to: &str, message: &str) -> Result<Reply> {
        self.post("/v1/dm", json!({ "to": to, "text": message, "mode": "wait" })).await
    }

    /// Creates the token of the calling agent's own direct node.
    pub async fn direct_node_token(&self) -> Result<NodeToken> {
        let data = self.post("/v1/agent/node-token", json!({})).await?.success()?;
        Ok(NodeToken {
            node_id: text(&data, "node_id")?.to_owned(),
            name: text(&data, "node_name")?.to_owned(),
            token: text(&data, "token")?.to_owned(),
        })
    }

    /// Creates a broker node, or a new token for it (call with the workspace key).
    pub async fn create_broker_node(&self, node_id: &str, name: &str) -> Result<NodeToken> {
        let body = json!({ "node_id": node_id, "name": name, "kind": "ws", "role": "broker", "version": "testkit" });
        let data = self.post("/v1/nodes", body).await?.success()?;
        Ok(NodeToken {
            node_id: text(&data, "id").unwrap_or(node_id).to_owned(),
            name: text(&data, "name")?.to_owned(),
            token: text(&data, "token")?.to_owned(),
        })
    }

    /// Binds an agent to a broker node (call with the workspace key).
    pub async fn bind(&self, node: &str, agent: &str) -> Result<Value> {
        self.post(&format!("/v1/nodes/{node}/agents"), json!({ "agent_name": agent })).await?.success()
    }

    /// Opens the calling agent's direct node socket on this gateway: node token, upgrade, register, reply.
    pub async fn direct_socket(&self) -> Result<NodeSocket> {
        let node = self.direct_node_token().await?;
        let mut socket = NodeSocket::connect(&self.ws_base(), &node.token).await?;
        socket.register_direct(&node.node_id, &node.name).await?;
        Ok(socket)
    }
}

fn text<'a>(data: &'a Value, field: &str) -> Result<&'a str> {
    data[field].as_str().with_context(|| format!("no {field} in {data}"))
}
