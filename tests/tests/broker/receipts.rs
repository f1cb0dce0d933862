//! What the broker tells the engine of messages that reached an agent: read receipts, and events for watchers.

use anyhow::{Result, ensure};
use relay_testkit::client::Api;
use relay_testkit::wait;
use serde_json::{Value, json};

use crate::scene::{SOON, Scene};

/// Events of a type that an agent has, without ids and times of the engine.
async fn receipts(workspace: &Api, agent: &str, kind: &str) -> Result<Vec<Value>> {
    let events = workspace.get(&format!("/v1/agents/{agent}/events?type={kind}&limit=20")).await?.success()?;
    let events = events.as_array().cloned().unwrap_or_default();
    Ok(events.into_iter().map(|event| event["payload"].clone()).collect())
}

/// The read receipts that the broker has posted for an agent.
async fn read_receipts(scene: &Scene, agent: &str) -> Result<Vec<(Value, Value)>> {
    let events = scene.broker.events(agent, "delivery_read_ack").await?;
    Ok(events.into_iter().map(|event| (event["event_id"].clone(), event["status"].clone())).collect())
}

async fn post(scene: &Scene, agent: &str) -> Result<String> {
    let posted = scene.sender.dm(agent, "hello").await?.success()?;
    Ok(posted["message"]["id"].as_str().unwrap_or_default().to_owned())
}

#[tokio::test]
async fn only_a_verified_message_is_reported_as_read_and_watchers_hear_of_both() -> Result<()> {
    let scene = Scene::with_args("receipts", &["--receipts".into(), "all".into()]).await?;
    scene.spawn("echoing", "cooked", &[]).await?;
    scene.spawn("silent", "mute", &[]).await?;
    let (echoed, unseen) = (post(&scene, "echoing").await?, post(&scene, "silent").await?);
    let heard = wait::until_ok("both receipts", SOON, || async {
        let heard = [
            receipts(&scene.workspace, "echoing", "delivery.delivered").await?,
            receipts(&scene.workspace, "silent", "delivery.delivered").await?,
        ];
        ensure!(heard.iter().all(|receipts| receipts.len() == 1), "{heard:?}");
        ensure!(read_receipts(&scene, "echoing").await?.len() == 1, "no read receipt");
        anyhow::Ok(heard)
    });
    let [of_echoing, of_silent] = heard.await?;
    for (receipt, message, level, verified) in
        [(&of_echoing[0], &echoed, "L1", true), (&of_silent[0], &unseen, "L0", false)]
    {
        let found = (&receipt["message_id"], &receipt["level"], &receipt["verified"], &receipt["attempt"]);
        assert_eq!(found, (&json!(message), &json!(level), &json!(verified), &json!(1)), "{receipt}");
        assert!(receipt["latency_ms"].is_u64() && receipt["delivery_id"].is_string(), "{receipt}");
    }
    assert_eq!(read_receipts(&scene, "echoing").await?, [(json!(echoed), json!("marked"))]);
    // Its receipt for watchers came after the verdict, which decides about the read receipt as well.
    assert!(read_receipts(&scene, "silent").await?.is_empty(), "an unverified message was reported as read");
    Ok(())
}

#[tokio::test]
async fn without_a_setting_watchers_hear_of_exceptions_only() -> Result<()> {
    let scene = Scene::new("exceptions").await?;
    scene.spawn("echoing", "cooked", &[]).await?;
    scene.spawn("silent", "mute", &[]).await?;
    post(&scene, "echoing").await?;
    wait::until_ok("the read receipt", SOON, || async {
        ensure!(read_receipts(&scene, "echoing").await?.len() == 1, "none yet");
        anyhow::Ok(())
    })
    .await?;
    post(&scene, "silent").await?;
    wait::until_ok("the receipt of the later message", SOON, || async {
        ensure!(receipts(&scene.workspace, "silent", "delivery.delivered").await?.len() == 1, "none yet");
        anyhow::Ok(())
    })
    .await?;
    assert!(receipts(&scene.workspace, "echoing", "delivery.delivered").await?.is_empty());
    Ok(())
}

#[tokio::test]
async fn an_ack_with_a_status_that_does_not_confirm_is_refused() -> Result<()> {
    let scene = Scene::new("statuses").await?;
    // It shows nothing, so only its ack can confirm.
    let script = "stty -echo; printf %s \"$AGENT_RELAY_ACK_TOKEN\" > token; exec cat > /dev/null";
    let spawn = json!({ "name": "silent", "cli": "sh", "args": ["-c", script] });
    assert_eq!(scene.broker.call("POST", "/api/spawn", Some(spawn)).await?.status, 200);
    let message = post(&scene, "silent").await?;
    wait::until_ok("the verdict", SOON, || async {
        ensure!(scene.broker.events("silent", "delivery_verified").await?.len() == 1, "none yet");
        anyhow::Ok(())
    })
    .await?;
    let token = std::fs::read_to_string(scene.broker.folder().join("token"))?;
    let ack = async |status: &str| {
        let body = json!({ "event_id": message, "status": status });
        let api = Api::anonymous(scene.broker.url());
        api.call("POST".parse()?, "/api/delivery-ack", Some(body), &[("x-agent-ack-token", &token)]).await
    };
    let refused = ack("failed").await?;
    assert_eq!((refused.status, &refused.body["code"]), (400, &json!("invalid_request")), "{}", refused.body);
    assert!(scene.broker.events("silent", "delivery_upgraded").await?.is_empty());
    assert_eq!(ack("received").await?.body, json!({ "success": true, "level": "L2", "method": "mcp" }));
    assert_eq!(scene.broker.events("silent", "delivery_upgraded").await?.len(), 1);
    Ok(())
}
