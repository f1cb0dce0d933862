//! Triggers of node-scoped actions, their input, their minimum interval, and messages of webhooks.

use anyhow::{Result, ensure};
use relay_acceptance::{
    calls::{CallScene, SOON, register, socket},
    room::{rows, text},
};
use relay_testkit::{
    client::{Api, NodeSocket},
    shared, wait,
};
use reqwest::Method;
use serde_json::{Value, json};

/// Node of a named provider with one action that owns its name on this node only.
async fn provider(place: &CallScene) -> Result<NodeSocket> {
    let node = place.node("box").await?;
    let mut socket = socket(&node, 1).await?;
    socket.request(register(&node, "tools", &json!([{ "name": "count", "kind": "action" }]), 0)).await?;
    Ok(socket)
}

async fn next_input(socket: &mut NodeSocket) -> Result<Value> {
    let frame = socket.expect_where("an invocation", SOON, |frame| frame["type"] == "action.invoke").await?;
    let done = json!({ "v": 1, "type": "action.result", "invocation_id": frame["invocation_id"], "output": null });
    socket.send_json(&done).await?;
    Ok(frame["input"].clone())
}

async fn call_hook(key: &Api, hook: &Value, body: Value) -> Result<()> {
    let through = key.with_token(text(&hook["token"])).at(&shared().await.gateways[1]);
    through.post(&format!("/v1/hooks/{}", text(&hook["id"])), body).await?.success().map(drop)
}

#[tokio::test]
async fn a_trigger_reaches_the_action_of_any_provider() -> Result<()> {
    let place = CallScene::new("trigger-node").await?;
    let mut host = provider(&place).await?;
    let trigger = json!({ "channel": "general", "pattern": "go", "action_name": "count" });
    let trigger = place.key.post("/v1/triggers", trigger).await?.success()?;
    let body = json!({ "text": "go @ann", "data": { "fooBar": 1 } });
    let posted = place.ann().post("/v1/channels/general/messages", body).await?.success()?;
    let input = next_input(&mut host).await?;
    let shared_fields = ["channel_id", "agent_id", "agent_name", "text", "mentions", "created_at"];
    let mut message = json!({ "id": posted["id"], "channel_name": "general", "metadata": { "fooBar": 1 } });
    for field in shared_fields {
        message[field] = posted[field].clone();
    }
    assert_eq!(input["message"], message);
    assert_eq!(input["trigger_id"], trigger["id"]);
    for field in shared_fields {
        assert_eq!(input[field], posted[field], "{field} beside it");
    }
    assert_eq!((&input["message_id"], &input["channel"]), (&posted["id"], &json!("general")));
    Ok(())
}

#[tokio::test]
async fn messages_of_webhooks_fire_except_those_of_an_action() -> Result<()> {
    let place = CallScene::new("trigger-hook").await?;
    let mut host = provider(&place).await?;
    place.key.post("/v1/triggers", json!({ "channel": "general", "action_name": "count" })).await?.success()?;
    let hook = place.key.post("/v1/webhooks", json!({ "channel": "general" })).await?.success()?;
    call_hook(&place.key, &hook, json!({ "text": "build failed", "source": "ci" })).await?;
    let frame = host.expect_where("an invocation", SOON, |frame| frame["type"] == "action.invoke").await?;
    assert_eq!(text(&frame["input"]["message"]["text"]), "build failed");
    assert_eq!(frame["input"]["message"]["metadata"]["source"], "ci");
    // The action reports through the webhook.
    let id = text(&frame["invocation_id"]);
    for report in [
        json!({ "text": "counted", "payload": { "invocation_id": id } }),
        json!({ "text": "counted", "invocation_id": id }),
        json!({ "text": "counted", "metadata": { "invocation_id": id } }),
        json!({ "invocation_id": id }),
    ] {
        call_hook(&place.key, &hook, report).await?;
    }
    for foreign in [json!({ "invocation_id": "inv_1" }), json!("inv_1")] {
        let report = json!({ "text": "of another system", "payload": foreign, "invocation_id": "inv_1" });
        call_hook(&place.key, &hook, report).await?;
    }
    for _ in 0..2 {
        assert_eq!(text(&next_input(&mut host).await?["text"]), "of another system", "its own report fired nothing");
    }
    Ok(())
}

