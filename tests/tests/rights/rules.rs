//! Rules that follow from more than one request: spawners, triggers, take-over of actions, nodes that post, files.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::{
    room::{Room, rows, text},
    spawning::{Scene, register_spawned, scene, send_result},
};
use relay_testkit::{client::Api, shared, wait};
use serde_json::{Value, json};
use sqlx::PgPool;

const SOON: Duration = Duration::from_secs(30);

/// Returns the events of a kind in the log.
async fn events(key: &Api, kind: &str) -> Result<Vec<Value>> {
    let log = key.get("/v1/workspace/events?limit=500").await?.success()?;
    Ok(rows(&log["events"])
        .iter()
        .filter(|event| event["type"] == kind)
        .map(|event| event["payload"].clone())
        .collect())
}

#[tokio::test]
async fn a_spawner_is_shown_and_may_end_its_agents() -> Result<()> {
    let Scene { workspace, lead, mut socket, .. } = scene("rights-spawner").await?;
    let eve = workspace.as_agent(&workspace.register_agent("eve").await?);
    for name in ["first", "second"] {
        lead.post("/v1/agents/spawn", json!({ "name": name, "cli": "sh" })).await?.success()?;
        let (frame, _) = register_spawned(&mut socket).await?;
        send_result(&socket, &frame, json!({ "spawned": true })).await?;
    }
    let lead_id = text(&lead.get("/v1/agent").await?.success()?["id"]).to_owned();
    for api in [&workspace, &eve] {
        let shown = api.get("/v1/agents/first").await?.success()?;
        assert_eq!(text(&shown["spawned_by"]), lead_id, "{shown}");
    }
    assert_eq!(lead.get("/v1/agent").await?.success()?.get("spawned_by"), None);
    for deletes in [false, true] {
        eve.post("/v1/agents/release", json!({ "name": "first", "delete_agent": deletes }))
            .await?
            .refused(403, "agent_not_spawned_by_caller")?;
        eve.post("/v1/actions/release/invoke", json!({ "input": { "name": "first", "delete_agent": deletes } }))
            .await?
            .refused(403, "agent_not_spawned_by_caller")?;
    }
    eve.delete("/v1/agents/first").await?.refused(403, "agent_not_spawned_by_caller")?;
    let released = lead.post("/v1/agents/release", json!({ "name": "first" })).await?;
    assert_eq!(released.status, 201, "{}", released.body);
    assert_eq!(lead.delete("/v1/agents/second").await?.status, 204);
    // An agent ends itself.
    assert_eq!(eve.post("/v1/agents/release", json!({ "name": "eve", "delete_agent": true })).await?.status, 201);
    Ok(())
}

/// A spawn under the name of an older agent gives no power over it; one that an action passes on belongs to its caller.
#[tokio::test]
async fn a_spawner_is_recorded_for_new_agents_only() -> Result<()> {
    let Scene { workspace, lead, mut socket, .. } = scene("rights-older").await?;
    socket.register_agent("older").await?;
    lead.post("/v1/agents/spawn", json!({ "name": "older", "cli": "sh" })).await?.success()?;
    register_spawned(&mut socket).await?;
    assert_eq!(workspace.get("/v1/agents/older").await?.success()?.get("spawned_by"), None);
    lead.delete("/v1/agents/older").await?.refused(403, "agent_not_spawned_by_caller")?;

    lead.post("/v1/agents/spawn", json!({ "name": "inner", "cli": "sh" })).await?.success()?;
    let outer = socket.expect("action.invoke").await?;
    // The handler of the action asks the node's own capacity.
    let frame = json!({ "v": 1, "type": "node.spawn", "input": { "name": "inner", "cli": "sh" } });
    socket.request(frame).await?;
    let (inner, _) = register_spawned(&mut socket).await?;
    assert_ne!(inner["invocation_id"], outer["invocation_id"]);
    let shown = workspace.get("/v1/agents/inner").await?.success()?;
    assert_eq!(shown["spawned_by"], lead.get("/v1/agent").await?.success()?["id"]);
    Ok(())
}

/// Waits until a trigger has matched a message.
async fn wait_for_match(key: &Api, trigger: &str) -> Result<Value> {
    wait::until_ok("the trigger to match", SOON, || async {
        let shown = key.get(trigger).await?.success()?;
        ensure!(shown["last_triggered_at"].is_string(), "not yet: {shown}");
        anyhow::Ok(shown)
    })
    .await
}

