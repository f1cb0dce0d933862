//! Spawning and releasing agents on nodes.

use std::time::Duration;

use anyhow::{Context as _, Result};
use relay_acceptance::room::text;
use relay_acceptance::spawning::{
    SOON, Scene, connect_spawn_node, inventory, post_with_key, register_spawned, scene, send_result, wait_for_outcome,
};
use relay_domain::access::token::TokenHash;
use relay_testkit::client::{Api, NodeSocket};
use relay_testkit::{shared, wait};
use serde_json::{Value, json};

/// Lets the lead release agents that it has not spawned.
async fn permit_every_release(workspace: &Api, lead: &Api) -> Result<()> {
    let rights = json!({ "rights": { "release_any": true } });
    workspace.at(lead.base()).patch("/v1/agents/lead", rights).await?.success().map(drop)
}

#[tokio::test]
async fn a_spawned_agent_starts_on_its_node_and_joins_its_channels() -> Result<()> {
    let Scene { workspace, lead, mut socket, node } = scene("spawn").await?;
    lead.create_channel("builds").await?;
    let mut direct = lead.direct_socket().await?;
    let body = json!({
        "name": "writer", "cli": "sh", "task": "write", "channel": "#builds", "persona": "poet", "model": "m",
        "harnessConfig": { "camelCase": { "deep": [1, null] } }, "unknown_field": true,
    });
    let ack = lead.post("/v1/agents/spawn", body.clone()).await?;
    assert_eq!(ack.status, 201, "{}", ack.body);
    let ack = ack.success()?;
    assert_eq!((text(&ack["action_name"]), text(&ack["status"])), ("spawn", "dispatched"));
    assert_eq!((text(&ack["dispatched_node_id"]), &ack["handler_agent_id"]), (&*node, &Value::Null));
    let (frame, born) = register_spawned(&mut socket).await?;
    assert_eq!((&frame["action"], &frame["input"]), (&json!("spawn:sh"), &body), "untouched");
    assert_eq!(frame["invocation_id"], ack["invocation_id"]);
    assert_eq!(born["delivery_ack_seq"], 0);

    let record = workspace.get("/v1/agents/writer").await?.success()?;
    let mut channels: Vec<&str> =
        record["channels"].as_array().context("channels")?.iter().map(|c| text(&c["name"])).collect();
    channels.sort_unstable();
    assert_eq!(channels, ["builds", "general"]);
    assert_eq!(record["status"], "online");
    let hosted = workspace.get("/v1/nodes/box/agents").await?.success()?;
    assert_eq!((hosted.as_array().map(Vec::len), text(&hosted[0]["agent_name"])), (Some(1), "writer"));

    lead.post_message("builds", "hello").await?.success()?;
    let mail = socket.expect("deliver").await?;
    assert_eq!(
        (&mail["agent"], &mail["seq"], &mail["payload"]["data"]["text"]),
        (&json!("writer"), &json!(1), &json!("hello"))
    );

    send_result(&socket, &frame, json!({ "spawned": true, "name": "writer" })).await?;
    let done = wait_for_outcome(&lead, "spawn", &ack["invocation_id"]).await?;
    assert_eq!((text(&done["status"]), &done["output"]["spawned"]), ("completed", &json!(true)));
    let reported = direct.expect_where("the outcome", SOON, |f| f["payload"]["type"] == "action.completed").await?;
    assert_eq!(reported["payload"]["data"]["invocation_id"], ack["invocation_id"]);

    // The agent ends by itself.
    socket
        .send_json(&json!({ "v": 1, "type": "agent.deregister", "agent_id": born["agent_id"], "name": "writer" }))
        .await?;
    let exited = direct.expect_where("its end", SOON, |f| f["payload"]["type"] == "agent.exited").await?;
    let data = &exited["payload"]["data"];
    assert_eq!(
        (&exited["seq"], text(&data["agent_name"]), text(&data["reason"])),
        (&json!(0), "writer", "deregistered")
    );
    assert_eq!((&data["invocation_id"], text(&data["node_id"])), (&ack["invocation_id"], &*node));
    Ok(())
}

