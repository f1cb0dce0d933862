//! Agents hosted by a broker: respawn, recovery, takeover, and deregistration.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use relay_testkit::client::{Api, NodeSocket};
use relay_testkit::{shared, wait};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

struct Scene {
    workspace: Api,
    sender: Api,
    socket: NodeSocket,
}

/// Scene with a registered broker that has the cursor capability, and a sender.
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
async fn an_agent_registered_again_resumes_at_the_reported_position() -> Result<()> {
    let Scene { sender, mut socket, .. } = scene("respawn").await?;
    let first = socket.register_agent("worker").await?;
    assert_eq!(first["delivery_ack_seq"], 0, "{first}");
    for text in ["one", "two"] {
        sender.dm("worker", text).await?.success()?;
    }
    assert_eq!(shown(&next_delivery(&mut socket).await?), (Some(1), Some("one")));
    assert_eq!(shown(&next_delivery(&mut socket).await?), (Some(2), Some("two")));
    // The agent's process dies with two unacknowledged deliveries and registers again on the same socket.
    let again = socket.register_agent("worker").await?;
    assert_eq!(again["agent_id"], first["agent_id"]);
    assert_ne!(again["token"], first["token"]);
    assert_eq!(again["delivery_ack_seq"], 0, "{again}");
    assert_eq!(shown(&next_delivery(&mut socket).await?), (Some(1), Some("one")));
    assert_eq!(shown(&next_delivery(&mut socket).await?), (Some(2), Some("two")));
    Ok(())
}