/// A trigger does not lend its creator the rights of those who write.
#[tokio::test]
async fn a_trigger_acts_with_the_rights_of_its_creator_too() -> Result<()> {
    let Room { key, ann, bob, .. } = Room::new("rights-triggers").await?;
    let eve = key.as_agent(&key.register_agent("eve").await?);
    for (name, available) in [("deploy", json!(["ann"])), ("later", Value::Null)] {
        let action = json!({ "name": name, "handler_agent": "bob", "available_to": available });
        bob.post("/v1/actions", action).await?.success()?;
    }
    let lunch = |action: &str| json!({ "pattern": "lunch", "action_name": action });
    eve.post("/v1/triggers", lunch("deploy")).await?.refused(403, "action_denied")?;
    let open = eve.post("/v1/triggers", lunch("later")).await?.success()?;
    let open = format!("/v1/triggers/{}", text(&open["id"]));
    eve.patch(&open, json!({ "action_name": "deploy" })).await?.refused(403, "action_denied")?;
    let anns = ann.post("/v1/triggers", lunch("deploy")).await?.success()?;
    assert_eq!(anns["created_by"], ann.get("/v1/agent").await?.success()?["id"]);
    let anns = format!("/v1/triggers/{}", text(&anns["id"]));
    eve.patch(&anns, json!({ "pattern": "dinner" })).await?.refused(403, "trigger_not_own")?;
    eve.delete(&anns).await?.refused(403, "trigger_not_own")?;

    // The action is restricted after the trigger was created.
    let action = json!({ "name": "later", "handler_agent": "bob", "available_to": ["ann"] });
    bob.post("/v1/actions", action).await?.success()?;
    ann.post_message("room", "lunch?").await?.success()?;
    assert_eq!(wait_for_match(&key, &anns).await?["last_error"], Value::Null, "ann may");
    let refused = wait_for_match(&key, &open).await?;
    assert!(text(&refused["last_error"]).contains("denied"), "eve may not: {refused}");

    // The author's rights count as well, and those of a deleted creator are none.
    let invoked = events(&key, "action.invoked").await?.len();
    bob.post_message("room", "lunch, says bob").await?.success()?;
    wait::until_ok("the denial", SOON, || async {
        let shown = key.get(&anns).await?.success()?;
        ensure!(text(&shown["last_error"]).contains("denied"), "{shown}");
        anyhow::Ok(())
    })
    .await?;
    assert_eq!(events(&key, "action.invoked").await?.len(), invoked);
    assert_eq!(key.delete("/v1/agents/eve").await?.status, 204);
    assert_eq!(key.delete(&open).await?.status, 204, "its triggers stay for the key");
    Ok(())
}

#[tokio::test]
async fn an_action_is_taken_over_from_a_handler_that_is_not_live() -> Result<()> {
    let Room { key, ann, bob, bob_agent, .. } = Room::new("rights-takeover").await?;
    let schema = json!({ "type": "object", "required": ["n"] });
    let bobs = json!({ "name": "count", "handler_agent": "bob", "input_schema": schema, "available_to": ["cyd"] });
    bob.post("/v1/actions", bobs).await?.success()?;
    let anns = json!({ "name": "count", "handler_agent": "ann", "input_schema": { "type": "object" } });
    ann.post("/v1/actions", anns.clone()).await?.refused(409, "action_name_conflict")?;
    key.post("/v1/actions", anns.clone()).await?.refused(409, "action_name_conflict")?;
    let pool = PgPool::connect(&shared().await.database_url).await?;
    sqlx::query("UPDATE agents SET last_seen_at = now() - interval '61 seconds' WHERE agent_id = $1")
        .bind(bob_agent.id.parse::<i64>()?)
        .execute(&pool)
        .await?;
    let closed = json!({ "rights": { "define_actions": false } });
    key.at(ann.base()).patch("/v1/agents/ann", closed).await?.success()?;
    ann.post("/v1/actions", anns.clone()).await?.refused(403, "define_actions_denied")?;
    key.at(ann.base()).patch("/v1/agents/ann", json!({ "rights": null })).await?.success()?;
    let taken = ann.post("/v1/actions", anns).await?;
    assert_eq!(taken.status, 200, "{}", taken.body);
    let taken = taken.success()?;
    assert_eq!(
        (text(&taken["handler_agent"]), &taken["input_schema"], &taken["available_to"]),
        ("ann", &schema, &json!(["cyd"])),
        "only the handler changes"
    );
    let events = events(&key, "action.taken_over").await?;
    assert_eq!(events.len(), 1);
    assert_eq!(
        (text(&events[0]["name"]), text(&events[0]["handler_agent"]), text(&events[0]["former_handler_agent"])),
        ("count", "ann", "bob")
    );
    bob.delete("/v1/actions/count").await?.refused(404, "action_not_found")?;
    Ok(())
}

