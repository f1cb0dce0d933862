//! http_push through a failover that loses deliveries: the dispatcher's positions in memory are those of lost rows.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::chaos::sender::{Target, send_keyed};
use relay_testkit::{
    history::{Content, tick},
    receiver::{Receiver, Reply},
    wait,
};

use super::failover::Replicated;

const SOON: Duration = Duration::from_secs(60);
const HOOK: &str = "/hook";
/// Deliveries that neither the standby nor the log has, and as many after the failover.
const LOST: usize = 5;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_get_all_messages_after_the_lost_ones() -> Result<()> {
    let mut installation = Replicated::start().await?;
    let Replicated { scene, sam, replication, .. } = &installation;
    let receiver = Receiver::start(|_, _| Reply::Status(200)).await?;
    scene.pushed("hal", &receiver.url(HOOK)).await?;
    let (apis, hal) = ([0, 1].map(|gateway| scene.api_of(sam, gateway)), Target::Dm("hal".to_owned()));
    let mut sent = vec![send_keyed(&apis, &hal, "kept").await?];
    scene.wait_acked("hal", 1, SOON).await;

    let lags_since = tick();
    replication.blackhole();
    scene.stack.nats().stop().await?;
    for number in 0..LOST {
        sent.push(send_keyed(&apis, &hal, &format!("never replicated {number}")).await?);
    }
    scene.wait_acked("hal", 1 + LOST as u64, SOON).await;
    let kept = installation.replicated().await?;
    installation.promote().await?;
    let span = lags_since..tick();
    let scene = &installation.scene;
    scene.stack.nats().restart().await?;
    let after: Vec<String> = (0..LOST).map(|number| format!("after {number}")).collect();
    for text in &after {
        sent.push(send_keyed(&apis, &hal, text).await?);
    }

    let received = || receiver.calls(HOOK).iter().map(|call| call.json().to_string()).collect::<String>();
    let arrived = wait::until_ok("all messages after the failover", SOON, || async {
        let calls = received();
        let missing: Vec<_> = after.iter().filter(|text| !calls.contains(text.as_str())).collect();
        ensure!(missing.is_empty(), "{missing:?} did not arrive");
        anyhow::Ok(())
    });
    arrived.await.with_context(|| scene.stack.logs(15))?;
    let settled = wait::until_ok("the mailbox to be settled", SOON, || async {
        let at = scene.database.mailbox_position("hal").await?;
        ensure!(at.settled_floor == at.head && at.ack_floor <= at.head, "{at:?}");
        anyhow::Ok(())
    });
    settled.await.with_context(|| scene.stack.logs(15))?;
    for call in receiver.calls(HOOK) {
        let (body, seq) = (call.json(), call.seq().unsigned_abs());
        let delivery_id = body["delivery_id"].as_str().context("no delivery id")?.to_owned();
        let text = body["data"]["text"].as_str().map(str::to_owned);
        scene.ledger.history().record_frame("hal", seq, Content { delivery_id, text });
        // The answer 200.
        scene.ledger.history().record_ack("hal", seq);
    }
    installation.repeat_keys(&sent, &kept).await?;
    let lost = installation.verify(&sent, span, &kept).await?;
    ensure!(lost == LOST, "{lost} messages are lost");
    Ok(())
}