#[tokio::test]
async fn a_minimum_interval_is_claimed_once() -> Result<()> {
    let place = CallScene::new("trigger-interval").await?;
    let mut host = provider(&place).await?;
    let slow = json!({ "channel": "general", "action_name": "count", "min_interval_seconds": 3600 });
    let slow = place.key.post("/v1/triggers", slow).await?.success()?;
    assert_eq!(slow["min_interval_seconds"], 3600);
    let path = format!("/v1/triggers/{}", text(&slow["id"]));
    for wrong in [json!(-1), json!(86_401), json!("1")] {
        place.key.patch(&path, json!({ "min_interval_seconds": wrong })).await?.refused(400, "invalid_request")?;
    }
    let gateways = &shared().await.gateways;
    let posts = (0..8).map(|n| {
        let ann = place.ann().at(&gateways[n % 2]);
        async move { ann.post_message("general", &format!("message {n}")).await?.success() }
    });
    for posted in futures::future::join_all(posts).await {
        posted?;
    }
    next_input(&mut host).await?;
    // A trigger without an interval shows that the scan has passed the others.
    let every = json!({ "channel": "general", "pattern": "last", "action_name": "count" });
    let every = place.key.post("/v1/triggers", every).await?.success()?;
    place.ann().post_message("general", "the last").await?.success()?;
    let input = next_input(&mut host).await?;
    assert_eq!((&input["trigger_id"], text(&input["text"])), (&every["id"], "the last"), "one in the interval");
    // Without the interval the next message fires both.
    assert!(
        place
            .key
            .patch(&path, json!({ "min_interval_seconds": 0 }))
            .await?
            .success()?
            .get("min_interval_seconds")
            .is_none()
    );
    place.ann().post_message("general", "at last").await?.success()?;
    let fired = [next_input(&mut host).await?, next_input(&mut host).await?];
    ensure!(fired.iter().all(|input| input["text"] == "at last"), "{fired:?}");
    wait::until_ok("two outcomes of the last message", SOON, || async {
        let events = place.key.get("/v1/workspace/events").await?.success()?;
        let invoked = rows(&events["events"]).iter().filter(|event| event["type"] == "action.invoked").count();
        ensure!(invoked == 4, "{invoked}");
        anyhow::Ok(())
    })
    .await?;
    Ok(())
}

/// The published Rust client has a boolean, the fleet package sends what its definition has and compares it at each
/// start.
#[tokio::test]
async fn a_mention_is_a_boolean_or_a_name() -> Result<()> {
    let place = CallScene::new("trigger-mention").await?;
    let mut host = provider(&place).await?;
    let there = place.key.at(&shared().await.gateways[1]);
    let create = async |text: &str, mention: Value| {
        let trigger = json!({ "pattern": text, "mention": mention, "action_name": "count" });
        place.key.post("/v1/triggers", trigger).await?.success()
    };
    let any = create("go", json!(true)).await?;
    let all = create("last", json!(false)).await?;
    create("go", json!("@bob")).await?;
    let listed = there.get("/v1/triggers").await?.success()?;
    let shown = |list: &Value| rows(list).iter().map(|row| row["mention"].clone()).collect::<Vec<_>>();
    assert_eq!(shown(&listed), [json!(true), json!(false), json!("@bob")], "in the form that was given");
    for client in ["@relaycast/sdk-rust", "agent-relay-broker"] {
        let headers = [("x-relaycast-origin-client", client)];
        let listed = there.call(Method::GET, "/v1/triggers", None, &headers).await?.success()?;
        assert_eq!(shown(&listed), [json!(true), json!(false), json!(true)], "{client} reads booleans only");
    }
    place.ann().post_message("general", "go on").await?.success()?;
    place.ann().post_message("general", "go on, @cyd").await?.success()?;
    place.ann().post_message("general", "the last").await?.success()?;
    let fired = [next_input(&mut host).await?, next_input(&mut host).await?];
    for (input, (trigger, text)) in fired.iter().zip([(&any, "go on, @cyd"), (&all, "the last")]) {
        assert_eq!((&input["trigger_id"], &input["text"]), (&trigger["id"], &json!(text)));
    }
    let path = format!("/v1/triggers/{}", text(&any["id"]));
    for (given, kept) in [(json!({}), json!(true)), (json!({ "mention": null }), json!(null))] {
        assert_eq!(there.patch(&path, given).await?.success()?["mention"], kept);
    }
    for wrong in [json!(7), json!(["bob"]), json!("@")] {
        there.patch(&path, json!({ "mention": wrong })).await?.refused(400, "invalid_request")?;
    }
    Ok(())
}
