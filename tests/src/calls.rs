//! Scene of invocation tests: an agent that calls, and nodes that handle actions.

use std::time::Duration;

use anyhow::{Context as _, Result};
use relay_testkit::{
    client::{Agent, Api, ConnectError, NodeSocket, NodeToken},
    shared, wait,
};
use serde_json::{Value, json};

/// Timeout of asynchronous effects.
pub const SOON: Duration = Duration::from_secs(30);

/// Workspace with a calling agent.
pub struct CallScene {
    /// Client with the workspace key.
    pub key: Api,
    ann: Agent,
}

impl CallScene {
    /// Creates the scene on the shared engine.
    pub async fn new(name: &str) -> Result<Self> {
        let key = Api::create_workspace(&shared().await.gateways[0], name).await?;
        let ann = key.register_agent("ann").await?;
        Ok(Self { key, ann })
    }

    pub fn ann(&self) -> Api {
        self.key.as_agent(&self.ann)
    }

    /// Creates an unconnected broker node with this name.
    pub async fn node(&self, name: &str) -> Result<NodeToken> {
        self.key.create_broker_node(&format!("node_{}", uuid::Uuid::new_v4().simple()), name).await
    }

    /// Invokes an action and returns the invocation's id.
    pub async fn invoke(&self, action: &str, body: Value) -> Result<String> {
        let ack = self.ann().post(&format!("/v1/actions/{action}/invoke"), body).await?.success()?;
        Ok(ack["invocation_id"].as_str().context("an id")?.to_owned())
    }

    /// Reads an invocation with its placement decisions.
    pub async fn invocation(&self, action: &str, id: &str) -> Result<Value> {
        self.key.get(&format!("/v1/actions/{action}/invocations/{id}?explain=true")).await?.success()
    }

    /// Waits until an invocation has its outcome.
    pub async fn wait_for_outcome(&self, action: &str, id: &str) -> Result<Value> {
        wait::until("an outcome", SOON, || async {
            self.invocation(action, id).await.is_ok_and(|row| row["completed_at"].is_string())
        })
        .await;
        self.invocation(action, id).await
    }
}

/// Opens a node's socket at a gateway without registering.
pub async fn socket(node: &NodeToken, gateway: usize) -> Result<NodeSocket, ConnectError> {
    let base = shared().await.gateways[gateway].replacen("http", "ws", 1);
    NodeSocket::connect(&base, &node.token).await
}

/// Returns the registration frame of a provider.
pub fn register(node: &NodeToken, provider: &str, capabilities: &Value, max_agents: u32) -> Value {
    json!({
        "v": 1, "type": "node.register", "name": node.name, "node_id": node.node_id, "capabilities": capabilities,
        "provider": { "name": provider, "instance_id": format!("of-{}", node.node_id) },
        "max_agents": max_agents, "tags": [], "version": "test/1",
    })
}

/// Waits for the next invocation sent to a node and returns its id.
pub async fn next_invocation(socket: &mut NodeSocket, within: Duration) -> Result<String> {
    let frame = socket.expect_where("an invocation", within, |frame| frame["type"] == "action.invoke").await?;
    Ok(frame["invocation_id"].as_str().context("an id")?.to_owned())
}

/// Reports that the node cannot perform the invocation.
pub async fn report_unable(socket: &NodeSocket, id: &str) -> Result<()> {
    let error = json!({ "v": 1, "type": "action.result", "invocation_id": id, "error": "handler_unavailable" });
    socket.send_json(&error).await
}

/// Sends the result of an invocation.
pub async fn send_result(socket: &NodeSocket, id: &str, output: Value) -> Result<()> {
    socket.send_json(&json!({ "v": 1, "type": "action.result", "invocation_id": id, "output": output })).await
}
