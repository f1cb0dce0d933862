//! Frames that begin and do not end: a workspace holds its share of a gateway's memory with them, and others send
//! theirs meanwhile.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use futures::future::{join_all, try_join_all};
use relay_acceptance::{
    memory::{peak, reset_peak},
    tcp_client::TcpClient,
};
use relay_testkit::{
    client::{Api, NodeSocket},
    stack::Stack,
    wait,
};
use serde_json::json;
use sqlx::{Connection as _, PgConnection};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;

const MIB: u64 = 1024 * 1024;
const GROWTH: u64 = 64 * MIB;
/// Sockets of one token, whose frames would take more than 200 MiB.
const SOCKETS: usize = 300;
/// Attempts to open one of them.
const ATTEMPTS: usize = 100;
const SENT: usize = 900_000;
/// Time in which a gateway takes what it takes of a frame.
const SEND_WITHIN: Duration = Duration::from_secs(10);
const SOON: Duration = Duration::from_secs(30);
/// Results of a node: they would take 340 MiB.
const RESULTS: usize = 6;

/// First part of a text frame of a client, which declares a megabyte.
fn endless_frame() -> Vec<u8> {
    let mut frame = vec![0x81, 0xFF];
    frame.extend(1_000_000_u64.to_be_bytes());
    frame.extend([0; 4]);
    frame.resize(frame.len() + SENT, b' ');
    frame
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_that_never_end_take_a_share_of_the_memory() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let gateway = stack.gateway(0);
    let (attacker, other) = (
        Api::create_workspace(gateway.url(), "attacker").await?,
        Api::create_workspace(gateway.url(), "other").await?.without_retries(),
    );
    let node = attacker.create_broker_node("node_attacker", "attacker").await?;
    let header = [format!("authorization: Bearer {}", node.token)];
    let frame = endless_frame();
    let mut sockets = try_join_all((0..SOCKETS).map(|_| async {
        // A busy machine answers some of so many at once with 503, and clients repeat those.
        for _ in 0..ATTEMPTS {
            let (socket, head) = TcpClient::upgrade(gateway.url(), "/v1/node/ws", &header).await?;
            if head.status == 101 {
                return Ok(socket);
            }
            ensure!(head.status == 503, "{head:?}");
        }
        bail!("refused {ATTEMPTS} times");
    }))
    .await?;

    let before = reset_peak(gateway.pid())?;
    // Most of it stays in the buffers of the kernel.
    let attack = join_all(sockets.iter_mut().map(|socket| timeout(SEND_WITHIN, socket.send(&frame))));
    let others = async {
        wait::until("the share of the attacker is taken", SOON, || async {
            gateway.metric("relay_body_bytes").await.is_ok_and(|held| held >= (15 * MIB) as f64)
        })
        .await;
        let broker = other.create_broker_node("node_other", "other").await?;
        let mut socket = NodeSocket::connect(&other.ws_base(), &broker.token).await?;
        socket.register_broker(&broker.node_id, "other", "other").await?;
        let agents: Vec<_> = (0..5000).map(|nth| json!({ "name": format!("agent-{nth}"), "agent_id": "x" })).collect();
        // A frame of several hundred kilobytes is answered.
        let answer = socket.request(json!({ "v": 1, "type": "inventory.sync", "agents": agents })).await;
        ensure!(answer.is_err_and(|error| !error.to_string().contains("closed")), "an error frame");
        socket.register_agent("ann").await?;
        anyhow::Ok(())
    };
    let (_, others) = tokio::join!(attack, others);
    others?;
    let grown = peak(gateway.pid())?.saturating_sub(before);
    println!("grown by {} MiB", grown / MIB);
    ensure!(grown < GROWTH, "the gateway grew by {} MiB", grown / MIB);
    Ok(())
}

/// Providers of one node. Parsed, their heartbeats would take 300 MiB.
const PROVIDERS: usize = 60;

