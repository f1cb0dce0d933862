//! Agents hosted by a broker over its socket: respawned, recovered, taken over, and a provider's last words.

use std::time::Duration;

use anyhow::Result;
use relay_testkit::client::{Api, NodeSocket};
use relay_testkit::{shared, wait};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(10);

struct Scene {
    workspace: Api,
    sender: Api,
    socket: NodeSocket,
}

/// A broker with the cursor capability, registered, and an agent to talk to its agents.
async fn scene(node: &str) -> Result<Scene> {
    let workspace = Api::create_workspace(shared().await.any_gateway(), "hosting").await?;
    let sender = workspace.as_agent(&workspace.register_agent("sender").await?);
    let token = workspace.create_broker_node(node, node).await?;
    let mut socket = NodeSocket::connect(&workspace.ws_base(), &token.token).await?;
    socket.register_broker(node, node, "run-1").await?;
    Ok(Scene { workspace, sender, socket })
}

async fn next_delivery(socket: &mut NodeSocket) -> Result<Value> {
    socket.expect("deliver").await
}

fn shown(frame: &Value) -> (Option<i64>, Option<&str>) {
    (frame["seq"].as_i64(), frame["payload"]["data"]["text"].as_str())
}

#[tokio::test]
async fn an_agent_registered_again_on_one_connection_starts_where_it_was_told() -> Result<()> {
    let Scene { sender, mut socket, .. } = scene("respawn").await?;
    let first = socket.register_agent("worker").await?;
    assert_eq!(first["delivery_ack_seq"], 0, "{first}");
    for text in ["one", "two"] {
        sender.dm("worker", text).await?.success()?;
    }
    assert_eq!(shown(&next_delivery(&mut socket).await?), (Some(1), Some("one")));
    assert_eq!(shown(&next_delivery(&mut socket).await?), (Some(2), Some("two")));
    // The process dies with both in hand, neither acknowledged, and comes back on the same socket.
    let again = socket.register_agent("worker").await?;
    assert_eq!(again["agent_id"], first["agent_id"]);
    assert_ne!(again["token"], first["token"]);
    assert_eq!(again["delivery_ack_seq"], 0, "{again}");
    assert_eq!(shown(&next_delivery(&mut socket).await?), (Some(1), Some("one")));
    assert_eq!(shown(&next_delivery(&mut socket).await?), (Some(2), Some("two")));
    Ok(())
}

#[tokio::test]
async fn agents_that_an_inventory_leaves_out_are_sent_nothing_until_they_are_named_again() -> Result<()> {
    let Scene { workspace, sender, mut socket } = scene("inventory").await?;
    let hosted = socket.register_agent("worker").await?;
    let id = hosted["agent_id"].as_str().unwrap_or_default().to_owned();
    socket.inventory(&[]).await?;
    let worker = || async { workspace.get("/v1/agents/worker").await?.success() };
    wait::until("the agent to be offline", SOON, || async {
        worker().await.is_ok_and(|worker| worker["status"] == "offline")
    })
    .await;
    sender.dm("worker", "are you there?").await?.success()?;
    socket.inventory(&[(&id, "worker")]).await?;
    assert_eq!(shown(&next_delivery(&mut socket).await?), (Some(1), Some("are you there?")));
    Ok(())
}

#[tokio::test]
async fn a_deregistration_right_before_the_close_counts() -> Result<()> {
    let Scene { workspace, socket, .. } = scene("farewell").await?;
    let node = || async { workspace.get("/v1/nodes/farewell").await?.success() };
    wait::until("the node to be live", SOON, || async { node().await.is_ok_and(|node| node["live"] == true) }).await;
    socket.send_json(&json!({ "v": 1, "type": "node.deregister" })).await?;
    socket.close().await?;
    wait::until("the provider to be gone with its capabilities", SOON, || async {
        node().await.is_ok_and(|node| node["live"] == false && node["capabilities"] == json!([]))
    })
    .await;
    Ok(())
}

#[tokio::test]
async fn an_identity_is_recovered_by_its_own_node_only_under_its_own_id() -> Result<()> {
    let Scene { mut socket, .. } = scene("recovery").await?;
    let hosted = socket.register_agent("worker").await?;
    let recover = |id: &Value| json!({ "v": 1, "type": "agent.recover", "name": "worker", "expected_agent_id": id });
    let recovered = socket.request(recover(&hosted["agent_id"])).await?;
    assert_eq!(recovered["agent_id"], hosted["agent_id"], "{recovered}");
    let refused = socket.request(recover(&json!("1"))).await.expect_err("another id");
    assert!(refused.to_string().contains("agent_identity_conflict"), "{refused:#}");
    Ok(())
}

#[tokio::test]
async fn the_newest_socket_of_a_direct_node_wins_and_the_older_closes_with_4001() -> Result<()> {
    let workspace = Api::create_workspace(shared().await.any_gateway(), "hosting").await?;
    let ada = workspace.as_agent(&workspace.register_agent("ada").await?);
    let mut older = ada.direct_socket().await?;
    let _newer = ada.direct_socket().await?;
    assert_eq!(older.closed(SOON).await?, Some(4001));
    Ok(())
}
