//! Scene of spawn tests: a node that spawns and releases agents, and a calling agent.

use std::time::Duration;

use anyhow::Result;
use relay_testkit::client::{Api, NodeSocket, Reply};
use relay_testkit::{shared, wait};
use reqwest::Method;
use serde_json::{Value, json};

use crate::room::text;

/// Timeout of asynchronous effects.
pub const SOON: Duration = Duration::from_secs(30);
/// Capabilities of the node.
const CAPABILITIES: [&str; 3] = ["spawn:sh", "release", "relay:delivery-cursor-v1"];

/// Workspace with a node that can spawn and a calling agent.
pub struct Scene {
    /// Client with the workspace key.
    pub workspace: Api,
    /// Client of the calling agent.
    pub lead: Api,
    /// Socket of the node.
    pub socket: NodeSocket,
    /// Id of the node.
    pub node: String,
}

/// Creates a scene: the node at one gateway, the calling agent at another.
pub async fn scene(name: &str) -> Result<Scene> {
    let engine = shared().await;
    let workspace = Api::create_workspace(&engine.gateways[0], name).await?;
    let lead = workspace.as_agent(&workspace.register_agent("lead").await?).at(&engine.gateways[1]);
    let (node, socket) = connect_spawn_node(&workspace, "box").await?;
    Ok(Scene { workspace, lead, socket, node })
}

/// Connects a node that can spawn; returns its id and socket.
pub async fn connect_spawn_node(workspace: &Api, name: &str) -> Result<(String, NodeSocket)> {
    let id = format!("node_{name}");
    let token = workspace.create_broker_node(&id, name).await?;
    let mut socket = NodeSocket::connect(&workspace.ws_base(), &token.token).await?;
    socket.register_broker_with(&id, name, "run-1", &CAPABILITIES).await?;
    Ok((id, socket))
}

/// Registers the agent of the next `action.invoke`, as a broker does; returns the frame and the registration.
pub async fn register_spawned(socket: &mut NodeSocket) -> Result<(Value, Value)> {
    let frame = socket.expect("action.invoke").await?;
    let (id, name) = (&frame["invocation_id"], &frame["input"]["name"]);
    let born = json!({ "v": 1, "type": "agent.register", "name": name, "invocation_id": id, "resumable": false });
    let born = socket.request(born).await?;
    inventory(socket, &[(&born["agent_id"], name)]).await?;
    Ok((frame, born))
}

/// Sends an inventory and waits for the answer.
pub async fn inventory(socket: &mut NodeSocket, agents: &[(&Value, &Value)]) -> Result<Value> {
    let agents: Vec<Value> = agents.iter().map(|(id, name)| json!({ "agent_id": id, "name": name })).collect();
    socket.request(json!({ "v": 1, "type": "inventory.sync", "agents": agents })).await
}

/// Sends the result of an invocation frame.
pub async fn send_result(socket: &NodeSocket, frame: &Value, output: Value) -> Result<()> {
    let id = &frame["invocation_id"];
    socket.send_json(&json!({ "v": 1, "type": "action.result", "invocation_id": id, "output": output })).await
}

/// Waits until an invocation has its outcome.
pub async fn wait_for_outcome(api: &Api, action: &str, id: &Value) -> Result<Value> {
    let path = format!("/v1/actions/{action}/invocations/{}", text(id));
    wait::until_ok("the outcome", SOON, || async {
        let row = api.get(&path).await?.success()?;
        anyhow::ensure!(row["completed_at"].is_string(), "not yet: {row}");
        Ok::<_, anyhow::Error>(row)
    })
    .await
}

/// Posts with an idempotency key.
pub async fn post_with_key(api: &Api, path: &str, body: Value, key: &str) -> Result<Reply> {
    api.call(Method::POST, path, Some(body), &[("idempotency-key", key)]).await
}

/// Returns the hash of a token as releases compare it.
pub fn token_hash(token: &str) -> String {
    let hash = ring::digest::digest(&ring::digest::SHA256, token.as_bytes());
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