#[tokio::test]
async fn spawn_errors_state_the_reason() -> Result<()> {
    let Scene { workspace, lead, mut socket, .. } = scene("spawn-refused").await?;
    let spawn = |api: &Api, body: Value| {
        let api = api.clone();
        async move { api.post("/v1/agents/spawn", body).await }
    };
    for body in [
        json!({ "cli": "sh" }),
        json!({ "name": "a" }),
        json!({ "name": "a", "cli": 7 }),
        json!({ "name": "", "cli": "sh" }),
    ] {
        spawn(&lead, body).await?.refused(400, "invalid_request")?;
    }
    spawn(&lead, json!({ "name": "a", "cli": "claude" })).await?.refused(503, "handler_unavailable")?;
    spawn(&lead, json!({ "name": "a", "cli": "sh", "node": "nowhere" })).await?.refused(404, "node_not_found")?;
    spawn(&lead, json!({ "name": "a", "cli": "claude", "node": "box" })).await?.refused(409, "capability_mismatch")?;
    spawn(&lead, json!({ "name": "a", "cli": "sh", "node": "self" }))
        .await?
        .refused(409, "placement_self_unavailable")?;
    spawn(&workspace, json!({ "name": "a", "cli": "sh", "node": "self" }))
        .await?
        .refused(400, "placement_self_requires_agent")?;

    // An agent spawns another one on its own node, by the action's name, as placement clients do.
    let first = socket.register_agent("first").await?;
    let first = lead.with_token(text(&first["token"]));
    let ack = first
        .post("/v1/actions/spawn/invoke", json!({ "input": { "name": "second", "cli": "sh", "node": "self" } }))
        .await?;
    let ack = ack.success()?;
    assert_eq!(ack["action_name"], "spawn");
    let (frame, _) = register_spawned(&mut socket).await?;
    send_result(&socket, &frame, json!({ "spawned": true })).await?;
    assert_eq!(wait_for_outcome(&first, "spawn", &ack["invocation_id"]).await?["status"], "completed");

    // An offline node is waited for if it was named.
    socket.close().await?;
    let waits = wait::until_ok("the node to be unavailable", SOON, || async {
        let ack = spawn(&lead, json!({ "name": "third", "cli": "sh", "node": "box" })).await?.success()?;
        anyhow::ensure!(ack["status"] == "pending", "{ack}");
        Ok::<_, anyhow::Error>(ack)
    })
    .await?;
    assert_eq!(waits["dispatched_node_id"], Value::Null);
    Ok(())
}

#[tokio::test]
async fn an_agent_is_released_by_its_node_and_deleted_on_request() -> Result<()> {
    let Scene { workspace, lead, mut socket, .. } = scene("release").await?;
    let mut direct = lead.direct_socket().await?;
    for (name, deletes, ends_late) in [("stays", false, false), ("goes", true, false), ("lingers", true, true)] {
        lead.post("/v1/agents/spawn", json!({ "name": name, "cli": "sh" })).await?.success()?;
        let (frame, born) = register_spawned(&mut socket).await?;
        send_result(&socket, &frame, json!({ "spawned": true })).await?;
        let ack =
            lead.post("/v1/agents/release", json!({ "name": name, "reason": "done", "delete_agent": deletes })).await?;
        assert_eq!(ack.status, 201, "{}", ack.body);
        let ack = ack.success()?;
        assert_eq!(ack["action_name"], "release");
        let asked = socket.expect("action.invoke").await?;
        assert_eq!(asked["action"], "release");
        assert_eq!(asked["input"], json!({ "name": name, "reason": "done", "delete_agent": deletes }));
        let ended = json!({ "v": 1, "type": "agent.deregister", "agent_id": born["agent_id"] });
        if !ends_late {
            socket.send_json(&ended).await?;
        }
        send_result(&socket, &asked, json!({ "released": true, "name": name })).await?;
        assert_eq!(wait_for_outcome(&lead, "release", &ack["invocation_id"]).await?["output"]["released"], true);
        if ends_late {
            socket.send_json(&ended).await?;
        }
        let exited = direct.expect_where("its end", SOON, |f| f["payload"]["type"] == "agent.exited").await?;
        assert_eq!(
            (text(&exited["payload"]["data"]["agent_name"]), text(&exited["payload"]["data"]["reason"])),
            (name, "released")
        );
        wait::until("the agent to be gone or offline", SOON, || async {
            let agent = workspace.get(&format!("/v1/agents/{name}")).await;
            agent.is_ok_and(|agent| if deletes { agent.status == 404 } else { agent.data()["status"] == "offline" })
        })
        .await;
    }
    lead.post("/v1/agents/release", json!({ "name": "nobody" })).await?.refused(404, "agent_not_found")?;

    // Without its node an agent can only be deleted.
    lead.post("/v1/agents/spawn", json!({ "name": "alone", "cli": "sh" })).await?.success()?;
    register_spawned(&mut socket).await?;
    socket.close().await?;
    wait::until_ok("the node to be unavailable", SOON, || async {
        lead.post("/v1/agents/release", json!({ "name": "alone" })).await?.refused(503, "agent_host_unavailable")
    })
    .await?;
    let done = lead.post("/v1/agents/release", json!({ "name": "alone", "delete_agent": true })).await?.success()?;
    assert_eq!(done["status"], "completed");
    workspace.get("/v1/agents/alone").await?.refused(404, "agent_not_found")?;

    // An agent without a node is released by the engine.
    workspace.register_agent("own").await?;
    let done = workspace.post("/v1/agents/release", json!({ "name": "own" })).await?.success()?;
    assert_eq!(done["status"], "completed");
    assert_eq!(workspace.get("/v1/agents/own").await?.success()?["status"], "offline");
    Ok(())
}

