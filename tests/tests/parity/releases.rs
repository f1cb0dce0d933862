//! Releases that delete their agent, through its node.

use anyhow::{Context as _, Result};
use relay_acceptance::{
    room::text,
    spawning::{SOON, Scene, register_spawned, scene, send_result, token_hash, wait_for_outcome},
};
use relay_testkit::{
    client::{Api, NodeSocket},
    shared, wait,
};
use serde_json::{Value, json};

/// Spawns `writer` on the node; returns its token and id.
async fn spawn_writer(scene: &mut Scene) -> Result<(String, String)> {
    scene.lead.post("/v1/agents/spawn", json!({ "name": "writer", "cli": "sh" })).await?.success()?;
    let (frame, born) = register_spawned(&mut scene.socket).await?;
    send_result(&scene.socket, &frame, json!({ "spawned": true })).await?;
    wait_for_outcome(&scene.lead, "spawn", &frame["invocation_id"]).await?;
    Ok((text(&born["token"]).to_owned(), text(&born["agent_id"]).to_owned()))
}

/// The node reports success and nothing else.
#[tokio::test]
async fn a_successful_release_deletes_the_agent() -> Result<()> {
    let mut scene = scene("release-deletes").await?;
    let (token, id) = spawn_writer(&mut scene).await?;
    let writer = scene.workspace.with_token(&token);
    let posted = writer.post_message("general", "draft").await?.success()?;
    let release = json!({ "name": "writer", "delete_agent": true });
    scene.lead.post("/v1/agents/release", release).await?.success()?;
    let frame = scene.socket.expect("action.invoke").await?;
    scene.workspace.get("/v1/agents/writer").await?.success().context("its node is still at it")?;
    let mut caller = scene.lead.at(&shared().await.gateways[1]).direct_socket().await?;
    send_result(&scene.socket, &frame, json!({ "released": true, "name": "writer" })).await?;
    let completed = |notice: &Value| {
        notice["payload"]["type"] == "action.completed"
            && notice["payload"]["data"]["invocation_id"] == frame["invocation_id"]
    };
    caller.expect_where("the outcome", SOON, completed).await?;
    // At once, over both gateways, although its node still lists it.
    scene.workspace.get("/v1/agents/writer").await?.refused(404, "agent_not_found")?;
    for gateway in &shared().await.gateways {
        let gone = async || writer.at(gateway).get("/v1/agent").await?.refused(401, "agent_token_invalid");
        wait::until_ok("its token to be invalid", SOON, gone).await?;
    }
    let history = scene.workspace.get("/v1/channels/general/messages").await?.success()?;
    let kept = history.as_array().and_then(|list| list.iter().find(|m| m["id"] == posted["id"])).context("kept")?;
    assert_eq!((text(&kept["agent_name"]), text(&kept["agent_id"])), ("writer", &*id));
    let again = scene.workspace.register_agent("writer").await?;
    assert_ne!(again.id, id, "the name is free");
    // The node's own report comes later, and has no effect on the new agent.
    scene.socket.request(json!({ "v": 1, "type": "agent.deregister", "agent_id": id })).await?;
    scene.socket.inventory(&[]).await?;
    assert_eq!(scene.workspace.get("/v1/agents/writer").await?.success()?["id"], again.id.as_str());
    Ok(())
}

/// A node reports success by any result that does not say otherwise.
#[tokio::test]
async fn any_result_but_a_refusal_ends_the_agent() -> Result<()> {
    let mut scene = scene("release-results").await?;
    let there = scene.workspace.at(&shared().await.gateways[1]);
    for (deletes, output, is_success) in [
        (true, json!({ "released": false }), false),
        (true, json!({}), true),
        (true, json!(null), true),
        (true, json!({ "ok": true }), true),
        (false, json!({ "released": false }), false),
        (false, json!({}), true),
    ] {
        if there.get("/v1/agents/writer").await?.status == 404 {
            spawn_writer(&mut scene).await?;
        }
        let release = json!({ "name": "writer", "delete_agent": deletes });
        let asked = scene.lead.post("/v1/agents/release", release).await?.success()?;
        let frame = scene.socket.expect("action.invoke").await?;
        send_result(&scene.socket, &frame, output.clone()).await?;
        wait_for_outcome(&scene.lead, "release", &asked["invocation_id"]).await?;
        let agent = there.get("/v1/agents/writer").await?;
        match (is_success, deletes) {
            (true, true) => drop(agent.refused(404, "agent_not_found")?),
            (true, false) => assert_eq!(agent.success()?["status"], "offline", "{output}"),
            (false, _) => assert_eq!(agent.success()?["status"], "online", "{output}"),
        }
    }
    Ok(())
}

