//! Agents without a terminal: a run for each message, and a session of an app server.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Context, Result, ensure};
use relay_testkit::receiver::{Receiver, Reply};
use relay_testkit::wait;
use serde_json::{Value, json};

use crate::scene::{SOON, Scene, is_running};

/// Notes its arguments, and fails, hangs or leaves a process in another session where the message says so.
const PROGRAM: &str = r#"#!/bin/sh
for text; do :; done
echo "$AGENT_RELAY_SPAWN_ID" > spawn-id
printf '%s\n' "$*" >> runs
echo "working on it"
case "$text" in *please-fail*) exit 3;; *please-hang*) echo $$ > hanging; sleep 600 & wait;;
    *please-leave*) setsid sh -c 'echo $$ > left; exec sleep 600' & while [ ! -s left ]; do sleep 0.01; done;; esac
"#;

async fn verdicts(scene: &Scene, name: &str, count: usize) -> Result<Vec<Value>> {
    let verdicts = wait::until_ok("the verdicts", SOON, || async {
        let verdicts = scene.broker.events(name, "delivery_verified").await?;
        ensure!(verdicts.len() == count, "{verdicts:?}");
        anyhow::Ok(verdicts)
    });
    verdicts.await.with_context(|| scene.broker.log_tail(30))
}

async fn floor(scene: &Scene, name: &str, expected: i64) -> Result<()> {
    wait::until_ok("the ack", SOON, || async {
        let floor = scene.floor(name).await?;
        ensure!(floor == expected, "the floor is {floor}");
        anyhow::Ok(())
    })
    .await
}

#[tokio::test]
async fn a_program_runs_once_for_each_message_and_its_status_is_the_proof() -> Result<()> {
    let scene = Scene::new("headless").await?;
    let folder = tempfile::tempdir()?;
    let program = folder.path().join("claude");
    fs::write(&program, PROGRAM)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    let body = json!({
        "name": "clerk", "cli": program, "args": ["--quiet"], "model": "opus", "transport": "headless",
        "task": "begin", "cwd": folder.path(),
    });
    let spawned = scene.broker.call("POST", "/api/spawn", Some(body)).await?;
    assert_eq!((spawned.status, &spawned.body["runtime"]), (200, &json!("headless")), "{}", spawned.body);
    assert_eq!(spawned.body["pid"], Value::Null);
    verdicts(&scene, "clerk", 1).await?;
    for body in ["one", "two", "please-fail", "three"] {
        scene.sender.dm("clerk", body).await?.success()?;
    }
    let verdicts = verdicts(&scene, "clerk", 4).await?;
    let last = verdicts.last().context("a verdict")?;
    assert_eq!((&last["verification"], &last["level"]), (&json!("api"), &json!("L2")), "{last}");
    floor(&scene, "clerk", 4).await?;
    let runs = fs::read_to_string(folder.path().join("runs"))?;
    let words: Vec<&str> = runs.lines().filter_map(|line| line.rsplit(' ').next()).collect();
    assert_eq!(words, ["begin", "one", "two", "please-fail", "three"], "{runs}");
    assert!(runs.lines().all(|line| line.starts_with("-p --model opus --quiet Relay message from ")), "{runs}");
    let letters = scene.broker.call("GET", "/api/dead-letters", None).await?.body;
    assert_eq!(letters["dead_letters"][0]["body"], "please-fail", "{letters}");

    for (method, path) in [("POST", "/api/input/clerk"), ("GET", "/api/spawned/clerk/snapshot")] {
        let body = (method == "POST").then(|| json!({ "data": "x" }));
        let refused = scene.broker.call(method, path, body).await?;
        assert_eq!((refused.status, &refused.body["code"]), (409, &json!("unsupported_runtime")), "{}", refused.body);
    }
    let manual = json!({ "mode": "manual_flush" });
    scene.broker.call("PUT", "/api/spawned/clerk/delivery-mode", Some(manual)).await?;
    scene.sender.dm("clerk", "please-hang").await?.success()?;
    wait::until_ok("a held message", SOON, || async {
        let pending = scene.broker.call("GET", "/api/spawned/clerk/pending", None).await?.body;
        ensure!(pending["pending"][0]["body"] == "please-hang", "{pending}");
        anyhow::Ok(())
    })
    .await?;
    let flushed = scene.broker.call("POST", "/api/spawned/clerk/flush", None).await?;
    assert_eq!(flushed.body["flushed"], 1, "{}", flushed.body);
    let hanging = wait::until_ok("the program", SOON, || async {
        fs::read_to_string(folder.path().join("hanging"))?.trim().parse::<u32>().context("a pid")
    });
    let hanging = hanging.await?;
    scene.broker.call("DELETE", "/api/spawned/clerk", None).await?;
    // It was killed, which takes the kernel a moment.
    wait::until("the program to end with its agent", SOON, || async { !is_running(hanging) }).await;
    assert!(scene.broker.names().await?.is_empty());
    assert_eq!(scene.broker.events("clerk", "agent_released").await?.len(), 1);

    let unknown = json!({ "name": "x", "cli": "cat", "transport": "headless" });
    let refused = scene.broker.call("POST", "/api/spawn", Some(unknown)).await?;
    assert_eq!((refused.status, &refused.body["code"]), (400, &json!("invalid_request")), "{}", refused.body);
    Ok(())
}

