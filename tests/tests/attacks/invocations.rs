//! Large inputs of invocations: those for a node that reads nothing take a bounded part of its gateway, and do not hold
//! up those of others.

use std::time::Duration;

use anyhow::{Result, ensure};
use futures::future::join_all;
use relay_acceptance::memory::{peak, reset_peak};
use relay_testkit::{
    client::{Api, NodeSocket},
    stack::Stack,
};
use serde_json::json;
use sqlx::{Connection as _, PgConnection};

const MIB: u64 = 1024 * 1024;
const GROWTH: u64 = 64 * MIB;
/// Invocations that may wait for one node.
const WAITING: i64 = 100;
/// Repeats the only invocation, which waits for its node.
const COPY_INVOCATION: &str = "INSERT INTO invocations
    SELECT (jsonb_populate_record(i, jsonb_build_object('invocation_id', i.invocation_id + nth))).*
      FROM invocations i, generate_series(1, $1) AS nth";
/// Inputs at the same time that take 56 MiB each once they are parsed.
const SWELLING: usize = 12;
const SOON: Duration = Duration::from_secs(30);

/// Connects a broker that can run `build`, and registers an agent that invokes it.
async fn builder(key: &Api) -> Result<(NodeSocket, Api)> {
    let node = key.create_broker_node("node_builder", "builder").await?;
    let mut socket = NodeSocket::connect(&key.ws_base(), &node.token).await?;
    socket.register_broker_with(&node.node_id, "builder", "one", &["build"]).await?;
    Ok((socket, key.as_agent(&key.register_agent("ann").await?)))
}

/// Invokes `build` with an input of this size, too large for a hint.
async fn invoke(agent: &Api, bytes: usize) -> Result<()> {
    let input = json!({ "input": { "text": "x".repeat(bytes) } });
    agent.post("/v1/nodes/builder/actions/build/invoke", input).await?.success()?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inputs_for_a_node_that_reads_nothing_take_a_bounded_part_of_a_gateway() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).env("RELAY_RATE_LIMITS", "off").start().await?;
    let gateway = stack.gateway(0);
    let (attacker, other) =
        (Api::create_workspace(gateway.url(), "attacker").await?, Api::create_workspace(gateway.url(), "other").await?);
    let (silent, attacker) = builder(&attacker).await?;
    silent.set_reading(false);
    let (mut node, other) = builder(&other).await?;
    let heartbeat = json!({ "v": 1, "type": "node.heartbeat", "load": 0.5, "active_agents": 1, "handlers_live": true });
    invoke(&attacker, 700_000).await?;
    // A debug build takes a good part of a second for one of them.
    let mut database = PgConnection::connect(stack.database_url()).await?;
    let copied = sqlx::query(COPY_INVOCATION).bind(WAITING - 2).execute(&mut database).await?;
    ensure!(copied.rows_affected() == u64::try_from(WAITING - 2)?, "{} copies", copied.rows_affected());
    // A node that is silent for too long would be disconnected.
    silent.send_json(&heartbeat).await?;
    node.send_json(&heartbeat).await?;

    let before = reset_peak(gateway.pid())?;
    for _ in 0..5 {
        invoke(&other, 100_000).await?;
        node.expect_where("an invocation", SOON, |frame| frame["type"] == "action.invoke").await?;
    }
    let grown = peak(gateway.pid())?.saturating_sub(before);
    println!("grown by {} MiB", grown / MIB);
    ensure!(grown < GROWTH, "the gateway grew by {} MiB", grown / MIB);
    Ok(())
}

/// Input of 700 kB that takes 80 times as much once it is parsed.
fn swelling_input() -> String {
    format!(r#"{{"input":{{"list":[{}]}}}}"#, [r#"{"":0}"#; 100_000].join(","))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inputs_that_swell_when_they_are_parsed_take_turns() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let gateway = stack.gateway(0);
    let key = Api::create_workspace(gateway.url(), "attacker").await?.without_retries();
    let ann = key.register_agent("ann").await?;
    key.post("/v1/actions", json!({ "name": "run", "handler_agent": "ann" })).await?.success()?;
    let (client, input) = (reqwest::Client::new(), swelling_input());
    let invoke = || async {
        let url = format!("{}/v1/actions/run/invoke", key.base());
        let request = client.post(url).bearer_auth(&ann.token).header("content-type", "application/json");
        anyhow::Ok(request.body(input.clone()).send().await?.status().as_u16())
    };
    ensure!(invoke().await? == 201, "one is accepted");
    let before = reset_peak(gateway.pid())?;
    let answers = join_all((0..SWELLING).map(|_| invoke())).await;
    let grown = peak(gateway.pid())?.saturating_sub(before);
    println!("grown by {} MiB: {answers:?}", grown / MIB);
    for answer in answers {
        let status = answer?;
        ensure!(matches!(status, 201 | 503 | 429), "answered with {status}");
    }
    // Two of them at most: one parsed, and one on its way.
    ensure!(grown < 4 * GROWTH, "the gateway grew by {} MiB", grown / MIB);
    Ok(())
}
