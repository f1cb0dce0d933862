//! Subscriptions of agents: they show what their agent may read, now and when the call is made.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::room::{rows, text};
use relay_testkit::{
    client::{Agent, Api},
    receiver::{Receiver, Reply},
    shared, wait,
};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(40);

struct Scene {
    key: Api,
    ann: Api,
    bob: Api,
    eve: Api,
    eve_is: Agent,
}

async fn scene(name: &str) -> Result<Scene> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], name).await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let eve_is = key.register_agent("eve").await?;
    let (ann, bob, eve) = (key.as_agent(&ann), key.as_agent(&bob).at(&gateways[1]), key.as_agent(&eve_is));
    Ok(Scene { key, ann, bob, eve, eve_is })
}

async fn subscribe(api: &Api, url: &str) -> Result<String> {
    let made = api.post("/v1/subscriptions", json!({ "events": ["*"], "url": url })).await?.success()?;
    Ok(format!("/v1/subscriptions/{}", text(&made["id"])))
}

/// Waits until a receiver has a call with this text.
async fn wait_for_text(receiver: &Receiver, words: &str) -> Result<()> {
    wait::until_ok("the last event", SOON, || async {
        let calls = receiver.wait_for(0, SOON).await;
        ensure!(calls.iter().any(|call| call.json().to_string().contains(words)), "{} calls", calls.len());
        anyhow::Ok(())
    })
    .await?;
    Ok(())
}

async fn bodies(receiver: &Receiver) -> String {
    let calls = receiver.wait_for(0, SOON).await;
    calls.iter().map(|call| call.json().to_string()).collect::<Vec<_>>().join("\n")
}

#[tokio::test]
async fn an_agent_receives_what_it_may_read_and_the_key_everything() -> Result<()> {
    let (of_eve, of_key) = (Receiver::accepting_all().await?, Receiver::accepting_all().await?);
    let Scene { key, ann, bob, eve, eve_is } = scene("rights-events").await?;
    ann.dm("bob", "before, between ann and bob").await?.success()?;
    let subscription = subscribe(&eve, &of_eve.url("/")).await?;
    subscribe(&key, &of_key.url("/")).await?;
    bob.post("/v1/actions", json!({ "name": "count", "handler_agent": "bob" })).await?.success()?;
    let sent = ann.dm("bob", "between ann and bob").await?.success()?;
    bob.post_empty(&format!("/v1/messages/{}/read", text(&sent["message"]["id"]))).await?.success()?;
    ann.post("/v1/actions/count/invoke", json!({ "input": { "secret": "of ann" } })).await?.success()?;
    ann.dm("eve", "between ann and eve").await?.success()?;
    ann.post_message("general", "to all of us").await?.success()?;
    wait_for_text(&of_eve, "to all of us").await?;
    wait_for_text(&of_key, "to all of us").await?;
    // The events from before, in the log, become calls too.
    eve.post(&format!("{subscription}/replay"), json!({ "since": "2026-01-01T00:00:00Z" })).await?.success()?;
    ann.post_message("general", "after the replay").await?.success()?;
    wait_for_text(&of_eve, "after the replay").await?;

    let (eves, keys) = (bodies(&of_eve).await, bodies(&of_key).await);
    assert!(eves.contains("between ann and eve"), "{eves}");
    for (words, reason) in [
        ("between ann and bob", "a conversation of others"),
        ("action.invoked", "an invocation of others"),
        ("message.read", "a receipt in a conversation of others"),
    ] {
        assert!(!eves.contains(words), "{reason}: {eves}");
        assert!(keys.contains(words), "the key sees {reason}: {keys}");
    }
    let calls = of_eve.wait_for(0, SOON).await;
    let bodies = calls.iter().map(|call| call.json());
    let deliveries: Vec<Value> = bodies.filter(|body| text(&body["type"]).starts_with("delivery.")).collect();
    assert!(deliveries.iter().all(|body| text(&body["data"]["agent_id"]) == eve_is.id), "others': {deliveries:?}");
    Ok(())
}

