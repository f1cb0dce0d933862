//! One post that many subscriptions of its workspace match, all of them at one host: it is stored once, and leaves at
//! the rate of one host.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures::future::try_join_all;
use relay_testkit::{
    client::Api,
    receiver::{Received, Receiver},
    stack::Stack,
};
use serde_json::json;
use sqlx::{Connection as _, PgConnection};

const SOON: Duration = Duration::from_secs(60);
const SUBSCRIPTIONS: usize = 100;
const BLOCK_BYTES: usize = 800 * 1024;
/// Bytes per second of the workspace to one host: a tenth of what is to be sent.
const BYTE_RATE: usize = 8 * 1024 * 1024;

/// Returns the least number of seconds in which a host may have received the calls, from any of them to any later one.
fn check_rate(calls: &[Received]) -> Result<()> {
    for (nth, first) in calls.iter().enumerate() {
        let mut bytes = 0;
        for last in &calls[nth..] {
            bytes += last.body.len();
            let seconds = last.at.duration_since(first.at).as_secs_f64();
            // A burst of one second, and the calls that were on their way when the first one had arrived.
            let most = BYTE_RATE as f64 * (seconds + 1.5) + 2.0 * BLOCK_BYTES as f64;
            ensure!(bytes as f64 <= most, "{bytes} bytes within {seconds} s");
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_post_with_many_subscriptions_is_stored_once_and_paced() -> Result<()> {
    let stack = Stack::builder().gateways(1).env("RELAY_DESTINATION_BYTE_RATE", BYTE_RATE.to_string()).start().await?;
    let gateway = stack.gateway(0).url();
    let (victim, endpoint) = (Receiver::accepting_all().await?, Receiver::accepting_all().await?);
    let subscription = |url: String| json!({ "events": ["message.created"], "url": url });
    let attacker = Api::create_workspace(gateway, "attacker").await?;
    let eve = attacker.register_agent("eve").await?;
    try_join_all((0..SUBSCRIPTIONS).map(|nth| {
        let created = attacker.post("/v1/subscriptions", subscription(victim.url(&format!("/{nth}"))));
        async { created.await?.success() }
    }))
    .await?;
    let other = Api::create_workspace(gateway, "other").await?;
    let ann = other.register_agent("ann").await?;
    other.post("/v1/subscriptions", subscription(endpoint.url("/"))).await?.success()?;

    let blocks = json!([{ "type": "section", "text": "x".repeat(BLOCK_BYTES) }]);
    let body = json!({ "text": "hello", "blocks": blocks });
    attacker.as_agent(&eve).post("/v1/channels/general/messages", body).await?.success()?;
    victim.wait_for(1, SOON).await;
    // While the calls of the attacker leave, those of others do not wait for them.
    let posted = Instant::now();
    other.as_agent(&ann).post_message("general", "hello").await?.success()?;
    endpoint.wait_for(1, SOON).await;
    let (latency, sent) = (posted.elapsed(), victim.count());
    ensure!(sent < SUBSCRIPTIONS, "the other tenant waited for the attacker");
    ensure!(latency < Duration::from_secs(5), "the other tenant's call took {latency:?}");

    let calls = victim.wait_for(SUBSCRIPTIONS, SOON).await;
    let paths: HashSet<&str> = calls.iter().map(|call| call.path.as_str()).collect();
    ensure!(paths.len() == SUBSCRIPTIONS && calls.len() == SUBSCRIPTIONS, "each subscription is called once");
    check_rate(&calls)?;
    let mut database = PgConnection::connect(stack.database_url()).await?;
    let stored: i64 = sqlx::query_scalar(
        "SELECT (SELECT coalesce(sum(length(body)), 0) FROM subscription_bodies)
              + (SELECT coalesce(sum(length(body)), 0) FROM subscription_deliveries)",
    )
    .fetch_one(&mut database)
    .await?;
    let one = calls.first().context("a call")?.body.len();
    ensure!(usize::try_from(stored)? < one + one / 10, "{stored} bytes are stored for a body of {one}");
    Ok(())
}