/// A connected handler is live however long ago it called.
#[tokio::test]
async fn a_connected_handler_keeps_its_actions() -> Result<()> {
    let Room { ann, bob, bob_agent, .. } = Room::new("rights-connected").await?;
    let _socket = bob.direct_socket().await?;
    bob.post("/v1/actions", json!({ "name": "count", "handler_agent": "bob" })).await?.success()?;
    let pool = PgPool::connect(&shared().await.database_url).await?;
    sqlx::query("UPDATE agents SET last_seen_at = now() - interval '1 hour' WHERE agent_id = $1")
        .bind(bob_agent.id.parse::<i64>()?)
        .execute(&pool)
        .await?;
    let anns = json!({ "name": "count", "handler_agent": "ann" });
    ann.post("/v1/actions", anns).await?.refused(409, "action_name_conflict")?;
    Ok(())
}

#[tokio::test]
async fn a_broker_posts_for_every_agent_and_a_direct_node_for_its_own() -> Result<()> {
    let Room { key, ann, bob, .. } = Room::new("rights-nodes").await?;
    let broker = key.create_broker_node("node_box", "box").await?;
    let (broker, direct) = (key.with_token(&broker.token), key.with_token(&ann.direct_node_token().await?.token));
    let path = "/v1/channels/room/messages";
    let post = |from: &str| json!({ "from": from, "text": "hello", "data": { "a": 1 } });
    let posted = broker.post(path, post("bob")).await?.success()?;
    assert_eq!(posted["metadata"], json!({ "a": 1, "posted_by_node": "node_box" }));
    assert_eq!(text(&posted["agent_name"]), "bob");
    // An edit by its author keeps the record.
    let edited = bob.patch(&format!("/v1/messages/{}", text(&posted["id"])), json!({ "data": { "b": 2 } })).await?;
    assert_eq!(edited.success()?["metadata"], json!({ "b": 2, "posted_by_node": "node_box" }));
    broker.post(path, post("nobody")).await?.refused(404, "agent_not_found")?;
    assert_eq!(direct.post(path, post("ann")).await?.success()?["metadata"], json!({ "a": 1 }));
    direct.post(path, post("bob")).await?.refused(403, "node_post_denied")?;
    for (rights, code) in [
        (json!({ "post_through_node": false }), "node_post_denied"),
        (json!({ "post_through_node": true, "send": false }), "send_denied"),
    ] {
        key.patch("/v1/agents/bob", json!({ "rights": rights })).await?.success()?;
        broker.post(path, post("bob")).await?.refused(403, code)?;
    }
    let denied = events(&key, "access.denied").await?;
    assert_eq!(denied.len(), 2, "once for each agent and code: {denied:?}");
    Ok(())
}

