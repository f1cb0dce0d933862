//! Calls to endpoints that hang, and to one host, by a workspace with children: they take the share of one tenant.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::future::try_join_all;
use relay_testkit::{
    client::Api,
    receiver::{Receiver, Reply},
    stack::Stack,
    wait,
};
use serde_json::json;

use super::create_family;

const WITHIN: Duration = Duration::from_secs(60);
/// Less than a call to a hanging endpoint takes.
const SOON: Duration = Duration::from_secs(6);
const HANG: Duration = Duration::from_secs(8);
/// Messages of the other tenant during the attack.
const MESSAGES: usize = 5;

/// Starts an endpoint that answers each call late, so that it takes a place meanwhile.
async fn hanging_endpoint() -> Result<Receiver> {
    Receiver::start(|_, _| Reply::After(HANG, Box::new(Reply::Status(204)))).await
}

/// Checks that the endpoint has never had many more calls at a time than the share of one tenant. A caller may begin
/// the next call before the endpoint has counted the end of the last one.
fn check_share(endpoint: &Receiver, share: usize) -> Result<()> {
    let most = endpoint.received().iter().map(|call| call.concurrent + 1).max().unwrap_or_default();
    ensure!(most <= share + share / 2, "{most} calls at a time, the share is {share}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hanging_endpoints_of_a_family_leave_calls_to_other_tenants() -> Result<()> {
    const CHILDREN: usize = 7;
    /// An eighth of all calls. Each workspace has as many agents, so that the family could take all of them.
    const SHARE: usize = 2;
    let stack = Stack::builder()
        .gateways(1)
        .env("RELAY_PUSH_CONCURRENCY", "16")
        .env("RELAY_PUSH_ENDPOINT_CONCURRENCY", SHARE.to_string())
        .start()
        .await?;
    let gateway = stack.gateway(0).url();
    let (hanging, receiver) = (hanging_endpoint().await?, Receiver::accepting_all().await?);
    let members = create_family(gateway, CHILDREN).await?;
    let senders = try_join_all(members.iter().map(|member| push_scene(member, &hanging, SHARE))).await?;
    let other = Api::create_workspace(gateway, "other").await?;
    let ann = push_scene(&other, &receiver, 1).await?;

    try_join_all(senders.iter().map(|sender| sender.post_message("general", "hello"))).await?;
    wait::until("calls that hang", WITHIN, || async { hanging.count() >= SHARE }).await;
    for count in 1..=MESSAGES {
        ann.dm("agent-0", "hello").await?.success()?;
        wait::until("the delivery of the other tenant", SOON, || async { receiver.calls("/").len() >= count }).await;
    }
    check_share(&hanging, SHARE)
}

/// Creates agents on one http_push node with this endpoint, and returns the client of another agent.
async fn push_scene(key: &Api, endpoint: &Receiver, agents: usize) -> Result<Api> {
    let delivery = json!({ "url": endpoint.url("/"), "ack_mode": "on_2xx" });
    let node = json!({ "name": "hook", "kind": "http_push", "max_agents": agents, "delivery": delivery });
    key.post("/v1/nodes", node).await?.success()?;
    for nth in 0..agents {
        let name = format!("agent-{nth}");
        key.register_agent(&name).await?;
        key.bind("hook", &name).await?;
    }
    Ok(key.as_agent(&key.register_agent("eve").await?))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hanging_subscriptions_of_a_family_leave_places_to_other_tenants() -> Result<()> {
    const CHILDREN: usize = 3;
    /// Subscriptions of one tenant that a worker serves at a time, a quarter of all.
    const SHARE: usize = 16;
    let stack = Stack::builder().gateways(1).start().await?;
    let gateway = stack.gateway(0).url();
    let (hanging, receiver) = (hanging_endpoint().await?, Receiver::accepting_all().await?);
    let members = create_family(gateway, CHILDREN).await?;
    let senders = try_join_all(members.iter().map(|member| subscribe(member, hanging.url("/"), SHARE))).await?;
    let other = Api::create_workspace(gateway, "other").await?;
    let ann = subscribe(&other, receiver.url("/"), 1).await?;

    try_join_all(senders.iter().map(|sender| sender.post_message("general", "hello"))).await?;
    wait::until("calls that hang", WITHIN, || async { hanging.count() >= SHARE }).await;
    for count in 1..=MESSAGES {
        ann.post_message("general", "hello").await?.success()?;
        receiver.wait_for(count, SOON).await;
    }
    check_share(&hanging, SHARE)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_family_has_the_pace_of_one_tenant_at_a_host() -> Result<()> {
    const CHILDREN: usize = 3;
    const CALLS_PER_SECOND: usize = 10;
    /// With each post, every workspace could use the burst of a tenant.
    const SUBSCRIPTIONS: usize = 10;
    const POSTS: usize = 2;
    let stack =
        Stack::builder().gateways(1).env("RELAY_DESTINATION_CALL_RATE", CALLS_PER_SECOND.to_string()).start().await?;
    let gateway = stack.gateway(0).url();
    let victim = Receiver::accepting_all().await?;
    let members = create_family(gateway, CHILDREN).await?;
    let senders =
        try_join_all(members.iter().map(|member| subscribe(member, victim.url("/attack"), SUBSCRIPTIONS))).await?;
    let other = Api::create_workspace(gateway, "other").await?;
    let ann = subscribe(&other, victim.url("/other"), 1).await?;

    for _ in 0..POSTS {
        try_join_all(senders.iter().map(|sender| sender.post_message("general", "hello"))).await?;
    }
    victim.wait_for(CALLS_PER_SECOND, WITHIN).await;
    let posted = Instant::now();
    ann.post_message("general", "hello").await?.success()?;
    wait::until("the call of the other tenant", WITHIN, || async { !victim.events("/other").is_empty() }).await;
    ensure!(posted.elapsed() < SOON, "the other tenant waited for {:?}", posted.elapsed());

    let all = members.len() * SUBSCRIPTIONS * POSTS;
    wait::until("all calls", WITHIN, || async { victim.events("/attack").len() >= all }).await;
    let calls = victim.events("/attack");
    for (nth, first) in calls.iter().enumerate() {
        for (count, last) in (1..).zip(&calls[nth..]) {
            let seconds = last.at.duration_since(first.at).as_secs_f64();
            // A burst of one second, and calls that were on their way when the first one had arrived.
            let most = CALLS_PER_SECOND as f64 * (seconds + 1.5);
            ensure!(f64::from(count) <= most, "{count} calls within {seconds} s");
        }
    }
    Ok(())
}

/// Subscribes a URL to messages, so many times, and returns the client of an agent.
async fn subscribe(key: &Api, url: String, count: usize) -> Result<Api> {
    for _ in 0..count {
        let body = json!({ "events": ["message.created"], "url": url });
        key.post("/v1/subscriptions", body).await?.success()?;
    }
    Ok(key.as_agent(&key.register_agent("eve").await?))
}