/// Heartbeats with capabilities that take 80 times their bytes once they are parsed, and wait to be written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeats_that_swell_when_they_are_parsed_wait_as_text() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let gateway = stack.gateway(0);
    let key = Api::create_workspace(gateway.url(), "attacker").await?;
    let node = key.create_broker_node("node_attacker", "attacker").await?;
    let mut sockets = try_join_all((0..PROVIDERS).map(|nth| {
        let (key, node) = (&key, &node);
        async move {
            let mut socket = NodeSocket::connect(&key.ws_base(), &node.token).await?;
            let registration = json!({
                "v": 1, "type": "node.register", "node_id": node.node_id, "name": node.name, "capabilities": [],
                "max_agents": 1, "tags": [], "version": "test",
                "provider": { "name": format!("provider-{nth}"), "instance_id": "one" },
            });
            socket.request(registration).await?;
            anyhow::Ok(socket)
        }
    }))
    .await?;
    // Heartbeats wait for these locks.
    let mut database = PgConnection::connect(stack.database_url()).await?;
    let mut transaction = database.begin().await?;
    sqlx::query("SELECT FROM providers FOR UPDATE").execute(&mut *transaction).await?;

    let before = reset_peak(gateway.pid())?;
    let metadata = [r#"{"":0}"#; 9_000].join(",");
    let heartbeat = |nth: usize| {
        format!(
            r#"{{"v":1,"type":"node.heartbeat","active_agents":0,"handlers_live":true,
                "capabilities":[{{"name":"relay:large-{nth}","metadata":{{"a":[{metadata}]}}}}]}}"#
        )
    };
    try_join_all(sockets.iter_mut().enumerate().map(|(nth, socket)| {
        let heartbeat = heartbeat(nth);
        async move {
            socket.send_message(Message::text(heartbeat)).await?;
            // Answered after the requests before it, and so after the heartbeat was taken over.
            socket.request(json!({ "v": 1, "type": "agent.deregister", "agent_id": "x" })).await
        }
    }))
    .await?;
    let grown = peak(gateway.pid())?.saturating_sub(before);
    transaction.rollback().await?;
    println!("grown by {} MiB", grown / MIB);
    ensure!(grown < 3 * GROWTH, "the gateway grew by {} MiB", grown / MIB);
    let client = reqwest::Client::new();
    wait::until_ok("the capabilities of all providers", SOON, || async {
        // Not parsed either.
        let request = client.get(format!("{}/v1/nodes/attacker", key.base())).bearer_auth(key.token());
        let shown = request.send().await?.error_for_status()?.text().await?;
        let capabilities = shown.matches(r#""relay:large-"#).count();
        ensure!(capabilities == PROVIDERS, "{capabilities} capabilities");
        Ok(())
    })
    .await
}

/// Requests for agents whose inputs take 80 times their bytes once they are parsed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spawns_that_swell_when_they_are_parsed_take_turns() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let gateway = stack.gateway(0);
    let key = Api::create_workspace(gateway.url(), "attacker").await?.without_retries();
    // Spawns wait for this lock, and are held meanwhile.
    let mut database = PgConnection::connect(stack.database_url()).await?;
    let mut transaction = database.begin().await?;
    sqlx::query("LOCK TABLE actions IN ACCESS EXCLUSIVE MODE").execute(&mut *transaction).await?;

    let before = reset_peak(gateway.pid())?;
    let waits = || async { gateway.metric("relay_body_waits_total").await.unwrap_or_default() };
    let waits_before = waits().await;
    let extra = [r#"{"":0}"#; 100_000].join(",");
    let body = format!(r#"{{"name":"writer","cli":"codex","task":"write","extra":[{extra}]}}"#);
    let client = reqwest::Client::new();
    let attack = join_all((0..RESULTS).map(|_| {
        let request = client.post(format!("{}/v1/agents/spawn", key.base())).bearer_auth(key.token());
        request.header("content-type", "application/json").body(body.clone()).send()
    }));
    let watch = async {
        wait::until("spawns that wait for memory", SOON, || async {
            waits().await >= waits_before + (RESULTS - 1) as f64
        })
        .await;
        let grown = peak(gateway.pid())?.saturating_sub(before);
        transaction.rollback().await?;
        println!("grown by {} MiB", grown / MIB);
        // One of them at a time, and the texts of the others.
        ensure!(grown < 3 * GROWTH, "the gateway grew by {} MiB", grown / MIB);
        anyhow::Ok(())
    };
    let (answers, watched) = tokio::join!(attack, watch);
    watched?;
    for answer in answers {
        let answer = answer?;
        ensure!(!answer.status().is_success(), "no node can spawn: {}", answer.status());
    }
    key.register_agent("ann").await?;
    Ok(())
}

/// Results of a node, each of which takes 80 times its bytes once it is parsed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn results_that_swell_when_they_are_parsed_take_turns() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let gateway = stack.gateway(0);
    let key = Api::create_workspace(gateway.url(), "attacker").await?;
    let node = key.create_broker_node("node_attacker", "attacker").await?;
    let mut socket = NodeSocket::connect(&key.ws_base(), &node.token).await?;
    socket.register_broker(&node.node_id, "attacker", "one").await?;
    // Results wait for this lock, and are held meanwhile.
    let mut database = PgConnection::connect(stack.database_url()).await?;
    let mut transaction = database.begin().await?;
    sqlx::query("LOCK TABLE invocations IN ACCESS EXCLUSIVE MODE").execute(&mut *transaction).await?;

    let before = reset_peak(gateway.pid())?;
    let waits_before = gateway.metric("relay_body_waits_total").await.unwrap_or(0.0);
    let output = [r#"{"":0}"#; 100_000].join(",");
    let result = format!(r#"{{"v":1,"type":"action.result","invocation_id":"inv_1","output":[{output}]}}"#);
    for _ in 0..RESULTS {
        socket.send_message(Message::text(result.clone())).await?;
    }
    wait::until("a result that waits for memory", SOON, || async {
        gateway.metric("relay_body_waits_total").await.is_ok_and(|waits| waits > waits_before)
    })
    .await;
    let grown = peak(gateway.pid())?.saturating_sub(before);
    transaction.rollback().await?;
    println!("grown by {} MiB", grown / MIB);
    // Two of them at most: one that waits for storage, and the text of another.
    ensure!(grown < 3 * GROWTH, "the gateway grew by {} MiB", grown / MIB);
    socket.register_agent("ann").await?;
    Ok(())
}