#[tokio::test]
async fn a_run_leaves_no_process_and_fails_with_a_reason_when_it_takes_too_long_or_cannot_begin() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (program, table) = (folder.path().join("clerk-cli"), folder.path().join("harnesses.toml"));
    fs::write(&program, PROGRAM)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    fs::write(&table, "[clerk]\nmatch = [\"clerk-cli\"]\nheadless_args = [\"-p\"]\nrun_timeout_s = 5\n")?;
    let args = ["--harnesses".to_owned(), table.display().to_string()];
    let scene = Scene::with_args("limits", &args).await?;
    let body = json!({ "name": "clerk", "cli": program, "transport": "headless", "cwd": folder.path() });
    let spawned = scene.broker.call("POST", "/api/spawn", Some(body)).await?;
    assert_eq!(spawned.status, 200, "{}", spawned.body);

    scene.sender.dm("clerk", "please-leave").await?.success()?;
    verdicts(&scene, "clerk", 1).await?;
    let left = fs::read_to_string(folder.path().join("left"))?.trim().parse::<u32>()?;
    assert!(!is_running(left), "a process of the run is left");

    // Linux takes at most 128 KiB in one argument.
    scene.sender.dm("clerk", &"long".repeat(40 << 10)).await?.success()?;
    scene.sender.dm("clerk", "please-hang").await?.success()?;
    scene.sender.dm("clerk", "after").await?.success()?;
    verdicts(&scene, "clerk", 2).await?;
    let failed = scene.broker.events("clerk", "delivery_failed").await?;
    let reasons: Vec<&Value> = failed.iter().map(|event| &event["reason"]).collect();
    assert_eq!(reasons, ["message_too_long", "run_timeout"]);
    let hanging = fs::read_to_string(folder.path().join("hanging"))?.trim().parse::<u32>()?;
    assert!(!is_running(hanging), "the program outlives its time");
    floor(&scene, "clerk", 4).await
}

#[tokio::test]
async fn a_session_of_an_app_server_gets_messages_over_http() -> Result<()> {
    let scene = Scene::new("sessions").await?;
    let server = Receiver::start(|_, request| {
        let is_refused = String::from_utf8_lossy(&request.body).contains("please-fail");
        Reply::Status(if is_refused { 500 } else { 204 })
    })
    .await?;
    let config = json!({
        "runtime": "headless", "driver": "app_server", "protocol": "opencode", "endpoint": server.url(""),
        "sessionId": "ses_1", "auth": { "type": "bearer", "token": "t0" }, "release": "abort",
        "host": { "ownership": "attached", "pid": 1 },
    });
    let body = json!({ "name": "remote", "transport": "headless", "harnessConfig": config });
    let spawned = scene.broker.call("POST", "/api/spawn", Some(body)).await?;
    assert_eq!((spawned.status, &spawned.body["sessionId"]), (200, &json!("ses_1")), "{}", spawned.body);
    for body in ["one", "please-fail", "two"] {
        scene.sender.dm("remote", body).await?.success()?;
    }
    verdicts(&scene, "remote", 2).await?;
    floor(&scene, "remote", 3).await?;
    let received = server.received();
    assert_eq!(received.len(), 3);
    for (request, body) in received.iter().zip(["one", "please-fail", "two"]) {
        assert_eq!(
            (request.path.as_str(), request.header("authorization")),
            ("/session/ses_1/prompt_async", "Bearer t0")
        );
        let text = request.json()["parts"][0]["text"].as_str().context("a text")?.to_owned();
        assert!(text.starts_with("Relay message from sender [") && text.ends_with(body), "{text}");
    }
    scene.broker.call("DELETE", "/api/spawned/remote", None).await?;
    assert_eq!(server.received().last().context("a request")?.path, "/session/ses_1/abort");
    Ok(())
}
