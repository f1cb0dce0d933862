//! Events to the providers of agents, and to the recipient of a delivery.

use std::time::Duration;

use anyhow::{Result, ensure};
use relay_acceptance::{
    calls::{CallScene, SOON, register, socket},
    room::text,
};
use relay_testkit::shared;
use serde_json::{Value, json};

#[tokio::test]
async fn a_provider_receives_one_update_for_all_of_its_agents() -> Result<()> {
    let place = CallScene::new("provider-updates").await?;
    let node = place.node("box").await?;
    let mut host = socket(&node, 1).await?;
    host.request(register(&node, "tools", &json!([]), 0)).await?;
    let mut ids = Vec::new();
    for name in ["one", "two", "three"] {
        let born = host.register_agent(name).await?;
        ids.push(text(&born["agent_id"]).to_owned());
    }
    ids.sort_by_key(|id| id.parse::<i64>().unwrap_or_default());
    let about = |frame: &Value, event: &str| frame["type"] == "context.update" && frame["event"] == event;
    // An agent is listed once its mailbox was read.
    let mut listed = Value::Null;
    for status in ["blocked", "idle"].into_iter().cycle().take(20) {
        place.key.patch("/v1/agents/ann", json!({ "status": status })).await?.success()?;
        let event = format!("agent.status.{status}");
        let update = host.expect_where("the status", SOON, |frame| about(frame, &event)).await?;
        assert_eq!(update["topic"], "presence", "{update}");
        listed = update["agent_ids"].clone();
        if listed == json!(ids) {
            break;
        }
    }
    assert_eq!(listed, json!(ids));
    place.ann().create_channel("plans").await?;
    let update = host.expect_where("the channel", SOON, |frame| about(frame, "channel.created")).await?;
    assert_eq!((&update["topic"], &update["agent_ids"]), (&json!("channel"), &json!(ids)), "{update}");
    let more =
        host.expect_where("a second copy", Duration::from_millis(300), |frame| about(frame, "channel.created")).await;
    ensure!(more.is_err(), "{more:?}");
    Ok(())
}

#[tokio::test]
async fn a_fail_over_rest_is_reported_on_the_recipients_socket() -> Result<()> {
    let place = CallScene::new("rest-fail").await?;
    let agent = place.key.register_agent("bob").await?;
    let bob = place.key.as_agent(&agent).at(&shared().await.gateways[1]);
    let mut socket = bob.direct_socket().await?;
    place.ann().dm("bob", "hello").await?.success()?;
    let delivered = socket.expect("deliver").await?;
    let id = text(&delivered["delivery_id"]);
    // Over the other gateway than the socket's.
    let report = json!({ "error": "no room", "retryable": false });
    place.key.as_agent(&agent).post(&format!("/v1/deliveries/{id}/fail"), report).await?.success()?;
    let failed = |frame: &Value| frame["type"] == "context.update" && frame["event"] == "delivery.failed";
    let update = socket.expect_where("the failure", SOON, failed).await?;
    assert_eq!((&update["topic"], &update["agent_ids"]), (&json!("agent"), &json!([agent.id])), "{update}");
    assert_eq!((text(&update["data"]["delivery_id"]), text(&update["data"]["error"])), (id, "no room"), "{update}");
    Ok(())
}