/// Otherwise the name of an agent whose node is lost would stay taken.
#[tokio::test]
async fn without_a_connected_host_only_a_deletion_succeeds() -> Result<()> {
    let mut scene = scene("release-no-host").await?;
    let (token, _) = spawn_writer(&mut scene).await?;
    scene.socket.close().await?;
    wait::until("the node to be offline", SOON, || async {
        scene.workspace.get("/v1/nodes/box").await.is_ok_and(|reply| reply.data()["status"] == "offline")
    })
    .await;
    let release = |deletes: bool| json!({ "name": "writer", "delete_agent": deletes });
    scene.lead.post("/v1/agents/release", release(false)).await?.refused(503, "agent_host_unavailable")?;
    let done = scene.lead.post("/v1/agents/release", release(true)).await?.success()?;
    assert_eq!(done["status"], "completed", "{done}");
    scene.workspace.with_token(&token).get("/v1/agent").await?.refused(401, "agent_token_invalid")?;
    Ok(())
}

#[tokio::test]
async fn a_failed_release_deletes_nothing() -> Result<()> {
    let mut scene = scene("release-fails").await?;
    spawn_writer(&mut scene).await?;
    let release = json!({ "name": "writer", "delete_agent": true });
    let asked = scene.lead.post("/v1/agents/release", release).await?.success()?;
    let frame = scene.socket.expect("action.invoke").await?;
    let failed = json!({ "v": 1, "type": "action.result", "invocation_id": frame["invocation_id"], "error": "busy" });
    scene.socket.send_json(&failed).await?;
    let outcome = wait_for_outcome(&scene.lead, "release", &asked["invocation_id"]).await?;
    assert_eq!(outcome["error"], "busy");
    assert_eq!(scene.workspace.get("/v1/agents/writer").await?.success()?["status"], "online");
    Ok(())
}

#[tokio::test]
async fn the_expected_token_hash_reaches_the_node() -> Result<()> {
    let mut scene = scene("release-hash").await?;
    let (token, _) = spawn_writer(&mut scene).await?;
    let hash = token_hash(&token);
    let release = json!({ "name": "writer", "expected_token_hash": hash });
    scene.workspace.post("/v1/agents/release", release).await?.success()?;
    let frame = scene.socket.expect("action.invoke").await?;
    assert_eq!(frame["input"], json!({ "name": "writer", "delete_agent": false, "expected_token_hash": hash }));
    Ok(())
}

/// A connected host is asked whatever it advertises.
#[tokio::test]
async fn a_host_without_the_capability_is_asked_to_release() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "release-implied").await?;
    let node = key.create_broker_node("node_plain", "plain").await?;
    let mut socket = NodeSocket::connect(&key.at(&gateways[1]).ws_base(), &node.token).await?;
    let none: [&str; 0] = [];
    socket.register_broker_with("node_plain", "plain", "run-1", &none).await?;
    let born = socket.register_agent("writer").await?;
    socket.inventory(&[(text(&born["agent_id"]), "writer")]).await?;
    let release = json!({ "name": "writer" });
    key.post("/v1/agents/release", release.clone()).await?.success()?;
    let frame = socket.expect("action.invoke").await?;
    assert_eq!((text(&frame["action"]), text(&frame["input"]["name"])), ("release", "writer"));
    let failed: Value =
        json!({ "v": 1, "type": "action.result", "invocation_id": frame["invocation_id"], "error": "not now" });
    socket.send_json(&failed).await?;
    socket.close().await?;
    wait::until("the node to be offline", SOON, || async {
        key.get("/v1/nodes/plain").await.is_ok_and(|reply| reply.data()["status"] == "offline")
    })
    .await;
    key.post("/v1/agents/release", release).await?.refused(503, "agent_host_unavailable")?;
    Ok(())
}
