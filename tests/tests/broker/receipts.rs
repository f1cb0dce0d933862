//! Reports of the broker to the engine about agents: read receipts, and events about messages and sessions for
//! watchers.

use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Result, ensure};
use relay_testkit::client::Api;
use relay_testkit::wait;
use serde_json::{Value, json};

use crate::harness::Harnesses;
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

/// Events about an agent's session as an observer reads them, oldest first.
async fn session_events(scene: &Scene, agent: &str) -> Result<Vec<(String, Value)>> {
    let events = scene.workspace.get(&format!("/v1/agents/{agent}/events?limit=100")).await?.success()?;
    let mut events = events.as_array().cloned().unwrap_or_default();
    events.reverse();
    ensure!(events.is_sorted_by_key(|event| event["sequence"].as_u64()), "{events:?}");
    let kind = |event: &Value| event["type"].as_str().unwrap_or_default().to_owned();
    events.retain(|event| !kind(event).starts_with("delivery."));
    Ok(events.into_iter().map(|event| (kind(&event), event["payload"].clone())).collect())
}

/// Waits until the last event of a session is this one, and returns all.
async fn wait_for_last(scene: &Scene, agent: &str, kind: &str, payload: Value) -> Result<Vec<(String, Value)>> {
    let expected = (kind.to_owned(), payload);
    wait::until_ok("the session event", SOON, || async {
        let events = session_events(scene, agent).await?;
        ensure!(events.last() == Some(&expected), "{events:?}");
        anyhow::Ok(events)
    })
    .await
}

/// It works until the file is there, rests, takes a message, and fails at the next line.
const WORKER: &str = r#"
stty -echo; while [ ! -e rest ]; do echo working; sleep 0.1; done
printf '> '; read -r line; read -r line; exit 3
"#;

#[tokio::test]
async fn watchers_hear_of_each_step_of_a_session_in_order() -> Result<()> {
    let harnesses = Harnesses::new("session").await?;
    let scene = &harnesses.scene;
    let pid = harnesses.spawn_script("working", "worker", WORKER).await?;
    let turn = |kind: &str, reason: &str| (format!("turn.{kind}"), json!({ "reason": reason }));
    let change = |activity: &str, previous: &str, reason: &str| json!({ "activity": activity, "previousActivity": previous, "reason": reason });
    wait_for_last(scene, "worker", "activity.changed", change("thinking", "starting", "output")).await?;
    std::fs::write(scene.broker.folder().join("rest"), "")?;
    wait_for_last(scene, "worker", "activity.changed", change("idle", "thinking", "prompt")).await?;
    post(scene, "worker").await?;
    wait_for_last(scene, "worker", "activity.changed", change("thinking", "idle", "message")).await?;
    scene.broker.call("POST", "/api/input/worker", Some(json!({ "data": "\r" }))).await?.success()?;
    let events = wait_for_last(scene, "worker", "session.failed", json!({ "code": 3, "signal": null })).await?;
    let changed = |activity, previous, reason| ("activity.changed".to_owned(), change(activity, previous, reason));
    let expected = [
        ("session.starting".to_owned(), json!({ "pid": pid, "restarts": 0 })),
        turn("started", "output"),
        changed("thinking", "starting", "output"),
        turn("settled", "prompt"),
        changed("idle", "thinking", "prompt"),
        turn("started", "message"),
        changed("thinking", "idle", "message"),
        ("session.failed".to_owned(), json!({ "code": 3, "signal": null })),
    ];
    assert_eq!(events, expected);
    Ok(())
}

