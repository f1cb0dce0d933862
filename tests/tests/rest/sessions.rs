//! Session events and presence: one sequence per agent over all gateways, effects on the status in that sequence, and
//! one event per change.

use std::time::Duration;

use anyhow::Result;
use futures::future::try_join_all;
use relay_testkit::client::{Api, NodeSocket};
use relay_testkit::shared;
use reqwest::Method;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);
const EVENTS: &str = "/v1/agents/ann/events";

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn sequences(list: &Value) -> Vec<i64> {
    list.as_array().into_iter().flatten().filter_map(|event| event["sequence"].as_i64()).collect()
}

/// Creates a workspace with ann.
async fn workspace(name: &str) -> Result<(Api, Api)> {
    let key = Api::create_workspace(&shared().await.gateways[0], name).await?;
    let ann = key.register_agent("ann").await?;
    let ann = key.as_agent(&ann);
    Ok((key, ann))
}

#[tokio::test]
async fn events_are_numbered_per_agent_and_listed_newest_first() -> Result<()> {
    let (key, ann) = workspace("sessions").await?;
    let bob = key.register_agent("bob").await?;
    let me = ann.get("/v1/agent").await?.success()?;
    let gateways = &shared().await.gateways;
    let types =
        ["tool.called", "tool.completed", "session.starting", "observability.capabilities", "log", "tool.called"];
    for (number, event_type) in (1..).zip(types) {
        let api = if number % 2 == 0 { key.at(&gateways[1]) } else { ann.clone() };
        let body = json!({ "type": event_type, "payload": { "n": number, "fooBar": null } });
        let reply = api.post(EVENTS, body).await?;
        assert_eq!(reply.status, 201, "{}", reply.body);
        let event = reply.success()?;
        assert_eq!((event["sequence"].as_i64(), text(&event["type"])), (Some(number), event_type));
        assert!(text(&event["id"]).starts_with("evt_"), "{event}");
        assert_eq!((&event["agent_id"], &event["payload"]), (&me["id"], &json!({ "n": number, "fooBar": null })));
    }
    let without = key.post("/v1/agents/bob/events", json!({ "type": "usage.updated" })).await?.success()?;
    assert_eq!((without["sequence"].as_i64(), &without["payload"]), (Some(1), &json!({})), "bob's own sequence");

    let listed = key.at(&gateways[1]).get(EVENTS).await?.success()?;
    assert_eq!(sequences(&listed), [6, 5, 4, 3, 2, 1]);
    assert_eq!((text(&listed[5]["type"]), &listed[5]["payload"]["n"]), ("tool.called", &json!(1)));
    assert_eq!(sequences(&key.get(&format!("{EVENTS}?type=tool.called")).await?.success()?), [6, 1]);
    assert_eq!(sequences(&key.get(&format!("{EVENTS}?type=tool.called&limit=1")).await?.success()?), [6]);
    assert_eq!(sequences(&key.get(&format!("{EVENTS}?type=no.such")).await?.success()?), Vec::<i64>::new());
    assert_eq!(key.get("/v1/agents/ann").await?.success()?["activity_status"], "active", "none of them was a status");

    // Observers get each event under its own kind.
    let log = key.get("/v1/workspace/events?since=0&limit=500").await?.success()?;
    let harness =
        log["events"].as_array().into_iter().flatten().filter(|event| text(&event["type"]).starts_with("harness."));
    let harness: Vec<&Value> = harness.filter(|event| event["payload"]["agent_name"] == "ann").collect();
    let kinds: Vec<_> = harness.iter().map(|event| text(&event["type"]).to_owned()).collect();
    assert_eq!(kinds, types.map(|event_type| format!("harness.{event_type}")));
    let first = &harness[0]["payload"];
    assert_eq!((&first["id"], &first["agent_id"], &first["sequence"]), (&listed[5]["id"], &me["id"], &json!(1)));
    assert_eq!((&first["payload"], &first["created_at"]), (&listed[5]["payload"], &listed[5]["created_at"]));

    key.as_agent(&bob).post(EVENTS, json!({ "type": "tool.called" })).await?.refused(403, "forbidden")?;
    ann.post("/v1/agents/nobody/events", json!({ "type": "tool.called" })).await?.refused(403, "forbidden")?;
    key.post("/v1/agents/nobody/events", json!({ "type": "tool.called" })).await?.refused(404, "agent_not_found")?;
    key.get("/v1/agents/nobody/events").await?.refused(404, "agent_not_found")?;
    for event_type in ["", "tool", "a.b.c", "Tool.called", "tool.", ".called", "tool called", "täst.x"] {
        key.post(EVENTS, json!({ "type": event_type })).await?.refused(400, "invalid_event_type")?;
    }
    for body in [
        json!({}),
        json!({ "type": 7 }),
        json!({ "type": "tool.called", "payload": [] }),
        json!({ "type": "tool.called", "payload": { "x": "y".repeat(70_000) } }),
        json!({ "type": "status.changed" }),
        json!({ "type": "status.changed", "payload": { "status": "gone" } }),
    ] {
        key.post(EVENTS, body).await?.refused(400, "invalid_request")?;
    }
    key.get(&format!("{EVENTS}?limit=0")).await?.refused(400, "invalid_request")?;
    assert_eq!(sequences(&key.get(EVENTS).await?.success()?), [6, 5, 4, 3, 2, 1], "a refusal takes no number");
    Ok(())
}

