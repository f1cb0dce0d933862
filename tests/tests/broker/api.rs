//! The listen API as drivers use it.

use anyhow::{Context, Result, ensure};
use relay_testkit::{node::FakeAgent, wait};
use serde_json::json;

use crate::scene::{SOON, Scene, floors, numbered};

#[tokio::test]
async fn callers_need_the_key_and_browser_origins_are_refused() -> Result<()> {
    let scene = Scene::new("access").await?;
    let health = scene.broker.call_with("GET", "/health", &[]).await?;
    assert_eq!((health.status, &health.body["service"]), (200, &json!("agent-relay-listen")));
    let refused = scene.broker.call_with("GET", "/api/session", &[("x-api-key", "br_wrong")]).await?;
    assert_eq!((refused.status, &refused.body["code"]), (401, &json!("unauthorized")));
    let page = scene.broker.call_with("GET", "/health", &[("origin", "http://example.org")]).await?;
    assert_eq!(page.status, 403);
    let unknown = scene.broker.call("GET", "/api/threads", None).await?;
    assert_eq!((unknown.status, &unknown.body["code"]), (404, &json!("not_found")));
    Ok(())
}

#[tokio::test]
async fn an_agent_is_listed_typed_to_shown_and_released() -> Result<()> {
    let scene = Scene::new("terminal").await?;
    let agent = scene.spawn("a b#c/d", "cooked", &[]).await?;
    let path = "a%20b%23c%2Fd";
    let acks = scene.broker.folder().join(".agent-relay").join(path).join("acks");
    assert!(acks.is_dir());
    let again = scene.broker.spawn(&agent, "a b#c/d", json!({})).await?;
    assert_eq!((again.status, &again.body["code"]), (409, &json!("agent_already_exists")));

    let typed = scene.broker.call("POST", &format!("/api/input/{path}"), Some(json!({ "data": "hello\r" }))).await?;
    assert_eq!((typed.status, &typed.body["bytes_written"]), (200, &json!(6)));
    wait::until_ok("the keys on the screen", SOON, || async {
        let snapshot = scene.broker.call("GET", &format!("/api/spawned/{path}/snapshot"), None).await?;
        let screen = snapshot.body["screen"].as_str().context("a screen")?;
        ensure!(screen.contains("hello") && screen.contains("got 1"), "{screen}");
        ensure!(screen.split('\n').count() == 25, "{screen}");
        Ok::<_, anyhow::Error>(())
    })
    .await?;
    let size = Some(json!({ "rows": 0, "cols": 80 }));
    let resize = scene.broker.call("POST", &format!("/api/resize/{path}"), size).await?;
    assert_eq!(resize.body["code"], "invalid_request");
    let missing = scene.broker.call("GET", "/api/spawned/nobody/snapshot", None).await?;
    assert_eq!((missing.status, &missing.body["code"]), (404, &json!("agent_not_found")));

    let released = scene.broker.call("DELETE", &format!("/api/spawned/{path}"), None).await?;
    assert_eq!((released.status, &released.body["success"]), (200, &json!(true)));
    assert!(scene.broker.names().await?.is_empty());
    assert_eq!(scene.broker.events("a b#c/d", "agent_released").await?.len(), 1);
    assert!(!scene.broker.folder().join(".agent-relay").exists(), "the folders for acks are removed");
    Ok(())
}

#[tokio::test]
async fn a_program_that_does_not_exist_leaves_no_trace() -> Result<()> {
    let scene = Scene::new("missing").await?;
    let body = json!({ "name": "ghost", "cli": "/does/not/exist", "args": [], "channels": [] });
    let refused = scene.broker.call("POST", "/api/spawn", Some(body)).await?;
    assert_eq!((refused.status, &refused.body["code"]), (400, &json!("spawn_failed")), "{}", refused.body);
    assert_eq!(refused.body["success"], false);
    assert!(scene.broker.names().await?.is_empty());
    assert!(!scene.broker.folder().join(".agent-relay").exists());
    let wrong = scene.broker.call("POST", "/api/spawn", Some(json!({ "name": 5 }))).await?;
    assert_eq!((wrong.status, &wrong.body["code"]), (400, &json!("invalid_request")));
    Ok(())
}