/// Two providers of a node can release. The one that runs the agent is chosen even at full capacity.
#[tokio::test]
async fn a_release_goes_to_the_process_that_runs_the_agent() -> Result<()> {
    let engine = shared().await;
    let workspace = Api::create_workspace(&engine.gateways[0], "release-owner").await?;
    let lead = workspace.as_agent(&workspace.register_agent("lead").await?).at(&engine.gateways[1]);
    let token = workspace.create_broker_node("node_box", "box").await?;
    let mut sockets = Vec::new();
    for (provider, gateway) in [("left", 0), ("right", 1)] {
        let base = engine.gateways[gateway].replacen("http", "ws", 1);
        let mut socket = NodeSocket::connect(&base, &token.token).await?;
        let register = json!({
            "v": 1, "type": "node.register", "name": "box", "node_id": "node_box", "max_agents": 3, "tags": [],
            "provider": { "name": provider, "instance_id": provider }, "version": "test/1",
            "capabilities": [{ "name": "release", "kind": "capacity" }],
        });
        socket.request(register).await?;
        sockets.push(socket);
    }
    permit_every_release(&workspace, &lead).await?;
    // Both providers are at full capacity.
    let mut hosts = Vec::new();
    for n in 0..6 {
        let (name, side) = (format!("worker-{n}"), n % 2);
        let hosted = sockets[side].register_agent(&name).await?;
        hosts.push((name, hosted["agent_id"].clone(), side));
    }
    for (name, id, side) in &hosts {
        let ack = lead.post("/v1/agents/release", json!({ "name": name })).await?.success()?;
        let asked = sockets[*side].expect("action.invoke").await?;
        assert_eq!((&asked["invocation_id"], &asked["input"]["name"]), (&ack["invocation_id"], &json!(name)));
        send_result(&sockets[*side], &asked, json!({ "released": true, "name": name })).await?;
        assert_eq!(wait_for_outcome(&lead, "release", &ack["invocation_id"]).await?["status"], "completed");
        sockets[*side].request(json!({ "v": 1, "type": "agent.deregister", "agent_id": id })).await?;
    }

    // While its provider is offline, no other one is asked.
    sockets[0].register_agent("orphan").await?;
    let right = sockets.pop().context("two")?;
    sockets.pop().context("two")?.abort();
    wait::until_ok("the release to be refused", SOON, || async {
        lead.post("/v1/agents/release", json!({ "name": "orphan" })).await?.refused(503, "agent_host_unavailable")
    })
    .await?;
    drop(right);
    Ok(())
}

#[tokio::test]
async fn only_the_expected_agent_is_released() -> Result<()> {
    let key = Api::create_workspace(shared().await.any_gateway(), "release-exact").await?;
    let old = key.register_agent("writer").await?;
    let fresh = key.post("/v1/agents/writer/rotate-token", json!({})).await?.success()?;
    let hash =
        |token: &str| TokenHash::from_token(token).as_bytes().iter().map(|b| format!("{b:02x}")).collect::<String>();
    let release = |token: &str| json!({ "name": "writer", "delete_agent": true, "expected_token_hash": hash(token) });
    key.post("/v1/agents/release", release(&old.token)).await?.refused(409, "agent_release_generation_conflict")?;
    key.post("/v1/agents/release", json!({ "name": "writer", "expected_token_hash": "xyz" }))
        .await?
        .refused(400, "invalid_request")?;

    let exact = |id: &str| json!({ "name": "writer", "expected_agent_id": id, "delete_agent": true });
    key.post("/v1/agents/release-exact", exact(&old.id)).await?.refused(400, "invalid_idempotency_key")?;
    post_with_key(&key, "/v1/agents/release-exact", exact("7"), "k1").await?.refused(409, "agent_identity_mismatch")?;
    post_with_key(&key, "/v1/agents/release-exact", exact("nonsense"), "k2")
        .await?
        .refused(409, "agent_identity_mismatch")?;
    let released = post_with_key(&key, "/v1/agents/release-exact", exact(&old.id), "k3").await?.success()?;
    assert_eq!(released["status"], "completed");
    let again = post_with_key(&key, "/v1/agents/release-exact", exact(&old.id), "k3").await?;
    assert!(again.headers.contains_key("idempotency-replayed"));
    assert_eq!(
        again.success()?["invocation_id"],
        released["invocation_id"],
        "the agent is gone, and the answer the same"
    );
    key.post("/v1/agents/release", release(text(&fresh["token"]))).await?.refused(404, "agent_not_found")?;
    Ok(())
}

