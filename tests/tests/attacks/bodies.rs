//! Bodies that begin and do not end: a workspace holds its share of a gateway's memory with them, and others send
//! theirs meanwhile.

use std::time::Duration;

use anyhow::{Result, ensure};
use futures::future::join_all;
use relay_acceptance::{
    memory::{peak, reset_peak},
    tcp_client::TcpClient,
};
use relay_testkit::{client::Api, stack::Stack, wait};
use serde_json::json;

const MIB: u64 = 1024 * 1024;
const GROWTH: u64 = 64 * MIB;
/// Much more than the bound, if they were all held.
const ATTACKERS: usize = 100;
const DECLARED: usize = 1_000_000;
const SENT: usize = 900_000;
/// Bodies of this size that a workspace may hold: a quarter of 64 MiB.
const HELD: usize = 16;
const SOON: Duration = Duration::from_secs(30);

/// Posts messages with a large body, until the attack holds its share and then some more.
async fn post_meanwhile(stack: &Stack, other: &Api) -> Result<()> {
    wait::until("the share of the attacker is taken", SOON, || async {
        stack.gateway(0).metric("relay_body_bytes").await.is_ok_and(|held| held >= (15 * MIB) as f64)
    })
    .await;
    for _ in 0..3 {
        post_large(other).await?;
    }
    Ok(())
}

async fn post_large(tenant: &Api) -> Result<()> {
    let body = json!({ "text": "hello", "blocks": [{ "type": "x", "value": "y".repeat(600_000) }] });
    let posted = tenant.post("/v1/channels/general/messages", body).await?;
    ensure!(posted.status == 201, "another tenant got {}", posted.status);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_that_never_end_take_a_share_of_the_memory_and_the_rest_is_refused() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let gateway = stack.gateway(0);
    let key = Api::create_workspace(gateway.url(), "bodies").await?;
    let ann = key.register_agent("ann").await?;
    let other = Api::create_workspace(gateway.url(), "other").await?.without_retries();
    let other = other.as_agent(&other.register_agent("bob").await?).without_retries();
    let mut request = format!(
        "POST /v1/channels/general/messages HTTP/1.1\r\nhost: relay\r\nauthorization: Bearer {}\r\n\
         content-type: application/json\r\ncontent-length: {DECLARED}\r\n\r\n",
        ann.token
    )
    .into_bytes();
    request.resize(request.len() + SENT, b' ');

    post_large(&other).await?;
    let before = reset_peak(gateway.pid())?;
    let attack = join_all((0..ATTACKERS).map(|_| async {
        let mut client = TcpClient::connect(gateway.url()).await?;
        client.send(&request).await?;
        let head = client.head().await?;
        ensure!(head.status == 503 && head.has("retry-after: 1"), "{head:?}");
        let code = client.error_code(&head).await?;
        ensure!(code == "workspace_busy", "{code}");
        Ok(())
    }));
    let (attackers, others) = tokio::join!(attack, post_meanwhile(&stack, &other));
    others?;
    let grown = peak(gateway.pid())?.saturating_sub(before);
    let refused = attackers.iter().filter(|answer| answer.is_ok()).count();
    println!("grown by {} MiB, {refused} refused", grown / MIB);
    ensure!(grown < GROWTH, "the gateway grew by {} MiB", grown / MIB);
    ensure!((ATTACKERS / 2..=ATTACKERS - HELD).contains(&refused), "{refused} of {ATTACKERS} were refused");
    Ok(())
}
