//! Outcomes for callers: immediate, delayed, and after a reconnect.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context as _, Result};
use relay_acceptance::calls::{CallScene, SOON, next_invocation, register, send_result, socket};
use relay_acceptance::push_scene::Scene;
use relay_testkit::{client::NodeSocket, wait};
use serde_json::{Value, json};

#[tokio::test]
async fn a_durable_outcome_waits_in_the_mailbox() -> Result<()> {
    let place = CallScene::new("durable").await?;
    let node = place.node("box").await?;
    let mut socket = socket(&node, 1).await?;
    socket.request(register(&node, "p", &json!([{ "name": "grind", "kind": "capacity" }]), 0)).await?;
    let id = place.invoke("grind", json!({ "durable": true })).await?;
    let invocation = next_invocation(&mut socket, SOON).await?;
    send_result(&socket, &invocation, json!({ "flour": 1 })).await?;
    place.wait_for_outcome("grind", &id).await?;
    let listed = place.ann().get("/v1/deliveries").await?.success()?;
    assert_eq!((&listed[0]["reason"], &listed[0]["seq"]), (&json!("action-result"), &json!(1)), "{listed}");
    let mut caller = place.ann().direct_socket().await?;
    let frame = caller.expect_where("the outcome", SOON, |frame| frame["seq"] == 1).await?;
    assert_eq!(frame["payload"]["type"], "action.completed", "{frame}");
    assert_eq!(frame["payload"]["data"]["invocation_id"], id.as_str());
    assert_eq!(frame["payload"]["data"]["output"], json!({ "flour": 1 }));
    caller.ack("ann", 1).await?;
    wait::until("it to be acknowledged", SOON, || async {
        place.ann().get("/v1/deliveries").await.is_ok_and(|reply| reply.data() == &json!([]))
    })
    .await;
    let twice = |frame: &Value| frame["payload"]["type"] == "action.completed";
    assert!(caller.expect_where("it again", Duration::from_secs(1), twice).await.is_err(), "told once");
    Ok(())
}

#[tokio::test]
async fn a_durable_outcome_is_posted_to_an_http_push_caller() -> Result<()> {
    let scene = Scene::new("durable-push", json!({ "ack_mode": "on_2xx" })).await?;
    let node = scene.key.create_broker_node(&format!("node_{}", uuid::Uuid::new_v4().simple()), "box").await?;
    let mut socket = socket(&node, 1).await?;
    socket.request(register(&node, "p", &json!([{ "name": "grind", "kind": "capacity" }]), 0)).await?;
    let bob = scene.key.as_agent(&scene.bob);
    let made = bob.post("/v1/actions/grind/invoke", json!({ "durable": true })).await?.success()?;
    let invocation = next_invocation(&mut socket, SOON).await?;
    send_result(&socket, &invocation, json!({ "flour": 1 })).await?;
    let rows = scene.wait_for_deliveries("the outcome to be acked", "?status=acked", |rows| rows.len() == 1).await?;
    assert_eq!((&rows[0]["reason"], &rows[0]["seq"]), (&json!("action-result"), &json!(1)), "{}", rows[0]);
    let calls = scene.receiver.calls("/hook");
    assert_eq!(calls.len(), 1, "told once");
    let body = calls[0].json();
    assert_eq!((&body["type"], &body["delivery_id"]), (&json!("action.completed"), &rows[0]["id"]), "{body}");
    assert_eq!((&body["seq"], &body["agent_name"]), (&json!(1), &json!("bob")));
    assert_eq!((&body["topic"], &body["agent_ids"]), (&json!("agent"), &json!([scene.bob.id])), "as an event has it");
    assert_eq!(body["data"]["invocation_id"], made["invocation_id"]);
    assert_eq!(body["data"]["output"], json!({ "flour": 1 }));
    let twice = scene.receiver.events("/hook").into_iter().filter(|call| call.json()["type"] == "action.completed");
    assert_eq!(twice.count(), 0, "not as an event besides");
    // Later deliveries are not blocked.
    scene.send("next").await?;
    scene.wait_for_deliveries("the message to be acked", "?status=acked", |rows| rows.len() == 2).await?;
    Ok(())
}

#[tokio::test]
async fn a_reconnecting_caller_is_notified_of_the_outcome() -> Result<()> {
    let place = CallScene::new("away").await?;
    let node = place.node("box").await?;
    let mut socket = socket(&node, 1).await?;
    socket.request(register(&node, "p", &json!([{ "name": "grind", "kind": "capacity" }]), 0)).await?;
    let id = place.invoke("grind", json!({})).await?;
    let invocation = next_invocation(&mut socket, SOON).await?;
    let error = json!({ "v": 1, "type": "action.result", "invocation_id": invocation, "error": "out of corn" });
    socket.send_json(&error).await?;
    assert_eq!(place.wait_for_outcome("grind", &id).await?["error"], "out of corn");
    let mut caller = place.ann().direct_socket().await?;
    let failed = |frame: &Value| frame["payload"]["type"] == "action.failed";
    let frame = caller.expect_where("the outcome", SOON, failed).await?;
    assert_eq!((&frame["seq"], &frame["payload"]["data"]["error"]), (&json!(0), &json!("out of corn")));
    caller.close().await?;
    let mut again = place.ann().direct_socket().await?;
    let twice = again.expect_where("it again", Duration::from_secs(6), failed).await;
    assert!(twice.is_err(), "told once: {twice:?}");
    Ok(())
}

