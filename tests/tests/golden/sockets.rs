//! `/v1/node/ws`: direct nodes, brokers, spawn and release, frames that are refused.

use std::time::Duration;

use anyhow::{Context, Result};
use relay_testkit::client::{Api, NodeSocket};
use relay_testkit::wait;
use serde_json::{Value, json};

use crate::walk::{Walk, ask, ask_all, text};

const SOON: Duration = Duration::from_secs(40);
const CURSOR: &str = "relay:delivery-cursor-v1";

/// The next frame with this payload or context event.
async fn event(socket: &mut NodeSocket, kind: &str) -> Result<Value> {
    let wanted = |frame: &Value| frame["payload"]["type"] == kind || frame["event"] == kind;
    socket.expect_where(kind, SOON, wanted).await
}

async fn deliveries(socket: &mut NodeSocket, seqs: std::ops::RangeInclusive<i64>) -> Result<()> {
    for seq in seqs {
        socket.expect_where("a delivery", SOON, |frame| frame["type"] == "deliver" && frame["seq"] == seq).await?;
    }
    Ok(())
}

/// Sends a frame and waits for its answer, whatever it is.
async fn answered(socket: &mut NodeSocket, mut frame: Value, id: &str) -> Result<Value> {
    frame["v"] = json!(1);
    frame["id"] = json!(id);
    socket.send_json(&frame).await?;
    socket.expect_where(&format!("an answer to {frame}"), SOON, |answer| answer["id"] == id).await
}

/// A busy engine ends sockets with 1012, and its clients come back; here the chapter begins once more.
async fn undisturbed(chapter: impl AsyncFn() -> Result<()>) -> Result<()> {
    for _ in 0..2 {
        match chapter().await {
            Err(error) if format!("{error:#}").contains("1012") => println!("begins once more: {error:#}"),
            ended => return ended,
        }
    }
    chapter().await
}

#[tokio::test]
async fn a_direct_node() -> Result<()> {
    undisturbed(direct_node).await
}

#[tokio::test]
async fn a_broker() -> Result<()> {
    undisturbed(broker).await
}