#[tokio::test]
async fn a_spawn_with_an_idempotency_key_happens_once() -> Result<()> {
    let Scene { lead, mut socket, node, .. } = scene("spawn-once").await?;
    let body = json!({ "name": "once", "cli": "sh", "node": "box" });
    let first = post_with_key(&lead, "/v1/agents/spawn", body.clone(), "k").await?.success()?;
    let again = post_with_key(&lead, "/v1/agents/spawn", body.clone(), "k").await?.success()?;
    assert_eq!(first["invocation_id"], again["invocation_id"]);
    post_with_key(&lead, "/v1/agents/spawn", json!({ "name": "other", "cli": "sh" }), "k")
        .await?
        .refused(409, "idempotency_key_reused")?;
    let (frame, _) = register_spawned(&mut socket).await?;
    assert_eq!(frame["invocation_id"], first["invocation_id"]);
    lead.post("/v1/agents/spawn", json!({ "name": "next", "cli": "sh" })).await?.success()?;
    let next = socket.expect("action.invoke").await?;
    assert_eq!(next["input"]["name"], "next", "the first was sent once");
    // A repeated request is answered although the node lost the capability.
    socket.register_broker_with(&node, "box", "run-1", &["release"]).await?;
    lead.post("/v1/agents/spawn", body.clone()).await?.refused(409, "capability_mismatch")?;
    let late = post_with_key(&lead, "/v1/agents/spawn", body, "k").await?;
    assert!(late.headers.contains_key("idempotency-replayed"));
    assert_eq!(late.success()?["invocation_id"], first["invocation_id"]);
    Ok(())
}

#[tokio::test]
async fn a_running_agent_completes_its_spawn_despite_a_name_conflict() -> Result<()> {
    let Scene { lead, mut socket, .. } = scene("spawn-in-use").await?;
    let ack = lead.post("/v1/agents/spawn", json!({ "name": "twice", "cli": "sh" })).await?.success()?;
    let (frame, born) = register_spawned(&mut socket).await?;
    // The frame arrived twice, and the node runs the agent already.
    let error = json!({
        "v": 1, "type": "action.result", "invocation_id": frame["invocation_id"], "error": "spawn_agent_name_in_use",
    });
    socket.send_json(&error).await?;
    let done = wait_for_outcome(&lead, "spawn", &ack["invocation_id"]).await?;
    assert_eq!((text(&done["status"]), &done["output"]["agent_id"]), ("completed", &born["agent_id"]));

    // Without a running agent the same error is a failure.
    let ack = lead.post("/v1/agents/spawn", json!({ "name": "never", "cli": "sh" })).await?.success()?;
    let frame = socket.expect("action.invoke").await?;
    socket
        .send_json(&json!({ "v": 1, "type": "action.result", "invocation_id": frame["invocation_id"], "error": "spawn_agent_name_in_use" }))
        .await?;
    assert_eq!(wait_for_outcome(&lead, "spawn", &ack["invocation_id"]).await?["status"], "failed");
    Ok(())
}

