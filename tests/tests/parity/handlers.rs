//! Handlers that are unavailable, replaced or removed.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::{
    calls::{CallScene, SOON, next_invocation, register, socket},
    room::text,
};
use relay_testkit::{
    client::{Agent, Api, NodeSocket},
    shared, wait,
};
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::PgPool;

/// Agent `bob` that handles the action `count`, at the second gateway.
async fn handler(place: &CallScene) -> Result<(Agent, Api)> {
    let agent = place.key.register_agent("bob").await?;
    let bob = place.key.as_agent(&agent).at(&shared().await.gateways[1]);
    bob.post("/v1/actions", json!({ "name": "count", "handler_agent": "bob" })).await?.success()?;
    Ok((agent, bob))
}

/// Waits for the notice of an outcome at the caller's socket.
async fn failure_notice(caller: &mut NodeSocket, id: &str) -> Result<Value> {
    let frame = caller
        .expect_where("the outcome", SOON, |frame| {
            frame["payload"]["type"] == "action.failed" && frame["payload"]["data"]["invocation_id"] == id
        })
        .await?;
    Ok(frame["payload"]["data"]["error"].clone())
}

async fn age_connection(node: &str, seconds: i32) -> Result<()> {
    let pool = PgPool::connect(&shared().await.database_url).await?;
    for statement in [
        "UPDATE providers SET disconnected_at = disconnected_at - make_interval(secs => $2),
                last_heartbeat_at = last_heartbeat_at - make_interval(secs => $2) WHERE node_id = $1",
        "UPDATE nodes SET created_at = created_at - make_interval(secs => $2) WHERE node_id = $1",
    ] {
        sqlx::query(statement).bind(node).bind(seconds).execute(&pool).await?;
    }
    Ok(())
}

async fn not_seen_for_11_seconds(agent: &str) -> Result<()> {
    let pool = PgPool::connect(&shared().await.database_url).await?;
    sqlx::query("UPDATE agents SET last_seen_at = now() - interval '11 seconds' WHERE agent_id = $1")
        .bind(agent.parse::<i64>()?)
        .execute(&pool)
        .await?;
    Ok(())
}

/// Waits until the engine has noticed that an agent's connection ended.
async fn disconnected(key: &Api, name: &str) {
    wait::until("the agent to be offline", SOON, || async {
        key.get(&format!("/v1/agents/{name}")).await.is_ok_and(|reply| reply.data()["status"] == "offline")
    })
    .await;
}

#[tokio::test]
async fn an_action_of_an_agent_without_a_connection_is_refused_at_once() -> Result<()> {
    let place = CallScene::new("handler-lost").await?;
    let (agent, bob) = handler(&place).await?;
    // Never connected: it may handle over REST, as a subscription tells it, however long it was silent.
    not_seen_for_11_seconds(&agent.id).await?;
    place.invoke("count", json!({})).await?;
    let socket = bob.direct_socket().await?;
    place.invoke("count", json!({})).await?;
    socket.close().await?;
    disconnected(&place.key, "bob").await;
    place.invoke("count", json!({})).await.context("its client may be reconnecting")?;
    age_connection(&format!("node_direct_{}", agent.id), 11).await?;
    let invoke = "/v1/actions/count/invoke";
    let there = place.ann().at(&shared().await.gateways[1]);
    there.post(invoke, json!({})).await?.refused(503, "handler_unavailable")?;
    let keyed = || there.call(Method::POST, invoke, Some(json!({})), &[("Idempotency-Key", "one")]);
    keyed().await?.refused(503, "handler_unavailable")?;
    place.invoke("count", json!({ "durable": true })).await.context("a durable one waits")?;
    // The refused key is free, and the handler has returned.
    let mut socket = bob.direct_socket().await?;
    let made = keyed().await?.success()?;
    let id = text(&made["invocation_id"]).to_owned();
    socket.expect_where("the invocation", SOON, |frame| frame["invocation_id"] == id.as_str()).await?;
    Ok(())
}