#[tokio::test]
async fn one_idempotency_key_records_one_event_across_gateways() -> Result<()> {
    let (key, ann) = workspace("session-keys").await?;
    let body = json!({ "type": "command.started", "payload": { "a": 1, "b": 2 } });
    let keyed = |api: Api, body: Value, idempotency: &'static str| async move {
        api.call(Method::POST, EVENTS, Some(body), &[("Idempotency-Key", idempotency)]).await
    };
    let gateways = &shared().await.gateways;
    let replies = try_join_all((0..20).map(|n| keyed(key.at(&gateways[n % 2]), body.clone(), "k1"))).await?;
    let mut fresh = 0;
    for reply in &replies {
        assert_eq!(reply.status, 201, "{}", reply.body);
        assert_eq!(reply.data(), replies[0].data(), "all get the same event");
        fresh += i32::from(!reply.headers.contains_key("idempotency-replayed"));
    }
    assert_eq!(fresh, 1);
    assert_eq!(sequences(&key.get(EVENTS).await?.success()?), [1]);
    // The order of keys in a body does not matter; its content does.
    let same = json!({ "payload": { "b": 2, "a": 1 }, "type": "command.started" });
    assert_eq!(keyed(key.clone(), same, "k1").await?.success()?["sequence"], 1);
    let other = json!({ "type": "command.started", "payload": { "a": 2 } });
    keyed(key.clone(), other.clone(), "k1").await?.refused(409, "idempotency_key_reused")?;
    assert_eq!(keyed(key.clone(), other, "k2").await?.success()?["sequence"], 2);
    assert_eq!(keyed(ann.clone(), body.clone(), "k1").await?.success()?["sequence"], 3, "another caller's key");
    keyed(key.clone(), body, " ").await?.refused(400, "invalid_idempotency_key")?;
    Ok(())
}

#[tokio::test]
async fn the_status_is_that_of_the_last_event_in_sequence() -> Result<()> {
    let (key, _) = workspace("session-status").await?;
    let gateways = &shared().await.gateways;
    for round in 0..5 {
        let words = ["active", "idle", "blocked", "waiting", "offline"];
        let posts = (0..20).map(|n| {
            let (api, word) = (key.at(&gateways[n % 2]), words[(n + round) % words.len()]);
            async move {
                let body = if n % 3 == 0 {
                    json!({ "type": "status.changed", "payload": { "status": word } })
                } else {
                    json!({ "type": format!("status.{word}") })
                };
                let sequence = api.post(EVENTS, body).await?.success()?["sequence"].as_i64();
                Ok::<_, anyhow::Error>((sequence, word))
            }
        });
        let mut posted = try_join_all(posts).await?;
        posted.sort_unstable();
        let (last, word) = posted[posted.len() - 1];
        let agent = key.get("/v1/agents/ann").await?.success()?;
        assert_eq!(text(&agent["activity_status"]), word, "event {last:?} came last");
    }
    Ok(())
}

/// Returns the next status event of an agent on this socket.
async fn next_status(socket: &mut NodeSocket) -> Result<Value> {
    loop {
        let frame = socket.next_frame(SOON).await?;
        if text(&frame["event"]).starts_with("agent.status.") && frame["data"]["agent_name"] == "ann" {
            return Ok(frame);
        }
    }
}

#[tokio::test]
async fn each_status_change_is_announced_once() -> Result<()> {
    let (key, ann) = workspace("presence").await?;
    let me = ann.get("/v1/agent").await?.success()?;
    let bob = key.register_agent("bob").await?;
    let mut socket = key.as_agent(&bob).at(&shared().await.gateways[1]).direct_socket().await?;
    let post = |event_type: &'static str, payload: Value| {
        let key = key.clone();
        async move { key.post(EVENTS, json!({ "type": event_type, "payload": payload })).await?.success() }
    };
    let patch = |status: &'static str| {
        let key = key.clone();
        async move { key.patch("/v1/agents/ann", json!({ "status": status })).await?.success() }
    };
    // Repetitions are not changes: the next event is always a change.
    ann.post("/v1/agents/heartbeat", json!({})).await?.success()?;
    ann.post("/v1/agents/disconnect", json!({})).await?.success()?;
    let reported = next_status(&mut socket).await?;
    assert_eq!(text(&reported["event"]), "agent.status.offline");
    assert_eq!(
        (&reported["data"]["agent_id"], text(&reported["data"]["status"]), text(&reported["data"]["agent"]["name"])),
        (&me["id"], "offline", "ann")
    );
    patch("offline").await?;
    key.patch("/v1/agents/ann", json!({ "persona": "x" })).await?.success()?;
    patch("away").await?;
    assert_eq!(text(&next_status(&mut socket).await?["event"]), "agent.status.idle");
    post("status.idle", json!({})).await?;
    post("status.changed", json!({ "status": "idle" })).await?;
    post("status.changed", json!({ "status": "blocked" })).await?;
    let reported = next_status(&mut socket).await?;
    assert_eq!((text(&reported["event"]), text(&reported["data"]["status"])), ("agent.status.changed", "blocked"));
    post("status.waiting", json!({})).await?;
    assert_eq!(text(&next_status(&mut socket).await?["event"]), "agent.status.waiting");
    // A heartbeat shows presence and does not change the status.
    ann.post("/v1/agents/heartbeat", json!({})).await?.success()?;
    ann.post("/v1/agents/disconnect", json!({})).await?.success()?;
    assert_eq!(text(&next_status(&mut socket).await?["event"]), "agent.status.offline");
    ann.post("/v1/agents/heartbeat", json!({})).await?.success()?;
    assert_eq!(text(&next_status(&mut socket).await?["event"]), "agent.status.active");
    // A call makes the agent present even after it reported offline.
    ann.post("/v1/agents/disconnect", json!({})).await?.success()?;
    assert_eq!(text(&next_status(&mut socket).await?["event"]), "agent.status.offline");
    ann.get("/v1/channels").await?.success()?;
    assert_eq!(text(&next_status(&mut socket).await?["event"]), "agent.status.active");
    Ok(())
}