#[tokio::test]
async fn agents_missing_from_an_inventory_get_nothing_until_listed_again() -> Result<()> {
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
async fn a_malformed_inventory_entry_does_not_affect_others() -> Result<()> {
    let Scene { workspace, sender, mut socket } = scene("unreadable").await?;
    let hosted = socket.register_agent("worker").await?;
    let other = socket.register_agent("other").await?;
    let entry =
        |id: &Value, name: &str, session: String| json!({ "agent_id": id, "name": name, "session_ref": session });
    let agents = json!([
        entry(&json!("none of ours"), "stranger", String::new()),
        entry(&other["agent_id"], "other", "x".repeat(2000)),
        entry(&hosted["agent_id"], "worker", "s".to_owned()),
    ]);
    socket.request(json!({ "v": 1, "type": "inventory.sync", "agents": agents })).await?;
    for name in ["worker", "other"] {
        sender.dm(name, "still here?").await?.success()?;
        assert_eq!(shown(&next_delivery(&mut socket).await?), (Some(1), Some("still here?")));
    }
    // A malformed inventory changes nothing.
    let strangers = json!([entry(&json!("none of ours"), "stranger", String::new())]);
    let refused = socket.request(json!({ "v": 1, "type": "inventory.sync", "agents": strangers })).await;
    assert!(refused.is_err(), "{refused:?}");
    for name in ["worker", "other"] {
        let agent = workspace.get(&format!("/v1/agents/{name}")).await?.success()?;
        assert_ne!(agent["status"], "offline", "{name}");
    }
    Ok(())
}

/// A broker that reconnects with `worker` and `other`, each with an acknowledged message. It does not answer the
/// position requests and then lists `other` alone.
async fn reconnect_without_positions(node: &str) -> Result<Scene> {
    let Scene { workspace, sender, mut socket } = scene(node).await?;
    let mut listed = Vec::new();
    for name in ["worker", "other"] {
        let hosted = socket.register_agent(name).await?;
        let agent = workspace.with_token(hosted["token"].as_str().unwrap_or_default());
        sender.dm(name, "one").await?.success()?;
        assert_eq!(shown(&next_delivery(&mut socket).await?), (Some(1), Some("one")));
        socket.ack(name, 1).await?;
        wait::until("the ack to be stored", SOON, || async {
            agent.get("/v1/deliveries").await.is_ok_and(|rows| rows.data() == &json!([]))
        })
        .await;
        listed.push((hosted["agent_id"].as_str().unwrap_or_default().to_owned(), name));
    }
    socket.close().await?;
    let token = workspace.create_broker_node(node, node).await?;
    let mut socket = NodeSocket::connect(&workspace.ws_base(), &token.token).await?;
    socket.register_broker(node, node, "run-2").await?;
    let agents: Vec<_> = listed.iter().map(|(id, name)| (id.as_str(), *name)).collect();
    socket.inventory(&agents).await?;
    for _ in &agents {
        let asked = next_delivery(&mut socket).await?;
        assert_eq!((shown(&asked).0, &asked["payload"]["type"]), (Some(0), &json!("delivery.position")), "{asked}");
    }
    socket.inventory(&agents[1..]).await?;
    // Frames before this answer were sent while both were listed.
    while socket.next_frame(Duration::ZERO).await.is_ok() {}
    Ok(Scene { workspace, sender, socket })
}

#[tokio::test]
async fn an_unanswered_position_request_times_out_on_a_busy_connection() -> Result<()> {
    let Scene { sender, mut socket, .. } = reconnect_without_positions("busy").await?;
    sender.dm("other", "two").await?.success()?;
    let asked = Instant::now();
    let second = loop {
        socket.heartbeat("busy").await?;
        if let Ok(frame) = socket.next_frame(Duration::from_millis(20)).await
            && shown(&frame).0 == Some(2)
        {
            break frame;
        }
        ensure!(asked.elapsed() < SOON, "nothing came while the connection was busy");
    };
    assert_eq!((shown(&second).1, &second["agent"]), (Some("two"), &json!("other")));
    Ok(())
}

#[tokio::test]
async fn an_agent_no_longer_listed_after_its_position_request_gets_nothing() -> Result<()> {
    let Scene { sender, mut socket, .. } = reconnect_without_positions("unlisted").await?;
    for (number, text) in [(2, "two"), (3, "three")] {
        sender.dm("worker", text).await?.success()?;
        sender.dm("other", text).await?.success()?;
        // Both positions were requested together, so a delivery for one would have arrived like one for the other.
        loop {
            let frame = next_delivery(&mut socket).await?;
            assert_eq!(frame["agent"], "other", "{frame}");
            if shown(&frame).0 == Some(number) {
                break;
            }
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_deregistration_right_before_the_close_takes_effect() -> Result<()> {
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

/// The acks and the deregistration go out in one flight, before acks are written by time.
#[tokio::test]
async fn acks_right_before_a_deregistration_count() -> Result<()> {
    for whole_provider in [false, true] {
        let node = if whole_provider { "whole" } else { "single" };
        let Scene { workspace, sender, mut socket } = scene(node).await?;
        let hosted = socket.register_agent("worker").await?;
        sender.dm("worker", "one").await?.success()?;
        assert_eq!(shown(&next_delivery(&mut socket).await?), (Some(1), Some("one")));
        socket.ack("worker", 1).await?;
        let mut next = if whole_provider {
            socket.send_json(&json!({ "v": 1, "type": "node.deregister" })).await?;
            assert_eq!(socket.closed(SOON).await?, Some(1000));
            let token = workspace.create_broker_node(node, node).await?;
            let mut next = NodeSocket::connect(&workspace.ws_base(), &token.token).await?;
            next.register_broker(node, node, "run-2").await?;
            next
        } else {
            let left = json!({ "v": 1, "type": "agent.deregister", "agent_id": hosted["agent_id"] });
            socket.request(left).await?;
            socket
        };
        let again = next.register_agent("worker").await?;
        assert_eq!((&again["agent_id"], &again["delivery_ack_seq"]), (&hosted["agent_id"], &json!(1)), "{again}");
    }
    Ok(())
}

#[tokio::test]
async fn an_identity_is_recovered_only_by_its_node_and_under_its_id() -> Result<()> {
    let Scene { mut socket, .. } = scene("recovery").await?;
    let hosted = socket.register_agent("worker").await?;
    let recover = |id: &Value| json!({ "v": 1, "type": "agent.recover", "name": "worker", "expected_agent_id": id });
    let recovered = socket.request(recover(&hosted["agent_id"])).await?;
    assert_eq!(recovered["agent_id"], hosted["agent_id"], "{recovered}");
    let refused = socket.request(recover(&json!("1"))).await.expect_err("another id");
    assert!(refused.to_string().contains("agent_recovery_not_authorized"), "{refused:#}");
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

/// Its own node has no row, because it never requested a token.
#[tokio::test]
async fn a_retryable_failure_of_an_agent_without_a_node_token_is_redelivered() -> Result<()> {
    let workspace = Api::create_workspace(shared().await.any_gateway(), "tokenless").await?;
    let sender = workspace.as_agent(&workspace.register_agent("sender").await?);
    let ada = workspace.as_agent(&workspace.register_agent("ada").await?);
    sender.dm("ada", "one").await?.success()?;
    let listed = ada.get("/v1/deliveries").await?.success()?;
    let id = listed[0]["id"].as_str().unwrap_or_default().to_owned();
    let body = json!({ "error": "busy", "retryable": true });
    let failed = ada.post(&format!("/v1/deliveries/{id}/fail"), body).await?.success()?;
    assert_eq!((&failed["status"], &failed["redriven_as"]), (&json!("failed"), &json!(format!("{id}_r1"))), "{failed}");
    let listed = ada.get("/v1/deliveries").await?.success()?;
    assert_eq!((&listed[0]["id"], &listed[0]["seq"]), (&json!(format!("{id}_r1")), &json!(2)), "{listed}");
    let mut socket = ada.direct_socket().await?;
    let again = socket.expect_where("it again", SOON, |frame| frame["type"] == "deliver" && frame["seq"] == 2).await?;
    assert_eq!(shown(&again), (Some(2), Some("one")));
    Ok(())
}

#[tokio::test]
async fn a_retryable_failure_of_a_hosted_agent_is_redelivered_as_a_new_delivery() -> Result<()> {
    let Scene { workspace, sender, mut socket } = scene("retrying").await?;
    socket.auto_ack(false);
    let hosted = socket.register_agent("worker").await?;
    // Its reports go through any gateway.
    let gateways = &shared().await.gateways;
    let elsewhere = gateways.iter().find(|gateway| *gateway != workspace.base()).unwrap_or(&gateways[0]);
    let worker = workspace.at(elsewhere).with_token(hosted["token"].as_str().unwrap_or_default());
    let mut notices = sender.direct_socket().await?;
    let fail = |id: String| {
        let (worker, body) = (worker.clone(), json!({ "error": "busy", "retryable": true }));
        async move { worker.post(&format!("/v1/deliveries/{id}/fail"), body).await?.success() }
    };
    sender.dm("worker", "one").await?.success()?;
    let first = next_delivery(&mut socket).await?;
    let (message, id) =
        (first["msg_id"].as_str().unwrap_or_default(), first["delivery_id"].as_str().unwrap_or_default());
    for number in 1..=3 {
        let of = |number: i64| if number == 0 { id.to_owned() } else { format!("{id}_r{number}") };
        let failed = fail(of(number - 1)).await?;
        assert_eq!((&failed["status"], &failed["retryable"]), (&json!("failed"), &json!(true)), "{failed}");
        assert_eq!(failed["redriven_as"], json!(of(number)), "{failed}");
        let again = next_delivery(&mut socket).await?;
        assert_eq!(shown(&again), (Some(number + 1), Some("one")), "{again}");
        assert_eq!(again["msg_id"], json!(format!("{message}_r{number}")), "brokers remember ids");
        assert_eq!(fail(of(number - 1)).await?["redriven_as"], json!(of(number)), "once only");
    }
    let rows = worker.get("/v1/deliveries?status=failed").await?.success()?;
    let seqs: Vec<_> = rows.as_array().into_iter().flatten().filter_map(|row| row["seq"].as_i64()).collect();
    assert_eq!(seqs, [1, 2, 3]);

    // A message is redelivered at most three times.
    let last = fail(format!("{id}_r3")).await?;
    assert_eq!((&last["status"], &last["error"]), (&json!("dead_lettered"), &json!("busy")), "{last}");
    let letters = workspace.get("/v1/dead-letters").await?.success()?;
    assert_eq!(letters.as_array().map(Vec::len), Some(1), "{letters}");
    assert_eq!((&letters[0]["reason"], &letters[0]["seq"]), (&json!("attempts_exhausted"), &json!(4)));
    let reported = notices.expect_where("the notice", SOON, |frame| frame["event"] == "delivery.failed").await?;
    assert_eq!(reported["data"]["reason"], "attempts_exhausted", "{reported}");

    // The connection continues, and a later one gets no settled delivery.
    sender.dm("worker", "two").await?.success()?;
    assert_eq!(shown(&next_delivery(&mut socket).await?), (Some(5), Some("two")));
    socket.ack("worker", 5).await?;
    wait::until("all to be settled", SOON, || async {
        worker.get("/v1/deliveries").await.is_ok_and(|rows| rows.data() == &json!([]))
    })
    .await;
    let first = worker.get("/v1/deliveries?status=acked").await?.success()?;
    assert_eq!(first[0]["redriven_as"], json!(format!("{id}_r1")), "the link is kept: {first}");
    Ok(())
}
