//! Fan-outs: a gateway that is killed between two chunks leaves the rest to other processes.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use relay_acceptance::chaos::{
    fanouts::{CHUNK, create_crowd, hold_chunk, progress, recipients_of},
    scene::Scene,
    sender::posted_message_id,
};
use relay_testkit::{
    client::Agent,
    history::{Answer, Post, tick},
    wait,
};
use reqwest::Method;
use serde_json::json;

const SOON: Duration = Duration::from_secs(30);
/// Three chunks.
const CROWD: i64 = 2 * CHUNK + 100;

/// Posts to the crowd, and records the answer. Of the recipients only bob has a socket.
async fn post(scene: &Scene, from: &Agent, gateway: usize, text: &str, key: &str) -> Result<Answer> {
    let body = json!({ "text": text, "mode": "wait" });
    let (api, asked_at) = (scene.api_of(from, gateway), tick());
    let reply = api.call(Method::POST, "/v1/channels/crowd/messages", Some(body), &[("Idempotency-Key", key)]).await;
    let answer = match reply {
        Ok(reply) if reply.is_success() => Answer::Accepted(posted_message_id(&reply)?),
        Ok(reply) => Answer::Refused(reply.status),
        Err(_) => Answer::None,
    };
    scene.ledger.history().record_post(Post {
        asked_at,
        answered_at: tick(),
        key: Some(key.to_owned()),
        text: text.to_owned(),
        recipients: vec!["bob".to_owned()],
        answer: answer.clone(),
    });
    Ok(answer)
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
            let retried = post(&scene, &sam, 1, &text, &key).await?;
            let (later, released) = tokio::join!(scene.dm(&sam, 1, "bob", &later_text), held.rollback());
            released?;
            later?;
            anyhow::Ok(retried)
        });
        ensure!(first? == Answer::None, "the gateway that was killed has answered");
        let second = second?;
        let Answer::Accepted(id) = second else { bail!("the retry was answered with {second:?}") };
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
    scene.verify(&[]).await
}