async fn direct_node() -> Result<()> {
    let walk = Walk::new("direct_node").await?;
    let (_, ada) = walk.agent("ada").await?;
    let (_, bob) = walk.agent("bob").await?;
    let (_, cyd) = walk.agent("cyd").await?;
    let bob = walk.there(&bob);
    let mut socket = bob.direct_socket().await?;
    let posted = ask(&ada, r#"POST /v1/channels/general/messages {"text":"to all @bob","blocks":[{"type":"divider"}],"data":{"b":1,"a":2}}"#).await?;
    let posted = text(&posted, "/id")?;
    ask(&ada, &format!(r#"POST /v1/messages/{posted}/replies {{"text":"in a thread"}}"#)).await?;
    ask(&ada, r#"POST /v1/dm {"to":"bob","text":"between us","mode":"steer"}"#).await?;
    ask(&ada, r#"POST /v1/dm/group {"participants":["bob"],"name":"us","text":"in a group"}"#).await?;
    deliveries(&mut socket, 1..=4).await?;
    let own = ask(&bob, &format!(r#"POST /v1/messages/{posted}/replies {{"text":"mine"}}"#)).await?;
    ask_all(
        &ada,
        &[
            &format!(r#"POST /v1/messages/{posted}/reactions {{"emoji":"tada"}}"#),
            &format!("DELETE /v1/messages/{posted}/reactions/tada"),
            &format!("POST /v1/messages/{}/read", text(&own, "/id")?),
            &format!(r#"PATCH /v1/messages/{posted} {{"text":"corrected"}}"#),
            r#"POST /v1/channels {"name":"plans","topic":"first"}"#,
            r#"POST /v1/channels/plans/invite {"agent_name":"bob"}"#,
            r#"PATCH /v1/channels/plans {"topic":"second"}"#,
            "POST /v1/channels/plans/mute",
            "POST /v1/channels/plans/unmute",
            "POST /v1/channels/plans/leave",
            "DELETE /v1/channels/plans",
            r#"POST /v1/agents/ada/events {"type":"status.blocked"}"#,
            r#"POST /v1/agents/ada/events {"type":"status.changed","payload":{"status":"waiting"}}"#,
        ],
    )
    .await?;
    ask(&cyd, "POST /v1/agents/disconnect {}").await?;
    for kind in [
        "message.reacted",
        "message.reacted",
        "message.read",
        "message.updated",
        "channel.created",
        "member.joined",
        "channel.updated",
        "member.channel_muted",
        "member.channel_unmuted",
        "member.left",
        "channel.archived",
        "agent.status.blocked",
        "agent.status.changed",
        "agent.status.offline",
    ] {
        event(&mut socket, kind).await?;
    }
    let upload = r#"POST /v1/files/upload {"filename":"a","content_type":"text/plain","size_bytes":1}"#;
    let declared = ask(&ada, upload).await?;
    relay_acceptance::raw::Raw::new("PUT", text(&declared, "/upload_url")?).body("a").send().await?;
    let file = text(&declared, "/id")?;
    ask(&ada, &format!("POST /v1/files/{file}/complete")).await?;
    ask(&ada, &format!(r#"POST /v1/dm {{"to":"bob","text":"a file","attachments":["{file}"]}}"#)).await?;
    deliveries(&mut socket, 5..=5).await?;
    event(&mut socket, "file.uploaded").await?;
    ask(&bob, r#"POST /v1/actions {"name":"count","description":"","handler_agent":"bob"}"#).await?;
    ask(&ada, r#"POST /v1/actions/count/invoke {"input":{"n":2}}"#).await?;
    socket.expect("action.invoke").await?;
    socket.ack("bob", 3).await?;
    socket.heartbeat("another-node").await?;
    socket.expect("error").await?;
    left_over(&walk, &ada, &bob, socket).await?;
    walk.end()
}

/// Records that the next socket gets the unsettled deliveries again, with a tombstone for each that expired since.
async fn left_over(walk: &Walk, ada: &Api, bob: &Api, socket: NodeSocket) -> Result<()> {
    socket.close().await?;
    ask(ada, r#"POST /v1/dm {"to":"bob","text":"short-lived","ttl_ms":1000}"#).await?;
    ask(ada, r#"POST /v1/dm {"to":"bob","text":"long-lived"}"#).await?;
    let aside = walk.aside(&walk.key);
    wait::until_ok("a letter to expire", SOON, || async {
        let letters = aside.get("/v1/dead-letters").await?.success()?;
        anyhow::ensure!(letters[0].is_object(), "none yet");
        Ok(())
    })
    .await?;
    let mut socket = bob.direct_socket().await?;
    deliveries(&mut socket, 4..=7).await?;
    let mut another = bob.direct_socket().await?;
    socket.closed(SOON).await?;
    deliveries(&mut another, 4..=7).await?;
    another.close().await
}

async fn broker() -> Result<()> {
    let walk = Walk::new("broker_node").await?;
    let (_, lead) = walk.agent("lead").await?;
    walk.agent("elsewhere").await?;
    let node = walk.key.create_broker_node("node_box", "box").await?;
    let mut socket = NodeSocket::connect_with_header(&walk.key.ws_base(), &node.token).await?;
    let capabilities = json!([
        { "name": "spawn:sh", "kind": "capacity" }, { "name": "release", "kind": "capacity" },
        { "name": CURSOR, "kind": "capacity" }, { "name": "test", "kind": "action" },
        { "name": "build", "kind": "action", "global": true, "metadata": { "b": 1, "a": 2 } },
    ]);
    let register = json!({
        "type": "node.register", "name": "box", "node_id": "node_box", "capabilities": capabilities, "max_agents": 0,
        "provider": { "name": "broker", "instance_id": "run-1" }, "tags": ["b", "a"], "version": "golden/1",
        "resume_cursor": null,
    });
    let mut other = register.clone();
    other["node_id"] = json!("node_other");
    answered(&mut socket, other, "r0").await?;
    answered(&mut socket, register.clone(), "r1").await?;
    answered(&mut socket, register, "r2").await?;
    let born = answered(
        &mut socket,
        json!({ "type": "agent.register", "name": "worker", "session_ref": "s-1", "resumable": true }),
        "a1",
    )
    .await?;
    let worker = born["data"]["agent_id"].as_str().context("an id")?;
    answered(&mut socket, json!({ "type": "agent.register", "name": "worker" }), "a2").await?;
    answered(&mut socket, json!({ "type": "agent.register", "name": "" }), "a3").await?;
    let recover = |id: &str| json!({ "type": "agent.recover", "name": "worker", "expected_agent_id": id });
    answered(&mut socket, recover(worker), "a4").await?;
    answered(&mut socket, recover("7"), "a5").await?;
    let entry = json!({ "agent_id": worker, "name": "worker" });
    answered(&mut socket, json!({ "type": "inventory.sync", "agents": [entry] }), "i1").await?;
    answered(
        &mut socket,
        json!({ "type": "inventory.sync", "agents": [{ "agent_id": "7", "name": "worker" }, entry] }),
        "i2",
    )
    .await?;
    for text in ["one", "two", "three"] {
        ask(&lead, &format!(r#"POST /v1/dm {{"to":"worker","text":"{text}"}}"#)).await?;
    }
    deliveries(&mut socket, 1..=3).await?;
    socket.ack("worker", 2).await?;
    socket.send_json(&json!({ "v": 1, "type": "node.heartbeat", "node_id": "node_box", "load": 0.5, "active_agents": 1, "handlers_live": true })).await?;
    let aside = walk.aside(&walk.key);
    wait::until("ack and heartbeat to be kept", SOON, || async {
        let (hosted, node) = (aside.get("/v1/nodes/box/agents").await, aside.get("/v1/nodes/box").await);
        hosted.is_ok_and(|hosted| hosted.data()[0]["delivery_ack_seq"] == 2)
            && node.is_ok_and(|node| node.data()["load"] == 0.5)
    })
    .await;
    answered(&mut socket, json!({ "type": "agent.register", "name": "worker" }), "a6").await?;
    deliveries(&mut socket, 3..=3).await?;
    ask_all(&walk.key, &["GET /v1/nodes/box", "GET /v1/nodes/box/agents", "GET /v1/agents/worker"]).await?;
    actions_of_the_node(&walk, &lead, &mut socket).await?;
    spawned_and_released(&lead, &mut socket, worker).await?;
    refused(&mut socket).await?;
    answered(&mut socket, json!({ "type": "agent.deregister", "agent_id": worker, "name": "worker" }), "d1").await?;
    answered(&mut socket, json!({ "type": "agent.deregister", "agent_id": "7" }), "d2").await?;
    socket.send_json(&json!({ "v": 1, "type": "node.deregister" })).await?;
    wait::until("the node to be offline", SOON, || async {
        aside.get("/v1/nodes/box").await.is_ok_and(|node| node.data()["status"] == "offline")
    })
    .await;
    ask_all(&walk.key, &["GET /v1/nodes/box", "GET /v1/nodes/box/agents", "GET /v1/actions"]).await?;
    ask(&lead, "POST /v1/actions/build/invoke {}").await?;
    socket.close().await?;
    walk.end()
}

async fn actions_of_the_node(walk: &Walk, lead: &Api, socket: &mut NodeSocket) -> Result<()> {
    let mut calling = lead.direct_socket().await?;
    ask_all(&walk.key, &["GET /v1/actions", "GET /v1/actions/build"]).await?;
    let results = [json!({ "output": { "b": 1, "a": 2 } }), json!({ "output": [1] }), json!({ "error": "broken" })];
    for (number, result) in results.into_iter().enumerate() {
        let path = if number == 0 { "/v1/nodes/box/actions/build/invoke" } else { "/v1/actions/build/invoke" };
        let asked = ask(lead, &format!(r#"POST {path} {{"input":{{"n":{number}}}}}"#)).await?;
        let frame = socket.expect("action.invoke").await?;
        let mut result = result;
        result["v"] = json!(1);
        result["type"] = json!("action.result");
        result["invocation_id"] = frame["invocation_id"].clone();
        socket.send_json(&result).await?;
        let kind = if result.get("error").is_some() { "action.failed" } else { "action.completed" };
        event(&mut calling, kind).await?;
        let invocation = text(&asked, "/invocation_id")?;
        ask(lead, &format!("GET /v1/actions/build/invocations/{invocation}?explain=true")).await?;
        ask(lead, &format!("POST /v1/actions/build/invocations/{invocation}/complete {{}}")).await?;
    }
    calling.close().await
}

async fn spawned_and_released(lead: &Api, socket: &mut NodeSocket, worker: &str) -> Result<()> {
    let mut calling = lead.direct_socket().await?;
    let spawn = r#"POST /v1/agents/spawn {"name":"eve","cli":"sh","task":"count","channel":"general","metadata":{"b":1,"a":2}}"#;
    let asked = ask(lead, spawn).await?;
    let frame = socket.expect("action.invoke").await?;
    let id = frame["invocation_id"].clone();
    let born = json!({ "type": "agent.register", "name": "eve", "invocation_id": id });
    let born = answered(socket, born, "s1").await?;
    let agents = json!([{ "agent_id": worker, "name": "worker" }, { "agent_id": born["data"]["agent_id"], "name": "eve", "invocation_id": id }]);
    answered(socket, json!({ "type": "inventory.sync", "agents": agents }), "s2").await?;
    socket
        .send_json(&json!({ "v": 1, "type": "action.result", "invocation_id": id, "output": { "spawned": true } }))
        .await?;
    answered(socket, json!({ "type": "inventory.sync", "agents": agents }), "s3").await?;
    event(&mut calling, "action.completed").await?;
    ask(lead, &format!("GET /v1/actions/spawn/invocations/{}", text(&asked, "/invocation_id")?)).await?;
    ask(lead, spawn).await?;
    let asked = ask(lead, r#"POST /v1/agents/release {"name":"eve","reason":"done"}"#).await?;
    let frame = socket.expect("action.invoke").await?;
    socket.send_json(&json!({ "v": 1, "type": "action.result", "invocation_id": frame["invocation_id"], "output": { "released": true } })).await?;
    answered(socket, json!({ "type": "agent.deregister", "agent_id": born["data"]["agent_id"], "name": "eve" }), "s4")
        .await?;
    event(&mut calling, "agent.exited").await?;
    event(&mut calling, "action.completed").await?;
    ask(lead, &format!("GET /v1/actions/release/invocations/{}", text(&asked, "/invocation_id")?)).await?;
    let own = json!({ "type": "node.spawn", "input": { "name": "fay", "cli": "sh" } });
    answered(socket, own, "s5").await?;
    let frame = socket.expect("action.invoke").await?;
    socket
        .send_json(
            &json!({ "v": 1, "type": "action.result", "invocation_id": frame["invocation_id"], "error": "no room" }),
        )
        .await?;
    answered(socket, json!({ "type": "node.spawn", "input": {} }), "s6").await?;
    answered(socket, json!({ "type": "node.spawn", "input": { "name": "fay", "cli": "nothing" } }), "s7").await?;
    calling.close().await
}

async fn refused(socket: &mut NodeSocket) -> Result<()> {
    for (number, frame) in [
        json!({ "type": "nonsense" }),
        json!({ "type": 7 }),
        json!({ "type": "node.register" }),
        json!({ "type": "inventory.sync", "agents": 7 }),
        json!({ "type": "agent.deregister" }),
        json!({ "type": "node.heartbeat", "node_id": "node_other", "active_agents": 0, "handlers_live": true }),
        json!({ "type": "action.result", "invocation_id": "inv_7", "output": 1 }),
        json!({ "type": "delivery.ack", "agent": 7, "up_to_seq": -1 }),
    ]
    .into_iter()
    .enumerate()
    {
        let mut frame = frame;
        frame["v"] = json!(1);
        frame["id"] = json!(format!("x{number}"));
        socket.send_json(&frame).await?;
    }
    for text in ["not json", "[]", "{}", r#"{"v":2,"type":"node.heartbeat","id":"y"}"#] {
        socket.send_message(text.into()).await?;
    }
    // Frames are answered in order: this one's answer is behind all of theirs.
    answered(socket, json!({ "type": "nonsense" }), "last").await?;
    Ok(())
}