#[tokio::test]
async fn capabilities_that_queue_and_agents_without_a_socket_wait() -> Result<()> {
    let place = CallScene::new("handler-waits").await?;
    for (name, provider, capability) in [
        ("queues", "tools", json!({ "name": "grind", "kind": "action", "global": true, "queue": true })),
        ("default", "default", json!({ "name": "mill", "kind": "action" })),
    ] {
        let node = place.node(name).await?;
        let mut socket = socket(&node, 1).await?;
        socket.request(register(&node, provider, &json!([capability]), 0)).await?;
        socket.close().await?;
        wait::until("the node to be offline", SOON, || async {
            let path = format!("/v1/nodes/{name}");
            place.key.get(&path).await.is_ok_and(|reply| reply.data()["status"] == "offline")
        })
        .await;
    }
    for action in ["grind", "mill"] {
        let ack = place.ann().post(&format!("/v1/actions/{action}/invoke"), json!({})).await?.success()?;
        assert_eq!(ack["status"], "pending", "{ack}");
    }
    let (_, bob) = handler(&place).await?;
    let delivery = json!({ "url": "https://93.184.215.14/hook" });
    for node in [
        json!({ "name": "fetch", "kind": "poll" }),
        json!({ "name": "hook", "kind": "http_push", "delivery": delivery, "max_agents": 1 }),
    ] {
        let made = place.key.post("/v1/nodes", node).await?.success()?;
        place.key.bind(text(&made["name"]), "bob").await?;
        age_connection(text(&made["id"]), 3600).await?;
        let id = place.invoke("count", json!({})).await?;
        bob.post(&format!("/v1/actions/count/invocations/{id}/complete"), json!({ "output": 1 })).await?.success()?;
    }
    Ok(())
}

#[tokio::test]
async fn an_action_of_an_agent_whose_broker_is_unavailable_is_refused() -> Result<()> {
    let place = CallScene::new("handler-broker").await?;
    let node = place.node("box").await?;
    let mut host = socket(&node, 1).await?;
    host.request(register(&node, "tools", &json!([]), 0)).await?;
    host.register_agent("bob").await?;
    place.key.post("/v1/actions", json!({ "name": "count", "handler_agent": "bob" })).await?.success()?;
    place.invoke("count", json!({})).await?;
    host.close().await?;
    disconnected(&place.key, "bob").await;
    place.invoke("count", json!({})).await.context("it may be reconnecting")?;
    age_connection(&node.node_id, 11).await?;
    let there = place.ann().at(&shared().await.gateways[1]);
    there.post("/v1/actions/count/invoke", json!({})).await?.refused(503, "handler_unavailable")?;
    place.invoke("count", json!({ "durable": true })).await.context("a durable one waits")?;
    Ok(())
}

