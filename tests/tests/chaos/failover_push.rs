//! http_push through a failover that loses deliveries: the dispatcher's positions in memory are those of lost rows.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::chaos::{
    database::Database,
    end_state::record_calls,
    scene::Scene,
    sender::{Target, send_keyed},
};
use relay_testkit::{
    history::{Losses, tick},
    receiver::{Receiver, Reply},
    wait,
};

use super::failover::Replicated;

const SOON: Duration = Duration::from_secs(60);
const HOOK: &str = "/hook";
/// Recipient of all messages, with an http_push endpoint.
pub(super) const RECIPIENT: &str = "hal";
/// Deliveries that neither the standby nor the log has, and as many after the failover.
const LOST: usize = 5;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_get_all_messages_after_the_lost_ones() -> Result<()> {
    let fault = "primary killed, the standby lags and NATS was unavailable, http_push";
    lose_pushed_messages(fault, async |_| Ok(())).await.map(drop)
}

/// Loses deliveries that an endpoint has received, by a failover after `received`, and sends others afterwards. Judges
/// what the endpoint got, and returns the installation.
pub(super) async fn lose_pushed_messages(
    fault: &str,
    received: impl AsyncFnOnce(&Scene) -> Result<()>,
) -> Result<Replicated> {
    let mut installation = Replicated::start().await?;
    let Replicated { scene, sam, replication, standby, .. } = &installation;
    let receiver = Receiver::start(|_, _| Reply::Status(200)).await?;
    scene.pushed(RECIPIENT, &receiver.url(HOOK)).await?;
    let (apis, hal) = ([0, 1].map(|gateway| [scene.api_of(sam, gateway)]), Target::Dm(RECIPIENT.to_owned()));
    let mut sent = vec![send_keyed(&apis[0], &hal, "kept").await?];
    scene.wait_acked(RECIPIENT, 1, SOON).await;
    Database::connect(&standby.url_of("relay"))?.wait_replicated(&scene.database, SOON).await?;

    let lags_since = tick();
    replication.blackhole();
    scene.stack.nats().stop().await?;
    for number in 0..LOST {
        sent.push(send_keyed(&apis[0], &hal, &format!("never replicated {number}")).await?);
    }
    scene.wait_acked(RECIPIENT, 1 + LOST as u64, SOON).await;
    received(scene).await?;
    let kept = installation.replicated().await?;
    installation.promote().await?;
    let (span, promoted) = (lags_since..tick(), Instant::now());
    let scene = &installation.scene;
    scene.stack.nats().restart().await?;
    let mut service_after = Duration::ZERO;
    for number in 0..LOST {
        sent.push(send_keyed(&apis[number % 2], &hal, &format!("after {number}")).await?);
        if number < 2 {
            service_after = promoted.elapsed();
        }
    }

    let settled = wait::until_ok("the mailbox to be settled", SOON, || async {
        let at = scene.database.mailbox_position(RECIPIENT).await?;
        ensure!(at.settled_floor == at.head && at.ack_floor <= at.head, "{at:?}");
        anyhow::Ok(())
    });
    settled.await.with_context(|| scene.stack.logs(15))?;
    record_calls(scene.ledger.history(), RECIPIENT, &receiver.calls(HOOK))?;
    installation.repeat_keys(&sent, &kept).await?;
    let lost = installation.verify(&sent, Losses::Within(&[span]), &kept).await?;
    scene.print_row(fault, service_after, &sent);
    ensure!(lost == LOST, "{lost} messages are lost");
    Ok(installation)
}
