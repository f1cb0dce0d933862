//! Nodes that are changed or deleted over REST while their sockets are open.

use std::time::Duration;

use anyhow::{Context as _, Result};
use relay_acceptance::calls::{CallScene, register};
use relay_acceptance::raw::Raw;
use relay_testkit::{
    client::{Api, NodeSocket, NodeToken},
    shared, wait,
};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Updates a node without a rotation, proving possession of a token.
async fn keep_token(key: &Api, body: Value, proof: &str) -> Result<relay_testkit::client::Reply> {
    let request = Raw::new("POST", format!("{}/v1/nodes", key.base())).bearer(key.token());
    let request = if proof.is_empty() { request } else { request.header("x-relaycast-node-token", proof) };
    request.json(body.to_string()).send().await
}

#[tokio::test]
async fn a_node_is_changed_without_cutting_its_provider() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "changed").await?;
    let node = key.create_broker_node("node_box", "box").await?;
    key.create_broker_node("node_other", "other").await?;
    let mut socket = NodeSocket::connect(&key.at(&gateways[1]).ws_base(), &node.token).await?;
    socket.register_broker("node_box", "box", "run-1").await?;

    let change = json!({ "tags": ["gpu"], "version": "2", "machine_id": "m-1", "capabilities": ["spawn:claude"] });
    let changed = key.patch("/v1/nodes/box", change).await?.success()?;
    assert_eq!((text(&changed["id"]), text(&changed["machine_id"])), ("node_box", "m-1"));
    assert!(changed.get("token").is_none());
    let renamed = key.patch("/v1/nodes/node_box", json!({ "name": "#crate" })).await?.success()?;
    assert_eq!(text(&renamed["name"]), "crate");
    key.patch("/v1/nodes/crate", json!({})).await?.success()?;
    key.patch("/v1/nodes/crate", json!({ "name": "other" })).await?.refused(409, "node_name_conflict")?;
    key.patch("/v1/nodes/crate", json!({ "name": "" })).await?.refused(400, "invalid_node_name")?;
    key.patch("/v1/nodes/crate", json!({ "max_agents": -1 })).await?.refused(400, "invalid_request")?;
    key.patch("/v1/nodes/crate", json!({ "delivery": { "url": "https://example.org/" } }))
        .await?
        .refused(400, "invalid_node_delivery")?;
    key.patch("/v1/nodes/none", json!({})).await?.refused(404, "node_not_found")?;

    let body = json!({ "node_id": "node_box", "name": "box", "version": "3", "rotate": false });
    let kept = keep_token(&key, body.clone(), &node.token).await?.success()?;
    assert_eq!((text(&kept["token"]), text(&kept["name"])), (node.token.as_str(), "box"));
    keep_token(&key, body.clone(), "").await?.refused(400, "invalid_request")?;
    keep_token(&key, body, "nt_live_00000000000000000000000000000000").await?.refused(401, "node_token_invalid")?;
    let unknown = json!({ "name": "unknown", "rotate": false });
    keep_token(&key, unknown, &node.token).await?.refused(404, "node_not_found")?;

    socket.register_agent("ann").await.context("the socket still serves")?;
    // The proof alone rotates, as the published client that sends it expects.
    let rotated = keep_token(&key, json!({ "node_id": "node_box", "name": "box" }), &node.token).await?.success()?;
    assert_ne!(text(&rotated["token"]), node.token);
    assert_eq!(socket.closed(SOON).await?, Some(1008));
    Ok(())
}