#[tokio::test]
async fn a_subscription_belongs_to_its_agent() -> Result<()> {
    let Scene { key, eve, bob, eve_is, .. } = scene("rights-own-subscriptions").await?;
    let own = subscribe(&eve, "https://127.0.0.1:9/").await?;
    let keys = subscribe(&key, "https://127.0.0.1:9/").await?;
    assert_eq!(text(&eve.get(&own).await?.success()?["created_by"]), eve_is.id);
    assert_eq!(key.get(&keys).await?.success()?.get("created_by"), None);
    assert_eq!(rows(&key.get("/v1/subscriptions").await?.success()?).len(), 2);
    assert_eq!(rows(&eve.get("/v1/subscriptions").await?.success()?).len(), 1);
    assert_eq!(rows(&bob.get("/v1/subscriptions").await?.success()?).len(), 0);
    for (api, path) in [(&bob, &own), (&bob, &keys), (&eve, &keys)] {
        api.get(path).await?.refused(403, "subscription_not_own")?;
        api.get(&format!("{path}/deliveries")).await?.refused(403, "subscription_not_own")?;
        api.post(&format!("{path}/replay"), json!({ "since": "2026-01-01T00:00:00Z" }))
            .await?
            .refused(403, "subscription_not_own")?;
        api.delete(path).await?.refused(403, "subscription_not_own")?;
    }
    // It ends with its agent.
    assert_eq!(key.delete("/v1/agents/eve").await?.status, 204);
    key.get(&own).await?.refused(404, "subscription_not_found")?;
    assert_eq!(key.delete(&keys).await?.status, 204);
    Ok(())
}

/// Calls that were queued before the agent left the conversation are not made afterwards.
#[tokio::test]
async fn leaving_a_conversation_counts_at_the_time_of_the_call() -> Result<()> {
    // Events are queued a page at a time: the replay after the 410 queues all of them together.
    let receiver = Receiver::start(|number, call| {
        let text = call.json()["data"]["text"].as_str().unwrap_or_default().to_owned();
        Reply::Status(match (number, &*text) {
            (0, _) => 410,
            (_, "holds the queue back") => 503,
            _ => 200,
        })
    })
    .await?;
    let Scene { ann, eve, .. } = scene("rights-left").await?;
    let group = ann.post("/v1/dm/group", json!({ "participants": ["bob", "eve"], "name": "us" })).await?.success()?;
    let path = format!("/v1/dm/{}", text(&group["id"]));
    let body = json!({ "events": ["message.created", "group_dm.received"], "url": receiver.url("/") });
    let made = eve.post("/v1/subscriptions", body).await?.success()?;
    let subscription = format!("/v1/subscriptions/{}", text(&made["id"]));
    ann.post_message("general", "disables").await?.success()?;
    wait::until_ok("the subscription to be disabled", SOON, || async {
        let shown = eve.get(&subscription).await?.success()?;
        ensure!(shown["is_active"] == false, "{shown}");
        anyhow::Ok(())
    })
    .await?;
    ann.post_message("general", "holds the queue back").await?.success()?;
    ann.post(&format!("{path}/messages"), json!({ "text": "while eve takes part" })).await?.success()?;
    eve.post(&format!("{subscription}/replay"), json!({ "since": made["created_at"] })).await?.success()?;
    wait_for_text(&receiver, "holds the queue back").await?;
    assert_eq!(ann.delete(&format!("{path}/participants/eve")).await?.status, 204);
    ann.post_message("general", "the last").await?.success()?;
    wait_for_text(&receiver, "the last").await?;
    let all = bodies(&receiver).await;
    assert!(!all.contains("while eve takes part"), "{all}");
    let calls = eve.get(&format!("{subscription}/deliveries")).await?.success()?;
    let unmade: Vec<&Value> =
        rows(&calls).iter().filter(|call| text(&call["last_error"]).starts_with("not called")).collect();
    assert_eq!(unmade.len(), 1, "{calls}");
    assert_eq!((text(&unmade[0]["status"]), text(&unmade[0]["event_type"])), ("dead_letter", "group_dm.received"));
    Ok(())
}

/// An agent whose right to subscribe ends receives nothing more.
#[tokio::test]
async fn a_closed_right_silences_a_subscription() -> Result<()> {
    let (of_eve, of_key) = (Receiver::accepting_all().await?, Receiver::accepting_all().await?);
    let Scene { key, ann, eve, .. } = scene("rights-silenced").await?;
    subscribe(&eve, &of_eve.url("/")).await?;
    subscribe(&key, &of_key.url("/")).await?;
    ann.post_message("general", "while permitted").await?.success()?;
    wait_for_text(&of_eve, "while permitted").await?;
    key.patch("/v1/agents/eve", json!({ "rights": { "subscribe": false } })).await?.success()?;
    ann.post_message("general", "while closed").await?.success()?;
    wait_for_text(&of_key, "while closed").await?;
    key.patch("/v1/agents/eve", json!({ "rights": { "subscribe": true } })).await?.success()?;
    // The subscription passes over the closed time.
    wait::until_ok("a call after it was opened", SOON, || async {
        ann.post_message("general", "while open again").await?.success()?;
        let calls = of_eve.wait_for(0, SOON).await;
        let again = calls.iter().any(|call| call.json().to_string().contains("while open again"));
        again.then_some(()).context("not yet")
    })
    .await?;
    Ok(())
}
