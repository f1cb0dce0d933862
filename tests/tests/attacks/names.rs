//! Hosts whose name server never answers: their lookups take a share of their own tenant.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, future::try_join_all, stream};
use relay_testkit::{client::Api, names::NameServer, receiver::Receiver, stack::Stack, wait};
use serde_json::json;

use crate::shares::create_family;

const SOON: Duration = Duration::from_secs(30);
/// Time until breakers that events of the set-up have opened let calls through again: three times their 30 s, for a
/// loaded machine.
const LOOKED_UP_WITHIN: Duration = Duration::from_secs(90);
/// Lookups that a worker makes for one tenant at a time, each of which ends after [`LOOKUP_TIMEOUT`].
const SHARE: usize = 8;
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// Child workspaces of the attacker: with its root, they could take all 128 lookups that a worker makes at a time.
const CHILDREN: usize = 15;
/// Nodes of each of its workspaces.
const NODES: usize = SHARE + 1;
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
async fn unanswered_lookups_of_a_family_leave_the_resolver_to_other_tenants() -> Result<()> {
    let names = NameServer::start().await?;
    let stack = Stack::builder()
        .gateways(1)
        .env("RELAY_EGRESS_NAME_SERVERS", names.address().to_string())
        .env("RELAY_EGRESS_STRICT", "off")
        .start()
        .await?;
    let gateway = stack.gateway(0).url();
    let members = create_family(gateway, CHILDREN).await?;
    let senders = try_join_all(members.iter().map(|member| member.register_agent("eve"))).await?;
    let agents = members.iter().enumerate().flat_map(|(of, member)| (0..NODES).map(move |nth| (member, of, nth)));
    stream::iter(agents)
        .map(|(member, of, nth)| silent_agent(member, of, nth))
        .buffer_unordered(CONCURRENT_REQUESTS)
        .try_collect::<()>()
        .await?;
    let receiver = Receiver::accepting_all().await?;
    let other = Api::create_workspace(gateway, "other").await?;
    let ann = other.as_agent(&other.register_agent("ann").await?);
    // A name, so that it is looked up for each call.
    let url = receiver.url("/hook").replace("127.0.0.1", "hooks.example");
    push_agent(&other, "bob", url).await?;

    // Registrations are events, whose posts have looked names up already.
    names.forget_unanswered_names();
    let posts = members.iter().zip(&senders).map(|(member, eve)| member.as_agent(eve));
    try_join_all(posts.map(|eve| async move { eve.post_message("general", "hello").await?.success() })).await?;
    wait::until_ok("the lookups of the attacker", LOOKED_UP_WITHIN, || async {
        ensure!(names.unanswered_names() >= SHARE, "{} lookups", names.unanswered_names());
        Ok(())
    })
    .await?;
    // For so long that each lookup of the attacker ends once, and others have their turns.
    names.forget_unanswered_names();
    let attacked = Instant::now();
    while attacked.elapsed() < LOOKUP_TIMEOUT {
        let before = receiver.count();
        ann.dm("bob", "hello").await?.success()?;
        receiver.wait_for(before + 1, SOON).await;
    }
    let lookups = names.unanswered_names();
    // Those that were in progress when the count began may ask once more; then each turn takes its whole time.
    let rounds = attacked.elapsed().as_secs() / LOOKUP_TIMEOUT.as_secs() + 2;
    let most = SHARE * usize::try_from(rounds)?;
    ensure!(lookups <= most, "{lookups} lookups, at most {most}");
    Ok(())
}

/// Creates an agent of one of the attacker's workspaces, on a host of its own.
async fn silent_agent(member: &Api, of: usize, nth: usize) -> Result<()> {
    push_agent(member, &format!("agent-{nth}"), format!("http://silent.host-{of}-{nth}.example/")).await
}
