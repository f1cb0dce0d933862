//! Claims that wait: those of one agent do not keep others from storage, and end with its token.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, future::join_all, stream::FuturesUnordered};
use relay_testkit::{
    client::{Agent, Api, Reply},
    shared,
    stack::Stack,
};
use serde_json::{Value, json};

/// Requests in progress that one token may have.
const CLAIMS: usize = 500;
/// Claims of one agent that go on waiting.
const WAITING: usize = 4;
/// Bound of another tenant's reads meanwhile: half of the time that a claim waits, since a busy machine needs some.
const READ_WITHIN: Duration = Duration::from_secs(5);

/// Registers bob on a node of kind poll.
async fn polling_agent(key: &Api) -> Result<Agent> {
    let bob = key.register_agent("bob").await?;
    key.post("/v1/nodes", json!({ "name": "queue", "kind": "poll" })).await?.success()?;
    key.bind("queue", "bob").await?;
    Ok(bob)
}

async fn claim(agent: &Api, body: Value) -> Result<Reply> {
    agent.post("/v1/deliveries/claim", body).await
}

fn count(reply: &Reply) -> usize {
    reply.data().as_array().map_or(0, Vec::len)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_claims_of_one_agent_do_not_keep_others_from_storage() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).env("RELAY_RATE_LIMITS", "off").start().await?;
    let gateway = stack.gateway(0).url();
    let (attacker, other) =
        (Api::create_workspace(gateway, "attacker").await?, Api::create_workspace(gateway, "other").await?);
    let (ann, bob) = (attacker.register_agent("ann").await?, polling_agent(&attacker).await?);
    let (ann, bob) = (attacker.as_agent(&ann), attacker.as_agent(&bob).without_retries());

    let attack = join_all((0..CLAIMS).map(|_| claim(&bob, json!({ "wait_ms": 10_000, "lease_ms": 600_000 }))));
    let others = async {
        for _ in 0..30 {
            let began = Instant::now();
            other.get("/v1/agents").await?.success()?;
            ensure!(began.elapsed() < READ_WITHIN, "another tenant waited {:?}", began.elapsed());
        }
        for nth in 0..WAITING {
            ann.dm("bob", &format!("message {nth}")).await?.success()?;
        }
        anyhow::Ok(())
    };
    let (claimed, others) = tokio::join!(attack, others);
    others?;
    let claimed: Vec<Reply> = claimed.into_iter().collect::<Result<_>>()?;
    let received: usize = claimed.iter().filter(|reply| reply.is_success()).map(count).sum();
    ensure!(received == WAITING, "{received} deliveries were claimed");
    ensure!(claimed.iter().all(|reply| reply.is_success() || reply.status == 503));
    Ok(())
}

#[tokio::test]
async fn a_claim_that_waits_ends_with_its_token() -> Result<()> {
    let shared = shared().await;
    for (nth, gateway) in shared.gateways.iter().enumerate() {
        let key = Api::create_workspace(&shared.gateways[0], &format!("claims-{nth}")).await?;
        let (ann, bob) = (key.register_agent("ann").await?, polling_agent(&key).await?);
        let (ann, thief) = (key.as_agent(&ann), key.as_agent(&bob).at(gateway));
        ann.dm("bob", "first").await?.success()?;
        let leased = claim(&thief, json!({ "lease_ms": 43_200_000 })).await?;
        ensure!(leased.is_success() && count(&leased) == 1, "{}", leased.body);

        let mut waiting: FuturesUnordered<_> =
            (0..=WAITING).map(|_| claim(&thief, json!({ "wait_ms": 30_000, "lease_ms": 43_200_000 }))).collect();
        let superseded = waiting.next().await.context("no claim")??;
        ensure!(superseded.is_success() && count(&superseded) == 0, "{}", superseded.body);
        // All of them were authenticated, and the others wait.
        let rotated = key.post("/v1/agents/bob/rotate-token", json!({})).await?.success()?;
        ann.dm("bob", "second").await?.success()?;
        while let Some(stolen) = waiting.next().await {
            let stolen = stolen?;
            ensure!(!stolen.is_success() || count(&stolen) == 0, "a rotated token got {}", stolen.body);
        }

        let bob = key.with_token(rotated["token"].as_str().unwrap_or_default());
        let own = claim(&bob, json!({ "wait_ms": 10_000 })).await?;
        ensure!(own.is_success() && count(&own) == 2, "the leases of the thief have ended: {}", own.body);
    }
    Ok(())
}
