//! The demo: two agents talk, a gateway is killed, nothing is lost.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use relay_stack::client::{Agent, Api, NodeSocket};
use relay_stack::stack::Service;
use relay_stack::wait;
use serde_json::Value;

use super::cluster::Cluster;
use super::workspace::register_or_rotate;

const SOON: Duration = Duration::from_secs(15);
const SENDER: &str = "demo-ada";
const RECEIVER: &str = "demo-bob";

pub(super) async fn run(cluster: &Cluster, workspace_key: &str) -> Result<()> {
    let (first, other) = (&cluster.gateways()[0], &cluster.gateways()[cluster.gateways().len() - 1]);
    let workspace = Api::new(other.url(), workspace_key);
    println!("Demo: {SENDER} writes to {RECEIVER}, whose gateway dies in between.\n");
    let ada = register_or_rotate(&workspace, SENDER).await?;
    let bob = register_or_rotate(&workspace, RECEIVER).await?;
    let (ada, bob_at_first) = (workspace.as_agent(&ada), Api::new(first.url(), &bob.token));

    let mut socket = bob_at_first.direct_socket().await.context("open bob's socket")?;
    println!("  {RECEIVER} is connected to {}", first.name());
    // Left over from an interrupted demo; bob has read them by now.
    let before = settle(&mut socket, &workspace, &bob).await?;

    for text in ["the build is green", "please review the parser", "and tag a release"] {
        say(&ada, other, text).await?;
        receive_delivery(&mut socket, first).await?;
    }
    socket.ack(RECEIVER, before + 2).await?;
    wait_for_floor(&workspace, &bob, before + 2).await?;
    println!("  {RECEIVER} acked up to seq {0}: its ack floor is {0}, seq {1} is not acked", before + 2, before + 3);

    println!("\n  kill -9 {} (pid {})", first.name(), first.pid());
    first.kill9();
    drop(socket);
    if cluster.gateways().len() > 1 {
        say(&ada, other, "are you still there?").await?;
    } else {
        // Its supervisor starts it again in a moment.
        wait::until_ok("the gateway to be back", SOON, || async {
            ensure!(first.is_ready().await, "not ready yet");
            anyhow::Ok(())
        })
        .await?;
        say(&ada, first, "are you still there?").await?;
    }

    let mut socket = wait::until_ok("bob to get in again", SOON, || async {
        Api::new(other.url(), &bob.token).direct_socket().await
    })
    .await?;
    println!("  {RECEIVER} is connected to {}; from its ack floor on, it gets:", other.name());
    for expected in [before + 3, before + 4] {
        let seq = receive_delivery(&mut socket, other).await?;
        ensure!(seq == expected, "seq {expected} was due, {seq} came");
    }
    socket.ack(RECEIVER, before + 4).await?;
    wait_for_floor(&workspace, &bob, before + 4).await?;
    println!("  {RECEIVER}'s ack floor is {}: in order, none lost, none repeated that was acked.", before + 4);
    // All was shown by now; an error of the close changes nothing.
    let _ = socket.close().await;
    Ok(())
}

async fn say(from: &Api, through: &Service, text: &str) -> Result<()> {
    let reply = from.at(through.url()).dm(RECEIVER, text).await?.success()?;
    let id = reply["message"]["id"].as_str().unwrap_or("?");
    println!("  {SENDER} -> {RECEIVER}, accepted by {} as {id}: {text:?}", through.name());
    Ok(())
}

/// Prints the next durable frame and returns its seq.
async fn receive_delivery(socket: &mut NodeSocket, through: &Service) -> Result<u64> {
    let frame = next_durable(socket, SOON).await?;
    let seq = frame["seq"].as_u64().unwrap_or(0);
    println!("      {} delivers seq {seq} to {RECEIVER}: {}", through.name(), text_of(&frame));
    Ok(seq)
}

async fn next_durable(socket: &mut NodeSocket, within: Duration) -> Result<Value> {
    let durable = |frame: &Value| frame["type"] == "deliver" && frame["seq"].as_u64() > Some(0);
    socket.expect_where("a deliver frame", within, durable).await
}

fn text_of(frame: &Value) -> &Value {
    let data = &frame["payload"]["data"];
    if data["text"].is_string() { &data["text"] } else { &data["message"]["text"] }
}

/// Acks everything that waits, and returns the floor from which the demo counts.
async fn settle(socket: &mut NodeSocket, workspace: &Api, bob: &Agent) -> Result<u64> {
    let mut floor = ack_floor(workspace, bob).await?;
    while let Ok(frame) = next_durable(socket, Duration::from_millis(500)).await {
        floor = floor.max(frame["seq"].as_u64().unwrap_or(0));
    }
    socket.ack(RECEIVER, floor).await?;
    wait_for_floor(workspace, bob, floor).await?;
    Ok(floor)
}

async fn wait_for_floor(workspace: &Api, agent: &Agent, floor: u64) -> Result<()> {
    wait::until_ok("the ack to be recorded", SOON, || async {
        let now = ack_floor(workspace, agent).await?;
        ensure!(now >= floor, "the floor is {now}, not {floor}");
        anyhow::Ok(())
    })
    .await
}

/// `delivery_ack_seq` of the agent's direct node.
async fn ack_floor(workspace: &Api, agent: &Agent) -> Result<u64> {
    let bindings = workspace.get(&format!("/v1/nodes/direct-{}/agents", agent.id)).await?.success()?;
    let own = bindings
        .as_array()
        .and_then(|list| {
            list.iter().find(|binding| {
                binding["agent_id"] == agent.id.as_str() || binding["agent_name"] == agent.name.as_str()
            })
        })
        .with_context(|| format!("no binding of {} in {bindings}", agent.name))?;
    own["delivery_ack_seq"].as_u64().with_context(|| format!("no delivery_ack_seq in {own}"))
}