#[tokio::test]
async fn a_deleted_node_leaves_nothing_behind() -> Result<()> {
    let scene = CallScene::new("deleted").await?;
    let key = &scene.key;
    let (gone, stays) = (scene.node("gone").await?, scene.node("stays").await?);
    let open = async |node: &NodeToken| -> Result<NodeSocket> {
        let at = key.at(&shared().await.gateways[1]);
        let mut socket = NodeSocket::connect(&at.ws_base(), &node.token).await?;
        let capabilities = json!([{ "name": "grind", "kind": "capacity" }, { "name": "own", "kind": "action" }]);
        socket.request(register(node, "miller", &capabilities, 10)).await?;
        Ok(socket)
    };
    let mut socket = open(&gone).await?;
    socket.register_agent("worker").await?;
    let untargeted = scene.invoke("grind", json!({})).await?;
    let targeted = scene.ann().post("/v1/nodes/gone/actions/grind/invoke", json!({})).await?.success()?;
    let targeted = text(&targeted["invocation_id"]).to_owned();
    let mut other = open(&stays).await?;

    key.delete("/v1/nodes/gone").await?.success()?;
    for (method, path) in [("DELETE", ""), ("GET", ""), ("GET", "/agents"), ("DELETE", "/providers/miller")] {
        let reply = Raw::new(method, format!("{}/v1/nodes/gone{path}", key.base())).bearer(key.token()).send().await?;
        reply.refused(404, "node_not_found")?;
    }
    key.with_token(&gone.token)
        .post("/v1/channels/general/messages", json!({ "text": "x", "from": "worker" }))
        .await?
        .refused(401, "node_token_invalid")?;
    assert!(socket.register_agent("late").await.is_err(), "the socket of a deleted node hosts no agent");
    assert_eq!(socket.closed(SOON).await?, Some(1008));

    let worker = key.get("/v1/agents/worker").await?.success()?;
    assert_eq!(text(&worker["status"]), "offline");
    let posted = scene.ann().dm("worker", "where are you").await?.success()?;
    assert!(posted["id"].is_string(), "its mailbox accepts: {posted}");
    let failed = scene.wait_for_outcome("grind", &targeted).await?;
    assert_eq!(text(&failed["status"]), "failed");
    let moved = other
        .expect_where("action.invoke", SOON, |frame| frame["invocation_id"] == untargeted.as_str())
        .await
        .context("the other node gets what named no node")?;
    assert!(moved["input"].is_object(), "{moved}");

    let events = key.get("/v1/workspace/events?limit=500").await?.success()?;
    let kinds: Vec<&str> = events["events"].as_array().into_iter().flatten().map(|e| text(&e["type"])).collect();
    for kind in ["node.deleted", "node.status.offline", "agent.status.offline"] {
        assert!(kinds.contains(&kind), "{kind} in {kinds:?}");
    }
    // The name and the id are free.
    let again = key.create_broker_node(&gone.node_id, "gone").await?;
    assert_ne!(again.token, gone.token);
    let socket = open(&again).await?;
    wait::until_ok("the agent to return", SOON, || async { key.bind("gone", "worker").await.map(drop) }).await?;
    socket.heartbeat(&again.node_id).await?;
    Ok(())
}

#[tokio::test]
async fn deleting_the_node_of_an_agent_ends_its_connection_only() -> Result<()> {
    let key = Api::create_workspace(&shared().await.gateways[0], "own-node").await?;
    let bob = key.as_agent(&key.register_agent("bob").await?);
    let node = bob.direct_node_token().await?;
    let mut socket = NodeSocket::connect(&key.at(&shared().await.gateways[1]).ws_base(), &node.token).await?;
    socket.register_direct(&node.node_id, &node.name).await?;
    key.delete(&format!("/v1/nodes/{}", node.node_id)).await?.success()?;
    assert_eq!(socket.closed(SOON).await?, Some(4001));
    bob.get("/v1/agent").await?.success()?;
    let mut socket = bob.direct_socket().await?;
    key.post("/v1/channels/general/messages", json!({ "text": "x" })).await?.refused(403, "agent_token_required")?;
    key.as_agent(&key.register_agent("ann").await?).dm("bob", "hello").await?.success()?;
    assert_eq!(socket.expect("deliver").await?["payload"]["data"]["text"], "hello");
    Ok(())
}