#[tokio::test]
async fn a_message_of_a_driver_goes_through_the_engine() -> Result<()> {
    let scene = Scene::new("sending").await?;
    let agent = scene.spawn("reader", "cooked", &[]).await?;
    let body = json!({ "to": "reader", "message": "from outside", "from": "human:pat" });
    let sent = scene.broker.call("POST", "/api/send", Some(body)).await?;
    assert_eq!((sent.status, &sent.body["relaycast_published"]), (200, &json!(true)), "{}", sent.body);
    let id = sent.body["event_id"].as_str().context("an id")?.to_owned();
    wait::until_ok("the message", SOON, || async {
        let messages = agent.messages();
        let expected = format!("Relay message from pat [{id}]: from outside");
        ensure!(messages.iter().any(|(_, text)| *text == expected), "{messages:?}");
        Ok::<_, anyhow::Error>(())
    })
    .await?;
    let unknown = scene.broker.call("POST", "/api/send", Some(json!({ "to": "nobody", "text": "x" }))).await?;
    assert_eq!((unknown.status, &unknown.body["code"]), (404, &json!("agent_not_found")), "{}", unknown.body);
    Ok(())
}

#[tokio::test]
async fn without_an_engine_calls_are_refused_and_a_start_can_be_released() -> Result<()> {
    let (scene, proxy) = Scene::behind_proxy("away").await?;
    scene.broker.wait_connected().await?;
    proxy.cut();
    wait::until_ok("the node to be offline", SOON, || async {
        let health = scene.broker.call_with("GET", "/health", &[]).await?.body;
        ensure!(health["status"] == "degraded", "{health}");
        anyhow::Ok(())
    })
    .await?;
    let message = json!({ "to": "sender", "text": "hello" });
    let sent = scene.broker.call("POST", "/api/send", Some(message)).await?;
    assert_eq!((sent.status, &sent.body["code"]), (503, &json!("engine_unavailable")), "{}", sent.body);
    let began = std::time::Instant::now();
    let body = json!({ "name": "waiting", "cli": "cat" });
    let (spawned, released) = tokio::join!(scene.broker.call("POST", "/api/spawn", Some(body.clone())), async {
        wait::until_ok("the name to be taken", SOON, || async {
            let metrics = scene.broker.call("GET", "/metrics", None).await?.body;
            let metrics = metrics.as_str().context("a page")?;
            ensure!(metrics.lines().any(|line| line == "relay_node_agents 1"), "{metrics}");
            anyhow::Ok(())
        })
        .await?;
        scene.broker.call("DELETE", "/api/spawned/waiting", None).await
    });
    assert_eq!(released?.status, 200);
    let spawned = spawned?;
    assert_eq!((spawned.status, &spawned.body["code"]), (503, &json!("worker_disappeared")), "{}", spawned.body);
    assert!(began.elapsed() < std::time::Duration::from_secs(15), "it waited for the engine");
    proxy.restore();
    scene.broker.wait_connected().await?;
    let again = scene.broker.call("POST", "/api/spawn", Some(body)).await?;
    assert_eq!(again.status, 200, "the name is free: {}", again.body);
    Ok(())
}

#[tokio::test]
async fn a_broker_takes_no_more_agents_than_it_may() -> Result<()> {
    let scene = Scene::with_args("capacity", &["--max-agents".to_owned(), "1".to_owned()]).await?;
    scene.spawn("first", "cooked", &[]).await?;
    let second = scene.broker.call("POST", "/api/spawn", Some(json!({ "name": "second", "cli": "cat" }))).await?;
    assert_eq!((second.status, &second.body["code"]), (409, &json!("capacity_exceeded")), "{}", second.body);
    assert_eq!(scene.broker.names().await?, ["first"]);
    Ok(())
}