#[tokio::test]
async fn watchers_hear_of_the_end_of_a_session_with_its_code_or_signal() -> Result<()> {
    let scene = Scene::new("ends").await?;
    let input = json!({ "data": "\r" });
    let ends = [
        ("clean", "exit 0", "session.released", json!({ "code": 0, "signal": null })),
        ("failing", "exit 3", "session.failed", json!({ "code": 3, "signal": null })),
        ("killed", "kill -9 $$", "session.failed", json!({ "code": null, "signal": "9" })),
        // It does not end by itself and is hung up.
        ("asking", "echo /exit; exec sleep 1000", "session.released", json!({ "code": null, "signal": "1" })),
        ("released", "exit 3", "session.released", json!({ "reason": "done" })),
    ];
    for (name, end, kind, payload) in ends {
        let script = format!("stty -echo; read -r line; {end}");
        let body = json!({ "name": name, "cli": "sh", "args": ["-c", script] });
        let pid = scene.broker.call("POST", "/api/spawn", Some(body)).await?.body["pid"].take();
        if name == "released" {
            let reason = json!({ "reason": "done" });
            scene.broker.call("DELETE", &format!("/api/spawned/{name}"), Some(reason)).await?.success()?;
        } else {
            scene.broker.call("POST", &format!("/api/input/{name}"), Some(input.clone())).await?.success()?;
        }
        let events = wait_for_last(&scene, name, kind, payload).await?;
        let starting = ("session.starting".to_owned(), json!({ "pid": pid, "restarts": 0 }));
        assert_eq!(events.first(), Some(&starting), "{name}");
        assert_eq!(events.iter().filter(|(kind, _)| kind.starts_with("session.")).count(), 2, "{events:?}");
    }
    Ok(())
}

#[tokio::test]
async fn watchers_hear_of_each_process_of_a_session_that_is_started_again() -> Result<()> {
    let scene = Scene::new("again").await?;
    let policy = json!({ "maxRestarts": 1, "cooldownMs": 50 });
    let script = "stty -echo; read -r line; exit 3";
    let body = json!({ "name": "failing", "cli": "sh", "args": ["-c", script], "restartPolicy": policy });
    let first = scene.broker.call("POST", "/api/spawn", Some(body)).await?.body["pid"].take();
    let input = json!({ "data": "\r" });
    scene.broker.call("POST", "/api/input/failing", Some(input.clone())).await?.success()?;
    let second = wait::until_ok("the next process", SOON, || async {
        let restarted = scene.broker.events("failing", "agent_restarted").await?;
        ensure!(restarted.len() == 1, "{restarted:?}");
        anyhow::Ok(restarted[0]["pid"].clone())
    })
    .await?;
    assert_ne!(first, second);
    wait_for_last(&scene, "failing", "session.starting", json!({ "pid": second, "restarts": 1 })).await?;
    scene.broker.call("POST", "/api/input/failing", Some(input)).await?.success()?;
    let failed = ("session.failed".to_owned(), json!({ "code": 3, "signal": null }));
    let expected = [
        ("session.starting".to_owned(), json!({ "pid": first, "restarts": 0 })),
        failed.clone(),
        ("session.starting".to_owned(), json!({ "pid": second, "restarts": 1 })),
        failed,
    ];
    wait::until_ok("the second end", SOON, || async {
        let mut events = session_events(&scene, "failing").await?;
        events.retain(|(kind, _)| kind.starts_with("session."));
        ensure!(events == expected, "{events:?}");
        anyhow::Ok(())
    })
    .await
}

#[tokio::test]
async fn watchers_hear_of_each_run_of_an_agent_without_a_terminal() -> Result<()> {
    let scene = Scene::new("runs").await?;
    let folder = tempfile::tempdir()?;
    let program = folder.path().join("claude");
    std::fs::write(&program, "#!/bin/sh\nwhile [ ! -e done ]; do sleep 0.05; done\n")?;
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
    let body = json!({ "name": "clerk", "cli": program, "transport": "headless", "cwd": folder.path() });
    scene.broker.call("POST", "/api/spawn", Some(body)).await?.success()?;
    wait_for_last(&scene, "clerk", "session.starting", json!({ "pid": null, "restarts": 0 })).await?;
    post(&scene, "clerk").await?;
    let change = |activity: &str, previous: &str, reason: &str| json!({ "activity": activity, "previousActivity": previous, "reason": reason });
    wait_for_last(&scene, "clerk", "activity.changed", change("thinking", "starting", "message")).await?;
    std::fs::write(folder.path().join("done"), "")?;
    let events = wait_for_last(&scene, "clerk", "activity.changed", change("idle", "thinking", "run_ended")).await?;
    let kinds: Vec<&str> = events.iter().map(|(kind, _)| kind.as_str()).collect();
    let turn = ["turn.started", "activity.changed", "turn.settled", "activity.changed"];
    assert_eq!(kinds, [&["session.starting"], &turn[..]].concat());
    scene.broker.call("DELETE", "/api/spawned/clerk", None).await?.success()?;
    wait_for_last(&scene, "clerk", "session.released", json!({ "reason": null })).await?;
    Ok(())
}
