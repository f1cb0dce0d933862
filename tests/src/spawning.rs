//! A node that brings agents up and ends them, and an agent that asks for it.

use std::time::Duration;

use anyhow::Result;
use relay_testkit::client::{Api, NodeSocket, Reply};
use relay_testkit::{shared, wait};
use reqwest::Method;
use serde_json::{Value, json};

use crate::room::text;

/// What happens by itself does so within this.
pub const SOON: Duration = Duration::from_secs(30);
/// What the node of a scene can do.
const CAPABILITIES: [&str; 3] = ["spawn:sh", "release", "relay:delivery-cursor-v1"];

/// A node that can spawn, and an agent that calls.
pub struct Scene {
    /// With the workspace's key.
    pub workspace: Api,
    /// The agent that calls.
    pub lead: Api,
    /// The node's connection.
    pub socket: NodeSocket,
    /// The node's id.
    pub node: String,
}

/// A node that can spawn, connected to one gateway, and an agent that calls through the others.
pub async fn scene(name: &str) -> Result<Scene> {
    let engine = shared().await;
    let workspace = Api::create_workspace(&engine.gateways[0], name).await?;
    let lead = workspace.as_agent(&workspace.register_agent("lead").await?).at(&engine.gateways[1]);
    let (node, socket) = node_of(&workspace, "box").await?;
    Ok(Scene { workspace, lead, socket, node })
}

/// A node that can spawn, connected: its id and its socket.
pub async fn node_of(workspace: &Api, name: &str) -> Result<(String, NodeSocket)> {
    let id = format!("node_{name}");
    let token = workspace.create_broker_node(&id, name).await?;
    let mut socket = NodeSocket::connect(&workspace.ws_base(), &token.token).await?;
    socket.register_broker_with(&id, name, "run-1", &CAPABILITIES).await?;
    Ok((id, socket))
}

/// Brings up what the next `action.invoke` asks for, as a broker does, and returns the frame and the registration.
pub async fn bring_up(socket: &mut NodeSocket) -> Result<(Value, Value)> {
    let frame = socket.expect("action.invoke").await?;
    let (id, name) = (&frame["invocation_id"], &frame["input"]["name"]);
    let born = json!({ "v": 1, "type": "agent.register", "name": name, "invocation_id": id, "resumable": false });
    let born = socket.request(born).await?;
    inventory(socket, &[(&born["agent_id"], name)]).await?;
    Ok((frame, born))
}

/// Tells which agents run, and waits for the answer.
pub async fn inventory(socket: &mut NodeSocket, agents: &[(&Value, &Value)]) -> Result<Value> {
    let agents: Vec<Value> = agents.iter().map(|(id, name)| json!({ "agent_id": id, "name": name })).collect();
    socket.request(json!({ "v": 1, "type": "inventory.sync", "agents": agents })).await
}

/// The result of what a frame asked for.
pub async fn result(socket: &NodeSocket, frame: &Value, output: Value) -> Result<()> {
    let id = &frame["invocation_id"];
    socket.send_json(&json!({ "v": 1, "type": "action.result", "invocation_id": id, "output": output })).await
}

/// The invocation once it has its outcome.
pub async fn outcome(api: &Api, action: &str, id: &Value) -> Result<Value> {
    let path = format!("/v1/actions/{action}/invocations/{}", text(id));
    wait::until_ok("the outcome", SOON, || async {
        let row = api.get(&path).await?.success()?;
        anyhow::ensure!(row["completed_at"].is_string(), "not yet: {row}");
        Ok::<_, anyhow::Error>(row)
    })
    .await
}

/// Posts with an idempotency key.
pub async fn keyed(api: &Api, path: &str, body: Value, key: &str) -> Result<Reply> {
    api.call(Method::POST, path, Some(body), &[("idempotency-key", key)]).await
}
