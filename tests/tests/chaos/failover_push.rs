//! http_push through a failover that loses deliveries: the dispatcher's positions in memory are those of lost rows.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::chaos::database::Database;
use relay_testkit::{
    receiver::{Receiver, Reply},
    wait,
};
use serde_json::json;

use super::failover::Replicated;

const SOON: Duration = Duration::from_secs(60);
const HOOK: &str = "/hook";
/// Deliveries that neither the standby nor the log has, and as many after the failover, which get their numbers.
const LOST: usize = 5;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_get_the_messages_that_have_the_numbers_of_lost_ones() -> Result<()> {
    let installation = Replicated::start().await?;
    let Replicated { scene, sam, replication, standby, .. } = &installation;
    let receiver = Receiver::start(|_, _| Reply::Status(200)).await?;
    scene.workspace.register_agent("hal").await?;
    let delivery = json!({ "url": receiver.url(HOOK), "ack_mode": "on_2xx" });
    let node = json!({ "name": "hook", "kind": "http_push", "delivery": delivery });
    scene.workspace.post("/v1/nodes", node).await?.success()?;
    scene.workspace.bind("hook", "hal").await?;
    scene.dm(sam, 0, "hal", "kept").await?;
    scene.wait_acked("hal", 1, SOON).await;

    replication.blackhole();
    scene.stack.nats().stop().await?;
    for number in 0..LOST {
        scene.dm(sam, number % 2, "hal", &format!("never replicated {number}")).await?;
    }
    scene.wait_acked("hal", 1 + LOST as u64, SOON).await;
    scene.stack.postgres().kill9();
    standby.promote().await?;
    scene.stack.postgres_proxy().switch_to(&standby.address())?;
    scene.stack.nats().restart().await?;
    let after: Vec<String> = (0..LOST).map(|number| format!("after {number}")).collect();
    for text in &after {
        let accepted = wait::until_ok("a post to be accepted", SOON, || async {
            let reply = scene.api_of(sam, 0).without_retries().dm("hal", text).await?;
            ensure!(reply.is_success(), "answered {}: {}", reply.status, reply.body);
            anyhow::Ok(())
        });
        accepted.await?;
    }

    let received = || receiver.calls(HOOK).iter().map(|call| call.json().to_string()).collect::<String>();
    let arrived = wait::until_ok("all messages after the failover", SOON, || async {
        let calls = received();
        let missing: Vec<_> = after.iter().filter(|text| !calls.contains(text.as_str())).collect();
        ensure!(missing.is_empty(), "{missing:?} did not arrive");
        anyhow::Ok(())
    });
    arrived.await.with_context(|| scene.stack.logs(15))?;
    let database = Database::connect(&standby.url_of("relay"))?;
    let settled = wait::until_ok("the mailbox to be settled", SOON, || async {
        let at = database.mailbox_position("hal").await?;
        ensure!(at.settled_floor == at.head && at.ack_floor <= at.head, "{at:?}");
        anyhow::Ok(())
    });
    settled.await.with_context(|| scene.stack.logs(15))
}
