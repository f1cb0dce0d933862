//! Fan-outs: a gateway that is killed between two chunks leaves the rest to other processes.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::chaos::{
    fanouts::{CHUNK, create_crowd, hold_chunk, progress, recipients_of},
    scene::Scene,
};
use relay_testkit::{
    client::{Agent, Reply},
    wait,
};
use reqwest::Method;
use serde_json::json;

const SOON: Duration = Duration::from_secs(30);
/// Three chunks.
const CROWD: i64 = 2 * CHUNK + 100;

async fn post(scene: &Scene, from: &Agent, gateway: usize, text: &str, key: &str) -> Result<Reply> {
    let body = json!({ "text": text, "mode": "wait" });
    let api = scene.api_of(from, gateway);
    api.call(Method::POST, "/v1/channels/crowd/messages", Some(body), &[("Idempotency-Key", key)]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fan_out_is_completed_once_after_a_kill_behind_any_chunk() -> Result<()> {
    let scene = Scene::start().await?;
    let sam = scene.workspace.register_agent("sam").await?;
    // Its id is above those of the crowd, so it is in the last chunk.
    let (_bob_node, bob) = scene.direct("bob", 1).await?;
    scene.workspace.create_channel("crowd").await?;
    scene.workspace.as_agent(&bob).join("crowd").await?;
    scene.workspace.as_agent(&sam).join("crowd").await?;
    create_crowd(&scene, "crowd", CROWD - 1).await?;
    for chunk in 0..3 {
        let (text, key) = (format!("to all {chunk}"), format!("key-{chunk}"));
        let later_text = format!("later {chunk}");
        let held = hold_chunk(&scene, chunk).await?;
        let (first, second) = tokio::join!(post(&scene, &sam, 0, &text, &key), async {
            wait::until("the chunks before to be written", SOON, || async {
                progress(&scene).await.is_ok_and(|written| written == Some(chunk * CHUNK))
            })
            .await;
            scene.stack.gateway(0).kill9();
            // The message is accepted, and its author's next one may not overtake it.
            let retried = post(&scene, &sam, 1, &text, &key).await?.success()?;
            let (later, released) = tokio::join!(scene.dm(&sam, 1, "bob", &later_text), held.rollback());
            released?;
            later?;
            anyhow::Ok(retried)
        });
        ensure!(first.is_err(), "the gateway that was killed has answered");
        let id = second?["id"].as_str().context("no id")?.to_owned();
        ensure!(scene.database.messages().await?.get(&text) == Some(&vec![id]), "{text} is not stored once");
        wait::until("the fan-out to be complete", SOON, || async {
            progress(&scene).await.is_ok_and(|written| written.is_none())
        })
        .await;
        let (recipients, deliveries) = recipients_of(&scene, &text).await?;
        ensure!((recipients, deliveries) == (CROWD, CROWD), "{recipients} recipients have {deliveries} deliveries");
        scene.wait_received("bob", 2 * (u64::try_from(chunk)? + 1), SOON).await;
        let texts = scene.ledger.texts("bob");
        ensure!(texts.ends_with(&[text, later_text]), "{texts:?}");
        scene.stack.gateway(0).restart().await?;
    }
    scene.ledger.assert_clean();
    Ok(())
}