#[tokio::test]
async fn policy_and_overrides_are_shown_where_they_are_set() -> Result<()> {
    let engine = shared().await;
    let key = Api::create_workspace(&engine.gateways[0], "rights-shown").await?;
    let ann = key.register_agent("ann").await?;
    let there = key.as_agent(&ann).at(&engine.gateways[1]);
    assert_eq!(key.get("/v1/workspace").await?.success()?.get("policy"), None);
    assert_eq!(key.get("/v1/agents/ann").await?.success()?.get("rights"), None);
    there.create_channel("before").await?;
    let policy = json!({ "policy": { "join": false, "release_any": true } });
    assert_eq!(
        key.patch("/v1/workspace", policy).await?.success()?["policy"],
        json!({ "join": false, "release_any": true })
    );
    let changed = key.patch("/v1/workspace", json!({ "policy": { "release_any": null, "spawn": false } })).await?;
    assert_eq!(changed.success()?["policy"], json!({ "join": false, "spawn": false }), "merged");
    assert_eq!(key.get("/v1/workspace").await?.success()?["policy"], json!({ "join": false, "spawn": false }));
    wait::until_ok("the other gateway to know", SOON, || async {
        there.post("/v1/channels", json!({ "name": "after" })).await?.refused(403, "join_denied").map(drop)
    })
    .await?;
    let rights = json!({ "rights": { "join": true } });
    assert_eq!(key.patch("/v1/agents/ann", rights).await?.success()?["rights"], json!({ "join": true }));
    assert_eq!(there.get("/v1/agent").await?.success()?["rights"], json!({ "join": true }));
    wait::until_ok("the other gateway to know", SOON, || async {
        there.post_empty("/v1/channels/before/join").await?.success().map(drop)
    })
    .await?;
    for (path, body) in [
        ("/v1/workspace", json!({ "policy": { "fly": true } })),
        ("/v1/workspace", json!({ "policy": { "join": "no" } })),
        ("/v1/agents/ann", json!({ "rights": { "fly": true } })),
        ("/v1/agents/ann", json!({ "rights": [] })),
    ] {
        key.patch(path, body).await?.refused(400, "invalid_request")?;
    }
    there.patch("/v1/agents/ann", json!({ "rights": { "release_any": true } })).await?.refused(401, "unauthorized")?;
    assert_eq!(key.patch("/v1/workspace", json!({ "policy": null })).await?.success()?.get("policy"), None);
    assert_eq!(key.patch("/v1/agents/ann", json!({ "rights": null })).await?.success()?.get("rights"), None);
    Ok(())
}

/// Rights of an agent do not end what its node does for it, except by the node's own routes.
#[tokio::test]
async fn a_spawn_of_an_action_needs_the_right() -> Result<()> {
    let Scene { workspace, lead, .. } = scene("rights-spawn-action").await?;
    let closed = json!({ "rights": { "spawn": false } });
    workspace.at(lead.base()).patch("/v1/agents/lead", closed).await?.success()?;
    for (path, body) in [
        ("/v1/agents/spawn", json!({ "name": "a", "cli": "sh" })),
        ("/v1/actions/spawn/invoke", json!({ "input": { "name": "a", "cli": "sh" } })),
        ("/v1/actions/spawn:sh/invoke", json!({ "input": { "name": "a" } })),
        ("/v1/nodes/box/actions/spawn:sh/invoke", json!({ "input": { "name": "a" } })),
    ] {
        lead.post(path, body).await?.refused(403, "spawn_denied")?;
    }
    Ok(())
}

/// Refusals are recorded once a minute for each agent and code.
#[tokio::test]
async fn refusals_do_not_flood_the_log() -> Result<()> {
    let Room { key, ann, .. } = Room::new("rights-flood").await?;
    key.at(ann.base()).patch("/v1/agents/ann", json!({ "rights": { "send": false } })).await?.success()?;
    for _ in 0..50 {
        ann.post_message("room", "hello").await?.refused(403, "send_denied")?;
    }
    let denied = events(&key, "access.denied").await?;
    assert_eq!(denied.len(), 1, "{denied:?}");
    let shown = denied.first().context("one")?;
    assert_eq!(
        (text(&shown["code"]), text(&shown["right"]), text(&shown["agent_name"])),
        ("send_denied", "send", "ann")
    );
    Ok(())
}

#[tokio::test]
async fn an_agent_to_which_joining_is_closed_cannot_be_invited() -> Result<()> {
    let key = Api::create_workspace(shared().await.any_gateway(), "rights-invite").await?;
    let ann = key.as_agent(&key.register_agent("ann").await?);
    key.register_agent("bob").await?;
    ann.create_channel("room").await?;
    let invite = || ann.post("/v1/channels/room/invite", json!({ "agent_name": "bob" }));
    key.patch("/v1/agents/bob", json!({ "rights": { "join": false } })).await?.success()?;
    invite().await?.refused(403, "join_denied")?;
    // A policy for all leaves invitations to those who may join.
    key.patch("/v1/workspace", json!({ "policy": { "join": false } })).await?.success()?;
    key.patch("/v1/agents/bob", json!({ "rights": null })).await?.success()?;
    invite().await?.refused(403, "join_denied")?;
    key.patch("/v1/agents/ann", json!({ "rights": { "join": true } })).await?.success()?;
    invite().await?.success()?;
    Ok(())
}