#[tokio::test]
async fn metrics_show_lengths_of_queues_and_answers_that_a_program_does_not_read() -> Result<()> {
    let scene = Scene::new("queues").await?;
    // It asks for the position of the cursor again and again.
    let script = "stty raw -echo; while :; do printf '\\033[6n'; done";
    let body = json!({ "name": "asking", "cli": "sh", "args": ["-c", script] });
    assert_eq!(scene.broker.call("POST", "/api/spawn", Some(body)).await?.status, 200);
    wait::until_ok("dropped answers", SOON, || async {
        let metrics = scene.broker.call("GET", "/metrics", None).await?.body;
        let metrics = metrics.as_str().context("a page")?;
        let value = |name: &str| metrics.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok());
        let dropped = value("relay_node_queue_dropped_total{queue=\"terminal_answers\"}");
        ensure!(dropped.is_some_and(|count| count > 0.0), "{metrics}");
        for queue in ["commands", "injections", "invocations", "ledger", "link_requests", "mailboxes", "runner"] {
            ensure!(value(&format!("relay_node_queue_items{{queue=\"{queue}\"}}")).is_some(), "{queue}: {metrics}");
        }
        ensure!(value("relay_node_subscriber_bytes").is_some(), "{metrics}");
        anyhow::Ok(())
    })
    .await
}

#[tokio::test]
async fn an_agent_with_a_token_starts_without_the_engine_and_gets_its_messages_later() -> Result<()> {
    let (mut scene, proxy) = Scene::behind_proxy("unbound").await?;
    let token = scene.workspace.register_agent("worker").await?.token;
    scene.sender.post("/v1/channels", json!({ "name": "room" })).await?.success()?;
    proxy.cut();
    // The sender reaches the engine.
    scene.sender.dm("worker", "message-1").await?.success()?;
    let body = json!({ "agentToken": token, "channels": ["room"] });
    let agent = FakeAgent::new("cooked", scene.broker.folder().join("worker.log"), &[]);
    let spawned = scene.broker.spawn(&agent, "worker", body).await?;
    assert!(spawned.is_success(), "{}", spawned.body);
    assert_eq!(spawned.body["pre_registered"], true);
    assert!(spawned.body["warning"].as_str().is_some_and(|text| text.contains("bound")), "{}", spawned.body);
    assert_eq!(scene.broker.names().await?, ["worker"]);

    proxy.restore();
    scene.wait_for("worker", &agent, &numbered(1, 1), 1).await?;
    wait::until_ok("the channel's member", SOON, || async {
        let members = scene.workspace.get("/v1/channels/room/members").await?.success()?;
        ensure!(members.to_string().contains("worker"), "{members}");
        anyhow::Ok(())
    })
    .await?;
    scene.sender.post("/v1/channels/room/messages", json!({ "text": "message-2" })).await?.success()?;
    scene.wait_for("worker", &agent, &numbered(1, 2), 2).await?;

    scene.broker.kill_and_restart().await?;
    scene.sender.dm("worker", "message-3").await?.success()?;
    scene.wait_for("worker", &agent, &numbered(1, 3), 3).await
}

#[tokio::test]
async fn an_agent_that_ends_before_the_engine_is_back_stays_off_the_node() -> Result<()> {
    let (scene, proxy) = Scene::behind_proxy("ended-early").await?;
    let token = scene.workspace.register_agent("gone").await?.token;
    let wrong = scene.workspace.register_agent("other").await?.token;
    proxy.cut();
    for (name, token) in [("gone", token), ("wrong", wrong)] {
        let body = json!({ "name": name, "cli": "cat", "agentToken": token });
        assert_eq!(scene.broker.call("POST", "/api/spawn", Some(body)).await?.status, 200);
    }
    assert_eq!(scene.broker.call("DELETE", "/api/spawned/gone", None).await?.status, 200);

    proxy.restore();
    // A token of another name is noticed as soon as the engine can be asked.
    wait::until_ok("the refusal", SOON, || async {
        let errors = scene.broker.events("wrong", "worker_error").await?;
        ensure!(errors.iter().any(|error| error["code"] == "not_bound"), "{errors:?}");
        anyhow::Ok(())
    })
    .await?;
    assert!(floors(&scene.workspace).await?.is_empty());
    assert_eq!(scene.broker.names().await?, ["wrong"]);
    Ok(())
}
