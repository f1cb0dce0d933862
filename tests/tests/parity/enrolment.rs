//! Enrolment of nodes: names that are in use or were lately, and machines.

use anyhow::Result;
use relay_acceptance::{room::text, spawning::SOON};
use relay_testkit::{
    client::{Api, NodeSocket},
    shared, wait,
};
use serde_json::{Value, json};
use sqlx::PgPool;

fn node(id: Option<&str>, name: &str) -> Value {
    json!({ "node_id": id, "name": name, "machine_id": "m-1", "kind": "ws", "role": "broker" })
}

#[tokio::test]
async fn the_name_of_a_node_stays_its_own_until_an_operator_frees_it() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "enrolment").await?;
    let there = key.at(&gateways[1]);
    let made = key.post("/v1/nodes", node(Some("node_a"), "box")).await?.success()?;
    // It has not connected: the broker that starts next may be another one.
    let made_again = there.post("/v1/nodes", node(None, "second")).await?.success()?;
    assert_ne!(made_again["id"], "node_a", "the row of a broker that never connected is not reused");
    let mut socket = NodeSocket::connect(&there.ws_base(), text(&made["token"])).await?;
    socket.register_broker("node_a", "box", "run-1").await?;
    there.post("/v1/nodes", node(Some("node_b"), "box")).await?.refused(409, "node_name_conflict")?;
    assert_ne!(there.post("/v1/nodes", node(None, "third")).await?.success()?["id"], "node_a", "it is live");
    socket.close().await?;
    wait::until("the node to be offline", SOON, || async {
        key.get("/v1/nodes/box").await.is_ok_and(|reply| reply.data()["status"] == "offline")
    })
    .await;
    // A broker that lost its state has another id.
    key.post("/v1/nodes", node(Some("node_b"), "box")).await?.refused(409, "node_name_conflict")?;
    let other_role = json!({ "name": "fourth", "machine_id": "m-1", "kind": "poll" });
    assert_ne!(there.post("/v1/nodes", other_role).await?.success()?["id"], "node_a", "another kind");
    assert_eq!(there.delete("/v1/nodes/box").await?.status, 204);
    assert_eq!(key.post("/v1/nodes", node(Some("node_b"), "box")).await?.success()?["id"], "node_b");
    Ok(())
}

#[tokio::test]
async fn a_machine_finds_its_broker_again_while_it_is_offline() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "enrolment-machine").await?;
    let made = key.post("/v1/nodes", node(Some("node_a"), "box")).await?.success()?;
    let mut socket = NodeSocket::connect(&key.at(&gateways[1]).ws_base(), text(&made["token"])).await?;
    socket.register_broker("node_a", "box", "run-1").await?;
    socket.send_json(&json!({ "v": 1, "type": "node.deregister" })).await?;
    wait::until("the node to be offline", SOON, || async {
        key.get("/v1/nodes/box").await.is_ok_and(|reply| reply.data()["status"] == "offline")
    })
    .await;
    let found = key.at(&gateways[1]).post("/v1/nodes", node(None, "renamed")).await?.success()?;
    assert_eq!((text(&found["id"]), text(&found["name"])), ("node_a", "renamed"));
    Ok(())
}

#[tokio::test]
async fn a_machine_does_not_find_the_node_of_an_agent() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "enrolment-role").await?;
    let agent = key.register_agent("ann").await?;
    let own = key.as_agent(&agent).direct_node_token().await?;
    key.patch(&format!("/v1/nodes/{}", own.name), json!({ "machine_id": "m-1" })).await?.success()?;
    let socket = key.at(&gateways[1]).as_agent(&agent).direct_socket().await?;
    let made = key.post("/v1/nodes", node(None, "first")).await?.success()?;
    assert_ne!(text(&made["id"]), own.node_id, "it is live");
    socket.close().await?;
    wait::until("the agent to be offline", SOON, || async {
        key.get("/v1/agents/ann").await.is_ok_and(|reply| reply.data()["status"] == "offline")
    })
    .await;
    let made = key.at(&gateways[1]).post("/v1/nodes", node(None, "second")).await?.success()?;
    assert_ne!(text(&made["id"]), own.node_id, "it is offline");
    assert_eq!(key.get(&format!("/v1/nodes/{}", own.name)).await?.success()?["role"], "direct");
    Ok(())
}

#[tokio::test]
async fn kind_and_role_of_a_node_stay() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "enrolment-fixed").await?;
    let there = key.at(&gateways[1]);
    let made = key.post("/v1/nodes", node(Some("node_a"), "box")).await?.success()?;
    let mut socket = NodeSocket::connect(&there.ws_base(), text(&made["token"])).await?;
    socket.register_broker("node_a", "box", "run-1").await?;
    // Another node of the name, of whatever kind.
    let other = json!({ "node_id": "node_b", "name": "box", "kind": "poll" });
    there.post("/v1/nodes", other).await?.refused(409, "node_name_conflict")?;
    for id in [None, Some("node_a")] {
        let direct = json!({ "node_id": id, "name": "box", "role": "direct" });
        there.post("/v1/nodes", direct).await?.refused(400, "invalid_request")?;
        let poll = json!({ "node_id": id, "name": "box", "kind": "poll" });
        there.post("/v1/nodes", poll).await?.refused(400, "invalid_node_delivery")?;
    }
    assert_eq!(key.get("/v1/nodes/box").await?.success()?["role"], "broker");
    Ok(())
}

/// A broker that has run for longer than a name is kept is known to have been live until it left.
#[tokio::test]
async fn a_node_that_deregisters_keeps_its_name() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "enrolment-left").await?;
    let made = key.post("/v1/nodes", node(Some("node_left"), "box")).await?.success()?;
    let mut socket = NodeSocket::connect(&key.at(&gateways[1]).ws_base(), text(&made["token"])).await?;
    socket.register_broker("node_left", "box", "run-1").await?;
    let workspace: i64 = text(&key.get("/v1/workspace").await?.success()?["id"]).parse()?;
    sqlx::query("UPDATE nodes SET last_connected_at = now() - interval '25 hours' WHERE workspace_id = $1")
        .bind(workspace)
        .execute(&PgPool::connect(&shared().await.database_url).await?)
        .await?;
    socket.send_json(&json!({ "v": 1, "type": "node.deregister" })).await?;
    wait::until("the node to be offline", SOON, || async {
        key.get("/v1/nodes/box").await.is_ok_and(|reply| reply.data()["status"] == "offline")
    })
    .await;
    key.post("/v1/nodes", node(Some("node_other"), "box")).await?.refused(409, "node_name_conflict")?;
    Ok(())
}