/// A broker receives 128 frames before it has confirmed some; further outcomes follow later.
#[tokio::test]
async fn a_caller_on_a_broker_is_notified_of_all_simultaneous_outcomes() -> Result<()> {
    const BURST: usize = 200;
    let place = CallScene::new("many-outcomes").await?;
    let mill = place.node("mill").await?;
    let mut miller = socket(&mill, 1).await?;
    miller.request(register(&mill, "p", &json!([{ "name": "grind", "kind": "capacity" }]), 0)).await?;
    let node = place.node("host").await?;
    let mut host = socket(&node, 0).await?;
    host.register_broker(&node.node_id, &node.name, "run-1").await?;
    let born = host.register_agent("ann-too").await?;
    let (id, token) = (born["agent_id"].as_str().context("an id")?, born["token"].as_str().context("a token")?);
    let caller = place.key.with_token(token);
    host.close().await?;

    // After a reconnect it gets the missed outcomes; from here on only new ones are queried.
    let invoke = async || {
        let ack = caller.post("/v1/actions/grind/invoke", json!({})).await?.success()?;
        anyhow::Ok(ack["invocation_id"].as_str().context("an id")?.to_owned())
    };
    let missed = invoke().await?;
    let invocation = next_invocation(&mut miller, SOON).await?;
    send_result(&miller, &invocation, json!({})).await?;
    place.wait_for_outcome("grind", &missed).await?;
    let mut host = wait::until_ok("the broker's place to be free", SOON, async || {
        let mut host = socket(&node, 0).await?;
        host.register_broker(&node.node_id, &node.name, "run-1").await?;
        anyhow::Ok(host)
    })
    .await?;
    host.inventory(&[(id, "ann-too")]).await?;
    let mut heard = BTreeSet::new();
    receive_outcomes(&mut host, &mut heard, 1).await?;
    assert_eq!(heard, BTreeSet::from([missed]));

    // The broker confirms nothing while the invocations end.
    let made: BTreeSet<String> =
        futures::future::try_join_all((0..BURST).map(|_| invoke())).await?.into_iter().collect();
    for _ in 0..BURST {
        let invocation = next_invocation(&mut miller, SOON).await?;
        send_result(&miller, &invocation, json!({})).await?;
    }
    for id in &made {
        place.wait_for_outcome("grind", id).await?;
    }
    receive_outcomes(&mut host, &mut heard, 1 + BURST).await?;
    assert!(made.is_subset(&heard));
    Ok(())
}

/// Receives frames as a broker does, until this many outcomes have arrived.
async fn receive_outcomes(host: &mut NodeSocket, heard: &mut BTreeSet<String>, count: usize) -> Result<()> {
    let until = tokio::time::Instant::now() + SOON;
    while heard.len() < count {
        let left = until.saturating_duration_since(tokio::time::Instant::now());
        let frame = host.next_frame(left).await.with_context(|| format!("{} of {count} heard", heard.len()))?;
        let payload = &frame["payload"];
        if payload["type"] == "delivery.position" {
            host.ack(frame["agent"].as_str().context("an agent")?, 0).await?;
        } else if payload["type"] == "action.completed" {
            heard.insert(payload["data"]["invocation_id"].as_str().context("an id")?.to_owned());
        }
    }
    Ok(())
}

#[tokio::test]
async fn an_inventory_that_lists_the_agent_completes_its_spawn() -> Result<()> {
    let place = CallScene::new("came-up").await?;
    let node = place.node("box").await?;
    let mut socket = socket(&node, 0).await?;
    let capacity = json!([{ "name": "spawn:test", "kind": "capacity" }]);
    socket.request(register(&node, "broker", &capacity, 4)).await?;
    let id = place.invoke("spawn:test", json!({ "input": { "name": "new" } })).await?;
    assert_eq!(next_invocation(&mut socket, SOON).await?, id);
    let agent = json!({ "v": 1, "type": "agent.register", "name": "new", "invocation_id": id });
    let agent = socket.request(agent).await?["agent_id"].clone();
    let listed = json!([{ "agent_id": agent, "name": "new", "invocation_id": id }]);
    let counts = socket.request(json!({ "v": 1, "type": "inventory.sync", "agents": listed })).await?;
    assert_eq!((&counts["completed_invocations"], &counts["open_invocations"]), (&json!(1), &json!(0)), "{counts}");
    let row = place.wait_for_outcome("spawn:test", &id).await?;
    assert_eq!(
        (&row["status"], &row["output"]["agent_id"], &row["output"]["name"]),
        (&json!("completed"), &agent, &json!("new"))
    );
    // The provider's own result arrives too late.
    send_result(&socket, &id, json!({ "spawned": true })).await?;
    socket.request(json!({ "v": 1, "type": "inventory.sync", "agents": listed })).await?;
    assert_eq!(place.invocation("spawn:test", &id).await?["output"], row["output"]);
    Ok(())
}
