//! An agent that calls, and nodes that are asked: what tests of invocations begin with.

use std::time::Duration;

use anyhow::{Context as _, Result};
use relay_testkit::{
    client::{Agent, Api, ConnectError, NodeSocket, NodeToken},
    shared, wait,
};
use serde_json::{Value, json};

/// What happens by itself does so within this.
pub const SOON: Duration = Duration::from_secs(30);

/// A workspace with an agent that calls.
pub struct Place {
    /// With the workspace's key.
    pub key: Api,
    ann: Agent,
}

impl Place {
    /// On the shared engine.
    pub async fn new(name: &str) -> Result<Self> {
        let key = Api::create_workspace(&shared().await.gateways[0], name).await?;
        let ann = key.register_agent("ann").await?;
        Ok(Self { key, ann })
    }

    /// The agent.
    pub fn ann(&self) -> Api {
        self.key.as_agent(&self.ann)
    }

    /// A broker's node of this name, not connected.
    pub async fn node(&self, name: &str) -> Result<NodeToken> {
        self.key.create_broker_node(&format!("node_{}", uuid::Uuid::new_v4().simple()), name).await
    }

    /// Invokes an action; returns the invocation's id.
    pub async fn invoke(&self, action: &str, body: Value) -> Result<String> {
        let ack = self.ann().post(&format!("/v1/actions/{action}/invoke"), body).await?.success()?;
        Ok(ack["invocation_id"].as_str().context("an id")?.to_owned())
    }

    /// An invocation, with the reasons of its placement.
    pub async fn invocation(&self, action: &str, id: &str) -> Result<Value> {
        self.key.get(&format!("/v1/actions/{action}/invocations/{id}?explain=true")).await?.success()
    }

    /// An invocation once it has its outcome.
    pub async fn ends(&self, action: &str, id: &str) -> Result<Value> {
        wait::until("an outcome", SOON, || async {
            self.invocation(action, id).await.is_ok_and(|row| row["completed_at"].is_string())
        })
        .await;
        self.invocation(action, id).await
    }
}

/// A node's socket at a gateway, not registered yet.
pub async fn socket(node: &NodeToken, gateway: usize) -> Result<NodeSocket, ConnectError> {
    let base = shared().await.gateways[gateway].replacen("http", "ws", 1);
    NodeSocket::connect(&base, &node.token).await
}

/// A provider's registration on a node.
pub fn register(node: &NodeToken, provider: &str, capabilities: &Value, max_agents: u32) -> Value {
    json!({
        "v": 1, "type": "node.register", "name": node.name, "node_id": node.node_id, "capabilities": capabilities,
        "provider": { "name": provider, "instance_id": format!("of-{}", node.node_id) },
        "max_agents": max_agents, "tags": [], "version": "test/1",
    })
}

/// The id of the next invocation that a node is asked for.
pub async fn told_to(socket: &mut NodeSocket, within: Duration) -> Result<String> {
    let frame = socket.expect_where("an invocation", within, |frame| frame["type"] == "action.invoke").await?;
    Ok(frame["invocation_id"].as_str().context("an id")?.to_owned())
}

/// That the node cannot do it.
pub async fn unable(socket: &NodeSocket, id: &str) -> Result<()> {
    let error = json!({ "v": 1, "type": "action.result", "invocation_id": id, "error": "handler_unavailable" });
    socket.send_json(&error).await
}

/// An invocation's result.
pub async fn result(socket: &NodeSocket, id: &str, output: Value) -> Result<()> {
    socket.send_json(&json!({ "v": 1, "type": "action.result", "invocation_id": id, "output": output })).await
}