#[tokio::test]
async fn an_inventory_that_names_the_spawn_completes_it_once() -> Result<()> {
    let Scene { lead, mut socket, .. } = scene("spawn-inventory").await?;
    let ack = lead.post("/v1/agents/spawn", json!({ "name": "quiet", "cli": "sh" })).await?.success()?;
    let frame = socket.expect("action.invoke").await?;
    let born = socket.register_agent("quiet").await?;
    let listed = json!({ "agent_id": born["agent_id"], "name": "quiet", "invocation_id": frame["invocation_id"] });
    let reply = socket.request(json!({ "v": 1, "type": "inventory.sync", "agents": [listed] })).await?;
    assert_eq!((&reply["open_invocations"], &reply["completed_invocations"]), (&json!(0), &json!(1)), "{reply}");
    // The node sends no result.
    let done = wait_for_outcome(&lead, "spawn", &ack["invocation_id"]).await?;
    assert_eq!((text(&done["status"]), &done["output"]["agent_id"]), ("completed", &born["agent_id"]));
    assert_eq!(done["output"]["invocation_id"], ack["invocation_id"]);
    send_result(&socket, &frame, json!({ "late": true })).await?;
    socket.request(json!({ "v": 1, "type": "inventory.sync", "agents": [listed] })).await?;
    assert_eq!(
        wait_for_outcome(&lead, "spawn", &ack["invocation_id"]).await?["output"],
        done["output"],
        "the first outcome counts"
    );
    Ok(())
}

/// An agent registers before its process starts. Another spawn may trigger an inventory in between.
#[tokio::test]
async fn an_agent_being_spawned_is_not_missing_from_an_inventory() -> Result<()> {
    let Scene { workspace, lead, mut socket, .. } = scene("newborn").await?;
    lead.post("/v1/agents/spawn", json!({ "name": "newborn", "cli": "sh" })).await?.success()?;
    let frame = socket.expect("action.invoke").await?;
    let id = &frame["invocation_id"];
    let born = json!({ "v": 1, "type": "agent.register", "name": "newborn", "invocation_id": id });
    socket.request(born).await?;
    inventory(&mut socket, &[]).await?;
    let status = async || anyhow::Ok(workspace.get("/v1/agents/newborn").await?.success()?["status"].clone());
    assert_eq!(status().await?, "online");

    // A spawn that takes too long is sent to its node again.
    let database = sqlx::PgPool::connect(&shared().await.database_url).await?;
    sqlx::query("UPDATE invocations SET sent_at = now() - interval '1 minute' WHERE invocation_id = $1")
        .bind(text(id).trim_start_matches("inv_").parse::<i64>()?)
        .execute(&database)
        .await?;
    let counts = inventory(&mut socket, &[]).await?;
    assert_eq!(counts["rescheduled_invocations"], 1, "{counts}");
    assert_eq!(status().await?, "offline");
    assert_eq!(&socket.expect("action.invoke").await?["invocation_id"], id);
    Ok(())
}

#[tokio::test]
async fn a_session_resumes_on_its_node_with_its_mailbox() -> Result<()> {
    let Scene { workspace, lead, mut socket, node } = scene("resume").await?;
    let (_, mut other) = connect_spawn_node(&workspace, "other").await?;
    lead.post("/v1/agents/spawn", json!({ "name": "thinker", "cli": "sh", "node": "box" })).await?.success()?;
    let frame = socket.expect("action.invoke").await?;
    let register = json!({
        "v": 1, "type": "agent.register", "name": "thinker", "invocation_id": frame["invocation_id"],
        "session_ref": "s-1", "resumable": true,
    });
    let born = socket.request(register.clone()).await?;
    inventory(&mut socket, &[(&born["agent_id"], &json!("thinker"))]).await?;
    send_result(&socket, &frame, json!({ "spawned": true })).await?;
    inventory(&mut socket, &[]).await?;
    lead.dm("thinker", "while away").await?.success()?;

    for n in 0..5 {
        // The session selects the node.
        let body = json!({ "name": "thinker", "cli": "sh", "session_ref": "s-1", "n": n });
        let ack = lead.post("/v1/agents/spawn", body).await?.success()?;
        assert_eq!(text(&ack["dispatched_node_id"]), node, "{ack}");
        let frame = socket.expect("action.invoke").await?;
        send_result(&socket, &frame, json!({ "n": n })).await?;
    }
    let again = socket.request(register).await?;
    assert_eq!((&again["agent_id"], &again["delivery_ack_seq"]), (&born["agent_id"], &json!(0)));
    let mail = socket.expect_where("its mail", SOON, |f| f["type"] == "deliver").await?;
    assert_eq!(mail["payload"]["data"]["text"], "while away");
    assert!(other.expect_where("nothing", Duration::from_millis(200), |f| f["type"] == "action.invoke").await.is_err());
    Ok(())
}