/// It is on its own node again, which never had a connection.
#[tokio::test]
async fn an_action_of_an_agent_that_left_its_node_is_refused() -> Result<()> {
    let place = CallScene::new("handler-left").await?;
    let there = place.ann().at(&shared().await.gateways[1]);
    for (agent, deletes_node) in [("bob", false), ("cyd", true)] {
        let node = place.node(&format!("box-{agent}")).await?;
        let mut host = socket(&node, 1).await?;
        host.request(register(&node, "tools", &json!([]), 0)).await?;
        let born = host.register_agent(agent).await?;
        let action = format!("count-{agent}");
        place.key.post("/v1/actions", json!({ "name": action, "handler_agent": agent })).await?.success()?;
        if deletes_node {
            assert_eq!(place.key.delete(&format!("/v1/nodes/{}", node.name)).await?.status, 204);
        } else {
            host.request(json!({ "v": 1, "type": "agent.deregister", "agent_id": born["agent_id"] })).await?;
        }
        place.invoke(&action, json!({})).await.context("it may come up elsewhere")?;
        let path = format!("/v1/actions/{action}/invoke");
        // A gateway may still have to write when it last saw the agent.
        wait::until_ok("the refusal of a call to an agent that was not seen for 11 s", SOON, || async {
            not_seen_for_11_seconds(text(&born["agent_id"])).await?;
            there.post(&path, json!({})).await?.refused(503, "handler_unavailable")
        })
        .await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_taken_over_action_fails_the_open_invocations_of_the_former_handler() -> Result<()> {
    let place = CallScene::new("handler-replaced").await?;
    let (agent, bob) = handler(&place).await?;
    let mut caller = place.ann().at(&shared().await.gateways[1]).direct_socket().await?;
    let open = place.invoke("count", json!({})).await?;
    let cyd = place.key.as_agent(&place.key.register_agent("cyd").await?);
    let cyds = json!({ "name": "count", "handler_agent": "cyd" });
    cyd.post("/v1/actions", cyds.clone()).await?.refused(409, "action_name_conflict")?;
    let pool = PgPool::connect(&shared().await.database_url).await?;
    // A gateway may still have to write when it last saw bob.
    let taken = wait::until_ok("the take-over from an agent that was not seen for a minute", SOON, || async {
        sqlx::query("UPDATE agents SET last_seen_at = now() - interval '61 seconds' WHERE agent_id = $1")
            .bind(agent.id.parse::<i64>()?)
            .execute(&pool)
            .await?;
        let taken = cyd.post("/v1/actions", cyds.clone()).await?;
        ensure!(taken.status == 200, "{}", taken.body);
        anyhow::Ok(taken)
    })
    .await?;
    assert_eq!(taken.data()["handler_agent"], "cyd");
    assert_eq!(failure_notice(&mut caller, &open).await?, "handler_unavailable");
    let row = place.invocation("count", &open).await?;
    assert_eq!((&row["status"], &row["error"]), (&json!("failed"), &json!("handler_unavailable")));
    // The first outcome counts, and the next invocation is the new handler's.
    let complete = |id: &str| format!("/v1/actions/count/invocations/{id}/complete");
    let late = bob.post(&complete(&open), json!({ "output": 1 })).await?.success()?;
    assert_eq!(late["status"], "failed", "{late}");
    let next = place.invoke("count", json!({})).await?;
    bob.post(&complete(&next), json!({})).await?.refused(403, "forbidden")?;
    assert_eq!(cyd.post(&complete(&next), json!({ "output": 2 })).await?.success()?["output"], 2);
    Ok(())
}

#[tokio::test]
async fn a_deleted_action_fails_its_open_invocations() -> Result<()> {
    let place = CallScene::new("handler-deleted").await?;
    let (_, bob) = handler(&place).await?;
    let node = place.node("box").await?;
    let mut host = socket(&node, 1).await?;
    let capabilities = json!([{ "name": "build", "kind": "action" }, { "name": "other", "kind": "action" }]);
    host.request(register(&node, "default", &capabilities, 0)).await?;
    let mut caller = place.ann().at(&shared().await.gateways[1]).direct_socket().await?;
    let mut open = Vec::new();
    for action in ["count", "build", "other"] {
        open.push(place.invoke(action, json!({})).await?);
    }
    for id in &open[1..] {
        assert_eq!(&next_invocation(&mut host, SOON).await?, id);
    }
    assert_eq!(bob.delete("/v1/actions/count").await?.status, 204);
    assert_eq!(failure_notice(&mut caller, &open[0]).await?, "action_deleted");
    assert_eq!(place.key.at(bob.base()).delete("/v1/actions/build").await?.status, 204);
    assert_eq!(failure_notice(&mut caller, &open[1]).await?, "action_deleted");
    assert_eq!(place.invocation("build", &open[1]).await?["status"], "failed");
    let events = place.key.get("/v1/workspace/events").await?.success()?;
    let failed = events["events"].as_array().context("a list")?.iter().filter(|event| event["type"] == "action.failed");
    assert_eq!(failed.count(), 2, "{events}");
    // Another action of the same node goes on.
    let result = json!({ "v": 1, "type": "action.result", "invocation_id": open[2], "output": {} });
    host.send_json(&result).await?;
    assert_eq!(place.wait_for_outcome("other", &open[2]).await?["status"], "completed");
    let no_more = caller
        .expect_where("another failure", Duration::from_millis(300), |f| f["payload"]["type"] == "action.failed")
        .await;
    assert!(no_more.is_err(), "{no_more:?}");
    Ok(())
}
