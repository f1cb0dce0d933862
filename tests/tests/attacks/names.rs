//! Hosts whose name server never answers: their lookups take a share of their own workspace.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use relay_testkit::{client::Api, names::NameServer, receiver::Receiver, stack::Stack, wait};
use serde_json::json;

const SOON: Duration = Duration::from_secs(30);
/// More than the lookups that a worker makes at a time.
const NODES: usize = 140;
/// Lookups that a worker makes for one workspace at a time, each of which ends after [`LOOKUP_TIMEOUT`].
const SHARE: usize = 8;
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
const MESSAGES: usize = 10;
const CONCURRENT_REQUESTS: usize = 16;

/// Creates an agent with an http_push node of its own.
async fn push_agent(key: &Api, name: &str, url: String) -> Result<()> {
    let delivery = json!({ "url": url, "ack_mode": "on_2xx" });
    key.post("/v1/nodes", json!({ "name": name, "kind": "http_push", "delivery": delivery })).await?.success()?;
    key.register_agent(name).await?;
    key.bind(name, name).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unanswered_lookups_leave_the_resolver_to_other_tenants() -> Result<()> {
    let names = NameServer::start().await?;
    let stack = Stack::builder()
        .gateways(1)
        .env("RELAY_EGRESS_NAME_SERVERS", names.address().to_string())
        .env("RELAY_EGRESS_STRICT", "off")
        .start()
        .await?;
    let gateway = stack.gateway(0).url();
    let attacker = Api::create_workspace(gateway, "attacker").await?;
    let eve = attacker.register_agent("eve").await?;
    stream::iter(0..NODES)
        .map(|nth| push_agent_of(&attacker, nth))
        .buffer_unordered(CONCURRENT_REQUESTS)
        .try_collect::<()>()
        .await?;
    let receiver = Receiver::accepting_all().await?;
    let other = Api::create_workspace(gateway, "other").await?;
    let ann = other.as_agent(&other.register_agent("ann").await?);
    // A name, so that it is looked up for each call.
    let url = receiver.url("/hook").replace("127.0.0.1", "hooks.example");
    push_agent(&other, "bob", url).await?;

    let began = Instant::now();
    attacker.as_agent(&eve).post_message("general", "hello").await?.success()?;
    wait::until_ok("the lookups of the attacker", SOON, || async {
        ensure!(names.unanswered_names() >= SHARE, "{} lookups", names.unanswered_names());
        Ok(())
    })
    .await?;
    for count in 1..=MESSAGES {
        ann.dm("bob", "hello").await?.success()?;
        receiver.wait_for(count, SOON).await;
    }
    let windows = began.elapsed().as_secs() / LOOKUP_TIMEOUT.as_secs() + 2;
    let most = SHARE * usize::try_from(windows)?;
    ensure!(names.unanswered_names() <= most, "{} lookups, at most {most}", names.unanswered_names());
    Ok(())
}

/// Creates an agent of the attacker, on a host of its own.
async fn push_agent_of(attacker: &Api, nth: usize) -> Result<()> {
    push_agent(attacker, &format!("agent-{nth}"), format!("http://silent.host-{nth}.example/")).await
}
