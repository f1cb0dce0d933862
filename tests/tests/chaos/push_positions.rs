//! Seqs at http_push endpoints through a failover that loses deliveries.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::chaos::database::Database;
use relay_testkit::{
    receiver::{Receiver, Reply},
    wait,
};

use super::failover::Replicated;

const SOON: Duration = Duration::from_secs(60);
const HOOK: &str = "/hook";
/// Deliveries that neither the standby nor the log has.
const LOST: u64 = 5;
/// A recovery that cannot read the log raises all numbers by this margin, and would hide a repeated one.
const MARGIN: u64 = 10_000;

/// Only the worker knows the numbers of the lost deliveries. It serves other mailboxes by then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endpoint_gets_no_seq_with_two_messages() -> Result<()> {
    let installation = Replicated::start().await?;
    let Replicated { scene, sam, replication, standby, .. } = &installation;
    let receiver = Receiver::start(|_, _| Reply::Status(200)).await?;
    scene.pushed("hal", &receiver.url(HOOK)).await?;
    scene.dm(sam, 0, "hal", "kept").await?;
    scene.wait_acked("hal", 1, SOON).await;
    Database::connect(&standby.url_of("relay"))?.wait_replicated(&scene.database, SOON).await?;

    replication.blackhole();
    scene.stack.nats().stop().await?;
    for number in 0..LOST {
        scene.dm(sam, 0, "hal", &format!("never replicated {number}")).await?;
    }
    scene.wait_acked("hal", 1 + LOST, SOON).await;
    // The worker releases an idle mailbox after 2 s.
    let owned = "UPDATE push_mailboxes SET due_at = due_at WHERE owner IS NOT NULL";
    wait::until("the mailbox to be released", SOON, || async {
        scene.database.execute(owned).await.is_ok_and(|owned| owned == 0)
    })
    .await;
    scene.stack.postgres().kill9();
    standby.promote().await?;
    scene.stack.postgres_proxy().switch_to(&standby.address())?;
    scene.stack.nats().restart().await?;
    for number in 0..=LOST {
        let text = format!("after {number}");
        let accepted = wait::until_ok("a post to be accepted", SOON, || async {
            let reply = scene.api_of(sam, 0).without_retries().dm("hal", &text).await?;
            ensure!(reply.is_success(), "answered {}: {}", reply.status, reply.body);
            anyhow::Ok(())
        });
        accepted.await.with_context(|| scene.stack.logs(15))?;
    }
    let database = Database::connect(&standby.url_of("relay"))?;
    let settled = wait::until_ok("the mailbox to be settled", SOON, || async {
        let at = database.mailbox_position("hal").await?;
        ensure!(at.settled_floor == at.head && at.head < MARGIN, "{at:?}");
        anyhow::Ok(())
    });
    settled.await.with_context(|| scene.stack.logs(15))?;

    let mut texts: HashMap<i64, HashSet<String>> = HashMap::new();
    for call in receiver.calls(HOOK).iter().filter(|call| call.is_delivery()) {
        let text = call.json()["data"]["text"].as_str().context("a text")?.to_owned();
        texts.entry(call.seq()).or_default().insert(text);
    }
    let repeated: Vec<_> = texts.iter().filter(|(_, texts)| texts.len() > 1).collect();
    ensure!(repeated.is_empty(), "{repeated:?}\n{}", scene.stack.logs(15));
    let arrived: HashSet<&String> = texts.values().flatten().collect();
    for number in 0..=LOST {
        ensure!(arrived.contains(&format!("after {number}")), "{number} is missing: {texts:?}");
    }
    Ok(())
}
