//! Mentions that reach their agents, agents that leave their node, and outputs as handlers sent them.

use anyhow::{Context as _, Result};
use relay_acceptance::{
    calls::{CallScene, SOON, next_invocation, register, send_result, socket},
    room::{Room, rows, text},
};
use relay_testkit::{client::NodeSocket, shared};
use reqwest::Method;
use serde_json::{Value, json};

#[tokio::test]
async fn a_muted_member_receives_a_mention_in_a_thread() -> Result<()> {
    let room = Room::new("mention-muted").await?;
    room.bob.post_empty("/v1/channels/room/mute").await?.success()?;
    let root = room.ann.post_message("room", "quiet").await?.success()?;
    let replies = format!("/v1/messages/{}/replies", text(&root["id"]));
    room.ann.post(&replies, json!({ "text": "also quiet" })).await?.success()?;
    let reply = room.ann.post(&replies, json!({ "text": "look, @bob" })).await?.success()?;
    let listed = room.bob.get("/v1/deliveries").await?.success()?;
    let [delivery] = rows(&listed) else { panic!("one delivery: {listed}") };
    assert_eq!((&delivery["message"]["id"], text(&delivery["reason"])), (&reply["id"], "mention"), "{delivery}");
    let mut socket = room.bob.direct_socket().await?;
    let frame = socket.expect("deliver").await?;
    assert_eq!(frame["payload"]["data"]["id"], reply["id"], "{frame}");
    assert_eq!(frame["payload"]["data"]["thread_id"], root["id"], "{frame}");
    Ok(())
}

#[tokio::test]
async fn a_mention_in_a_direct_message_is_in_the_inbox() -> Result<()> {
    let room = Room::new("mention-dm").await?;
    let carol = room.key.register_agent("carol").await?;
    let sent = room.ann.dm("bob", "psst @bob").await?.success()?;
    let group = json!({ "participants": ["bob", "carol"] });
    let group = room.ann.post("/v1/dm/group", group).await?.success()?;
    let path = format!("/v1/dm/{}/messages", text(&group["id"]));
    let in_group = room.ann.post(&path, json!({ "text": "@carol and @bob" })).await?.success()?;
    room.ann.post(&path, json!({ "text": "of no one" })).await?.success()?;
    let mentions = async |agent: &relay_testkit::client::Api| {
        let inbox = agent.get("/v1/inbox").await?.success()?;
        anyhow::Ok(rows(&inbox["mentions"]).iter().map(|mention| mention["id"].clone()).collect::<Vec<Value>>())
    };
    let id = |message: &Value| message["message"].get("id").unwrap_or(&message["id"]).clone();
    assert_eq!(mentions(&room.bob).await?, [id(&in_group), id(&sent)], "newest first");
    assert_eq!(mentions(&room.key.as_agent(&carol).at(room.bob.base())).await?, [id(&in_group)]);
    assert_eq!(mentions(&room.ann).await?, [Value::Null; 0]);
    Ok(())
}

#[tokio::test]
async fn an_agent_that_deregisters_frees_its_place() -> Result<()> {
    let room = Room::new("deregisters").await?;
    room.key.post("/v1/nodes", json!({ "name": "box", "node_id": "node_box", "max_agents": 1 })).await?.success()?;
    room.key.bind("box", "bob").await?;
    let full = room.key.post("/v1/nodes/box/agents", json!({ "agent_name": "ann" })).await?;
    assert!(!full.is_success(), "there is one place: {}", full.body);
    room.bob.post("/v1/agents/disconnect", json!({})).await?.success()?;
    let full = room.key.post("/v1/nodes/box/agents", json!({ "agent_name": "ann" })).await?;
    assert!(!full.is_success(), "it is offline and keeps its place: {}", full.body);
    room.bob.post("/v1/agents/disconnect", json!({ "deregister": true })).await?.success()?;
    assert_eq!(room.key.get("/v1/nodes/box/agents").await?.success()?, json!([]));
    room.key.bind("box", "ann").await?;
    // It is on its own node again, over either gateway.
    assert_eq!(room.key.get("/v1/agents/bob").await?.success()?["address"], "bob@direct");
    let mut socket = room.bob.at(room.ann.base()).direct_socket().await?;
    room.ann.dm("bob", "hello").await?.success()?;
    assert_eq!(text(&socket.expect("deliver").await?["payload"]["type"]), "dm.received");
    room.bob.post("/v1/agents/disconnect", json!({ "deregister": true })).await?.success().context("repeated")?;
    Ok(())
}

async fn host(place: &CallScene) -> Result<NodeSocket> {
    let node = place.node("box").await?;
    let mut host = socket(&node, 1).await?;
    host.request(register(&node, "default", &json!([{ "name": "count", "kind": "action" }]), 0)).await?;
    Ok(host)
}

#[tokio::test]
async fn outputs_are_returned_as_the_handler_sent_them() -> Result<()> {
    let place = CallScene::new("outputs").await?;
    let mut host = host(&place).await?;
    for output in [json!(4), json!("four"), json!(true), json!([1, "2"]), json!(null), json!({ "b": 1, "a": [null] })] {
        let id = place.invoke("count", json!({})).await?;
        assert_eq!(next_invocation(&mut host, SOON).await?, id);
        send_result(&host, &id, output.clone()).await?;
        let row = place.wait_for_outcome("count", &id).await?;
        assert_eq!(row["output"].to_string(), output.to_string(), "{row}");
        // The Rust client, and brokers, which contain it, read objects and null only.
        let wrapped = if output.is_object() || output.is_null() { output.clone() } else { json!({ "value": output }) };
        for (client, expected) in [
            ("@relaycast/sdk", &output),
            ("@relaycast/python-sdk", &output),
            ("@relaycast/sdk-rust", &wrapped),
            ("agent-relay-broker", &wrapped),
        ] {
            let headers = [("x-relaycast-origin-client", client)];
            let path = format!("/v1/actions/count/invocations/{id}");
            let through = place.ann().at(&shared().await.gateways[1]);
            let row = through.call(Method::GET, &path, None, &headers).await?.success()?;
            assert_eq!(&row["output"], expected, "{client}: {row}");
        }
        // An app that gives the Rust client its own name is recognised by the client's version.
        let headers = [("x-relaycast-origin-client", "my-app"), ("x-sdk-version", "12.0.0")];
        let path = format!("/v1/actions/count/invocations/{id}");
        let row = place.ann().call(Method::GET, &path, None, &headers).await?.success()?;
        assert_eq!(row["output"], wrapped, "{row}");
    }
    Ok(())
}