#[tokio::test]
async fn deliveries_of_an_unresumable_session_become_dead_letters_with_a_notice() -> Result<()> {
    let Scene { lead, mut socket, .. } = scene("orphans").await?;
    let mut direct = lead.direct_socket().await?;
    lead.post("/v1/agents/spawn", json!({ "name": "mortal", "cli": "sh" })).await?.success()?;
    let (frame, born) = register_spawned(&mut socket).await?;
    send_result(&socket, &frame, json!({ "spawned": true })).await?;
    let sent = lead.dm("mortal", "never read").await?.success()?;
    socket.expect("deliver").await?;
    inventory(&mut socket, &[]).await?;
    let notice = direct
        .expect_where("the notice", SOON, |f| f["type"] == "context.update" && f["event"] == "delivery.failed")
        .await?;
    let data = &notice["data"];
    assert_eq!((&data["message_id"], text(&data["reason"])), (&sent["message"]["id"], "session_gone"));
    let exited = direct.expect_where("its end", SOON, |f| f["payload"]["type"] == "agent.exited").await?;
    assert_eq!(
        (&exited["payload"]["data"]["agent_id"], text(&exited["payload"]["data"]["reason"])),
        (&born["agent_id"], "missing_from_inventory")
    );
    Ok(())
}

#[tokio::test]
async fn a_node_spawns_on_itself() -> Result<()> {
    let Scene { workspace, mut socket, node, .. } = scene("node-spawn").await?;
    let spawn = json!({ "v": 1, "type": "node.spawn", "input": { "name": "child", "cli": "sh" } });
    let ack = socket.request(spawn).await?;
    assert_eq!((text(&ack["action_name"]), text(&ack["dispatched_node_id"])), ("spawn", &*node));
    let (frame, _) = register_spawned(&mut socket).await?;
    assert_eq!(frame["invocation_id"], ack["invocation_id"]);
    send_result(&socket, &frame, json!({ "spawned": true })).await?;
    assert_eq!(wait_for_outcome(&workspace, "spawn", &ack["invocation_id"]).await?["caller_name"], "box");
    let refused = json!({ "v": 1, "type": "node.spawn", "input": { "name": "child", "cli": "claude" } });
    let error = socket.request(refused).await.unwrap_err().to_string();
    assert!(error.contains("capability_mismatch"), "{error}");
    Ok(())
}

#[tokio::test]
async fn outcomes_of_durable_spawns_and_releases_are_in_the_mailbox() -> Result<()> {
    let Scene { workspace, lead, mut socket, .. } = scene("durable-spawn").await?;
    let results = async || {
        let listed = lead.get("/v1/deliveries").await?.success()?;
        let rows = listed.as_array().context("deliveries")?;
        anyhow::Ok(rows.iter().filter(|row| row["reason"] == "action-result").count())
    };
    lead.post("/v1/agents/spawn", json!({ "name": "quiet", "cli": "sh" })).await?.success()?;
    let (frame, _) = register_spawned(&mut socket).await?;
    send_result(&socket, &frame, json!({ "spawned": true })).await?;
    wait_for_outcome(&lead, "spawn", &frame["invocation_id"]).await?;
    assert_eq!(results().await?, 0, "only who asks for it has it in the mailbox");

    let body = json!({ "name": "kept", "cli": "sh", "durable": true });
    lead.post("/v1/agents/spawn", body.clone()).await?.success()?;
    let frame = socket.expect("action.invoke").await?;
    assert_eq!(frame["input"], body, "untouched");
    send_result(&socket, &frame, json!({ "spawned": true })).await?;
    wait_for_outcome(&lead, "spawn", &frame["invocation_id"]).await?;
    assert_eq!(results().await?, 1);
    let wrong = json!({ "name": "wrong", "cli": "sh", "durable": "yes" });
    lead.post("/v1/agents/spawn", wrong).await?.refused(400, "invalid_request")?;

    // By either route, handled by a node or by the engine.
    let body = json!({ "input": { "name": "quiet" }, "durable": true });
    lead.post("/v1/actions/release/invoke", body).await?.success()?;
    let frame = socket.expect("action.invoke").await?;
    send_result(&socket, &frame, json!({ "released": true })).await?;
    wait_for_outcome(&lead, "release", &frame["invocation_id"]).await?;
    assert_eq!(results().await?, 2);
    workspace.register_agent("own").await?;
    permit_every_release(&workspace, &lead).await?;
    let done = lead.post("/v1/agents/release", json!({ "name": "own", "durable": true })).await?.success()?;
    assert_eq!((text(&done["status"]), results().await?), ("completed", 3));
    Ok(())
}
