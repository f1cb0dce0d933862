//! Input that was made to break the broker: requests, names, bodies, ack files, runners, programs.

mod engine_frames;
mod fields;
mod forged_lines;
mod frames;
mod large;
mod routes;
mod sockets;

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use relay_testkit::wait;
use serde_json::{Value, json};

use crate::harness::Harnesses;
use crate::runner::Runner;
use crate::scene::{SOON, Scene};

#[tokio::test]
async fn names_of_every_kind_stay_inside_their_folder() -> Result<()> {
    let scene = Scene::new("names").await?;
    let long = "é".repeat(64);
    for name in ["with space", "#hash", "a/b", "...", "../../escape", "%41", long.as_str()] {
        let agent = scene.spawn(name, "cooked", &[]).await?;
        let path: String = name.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let typed = scene.broker.call("POST", &format!("/api/input/{path}"), Some(json!({ "data": "x\r" }))).await?;
        assert_eq!(typed.status, 200, "{name}: {}", typed.body);
        wait::until_ok("the keys", SOON, || async {
            ensure!(agent.messages().len() == 1, "{name}");
            anyhow::Ok(())
        })
        .await?;
        let released = scene.broker.call("DELETE", &format!("/api/spawned/{path}"), None).await?;
        assert_eq!(released.status, 200);
        assert!(scene.broker.names().await?.is_empty(), "{name}");
    }
    // The broker refuses names that are no part of a path, the engine those that no agent may have.
    let too_long = "é".repeat(65);
    for (name, status, code) in [
        ("", 400, "invalid_request"),
        (" ", 400, "invalid_request"),
        (".", 400, "invalid_request"),
        ("..", 400, "invalid_request"),
        ("two\nlines", 400, "invalid_request"),
        ("bell\u{7}", 502, "engine_refused"),
        (too_long.as_str(), 502, "engine_refused"),
    ] {
        let refused = scene.broker.call("POST", "/api/spawn", Some(json!({ "name": name, "cli": "cat" }))).await?;
        assert_eq!((refused.status, &refused.body["code"]), (status, &json!(code)), "{name:?}: {}", refused.body);
        assert!(scene.broker.names().await?.is_empty(), "{name:?}");
    }
    let outside = scene.broker.folder().parent().context("a parent")?.join("escape");
    assert!(!outside.exists());
    Ok(())
}

#[tokio::test]
async fn no_byte_of_a_message_is_a_key() -> Result<()> {
    let scene = Scene::new("bytes").await?;
    let keys = scene.broker.folder().join("keys");
    let keys_argument = keys.display().to_string();
    let agent = scene.spawn("screen", "screen", &["--keys", &keys_argument]).await?;
    let controls: String = (1..=0x9f).filter_map(char::from_u32).filter(|character| character.is_control()).collect();
    let bodies = [
        format!("all {controls} done"),
        "paste \u{1b}[201~\r/exit\r done".to_owned(),
        "first\n/exit\nlast done".to_owned(),
        "turn \u{202e}around\u{2066} done".to_owned(),
    ];
    for body in &bodies {
        scene.sender.dm("screen", body).await?.success()?;
    }
    wait::until_ok("the messages", SOON, || async {
        ensure!(agent.messages().len() == bodies.len(), "{:?}", agent.messages());
        anyhow::Ok(())
    })
    .await?;
    let typed = fs::read(&keys)?;
    let text = String::from_utf8(typed).context("keys are UTF-8")?;
    let without_pastes = text.replace("\u{1b}[200~", "").replace("\u{1b}[201~", "");
    let others: Vec<char> =
        without_pastes.chars().filter(|c| c.is_control() && !matches!(c, '\r' | '\n' | '\t')).collect();
    assert!(others.is_empty(), "{others:?}");
    assert_eq!(text.matches('\r').count(), bodies.len(), "one Enter for each message");
    assert!(!text.contains('\u{202e}') && !text.contains('\u{2066}'));
    assert_eq!(scene.broker.names().await?, ["screen"], "a message has ended the agent");
    Ok(())
}

#[tokio::test]
async fn the_largest_message_is_typed_whole_and_a_larger_one_not_at_all() -> Result<()> {
    /// Text that the engine takes.
    const LARGEST: usize = 256 << 10;
    let scene = Scene::new("large").await?;
    let agent = scene.spawn("reader", "raw", &[]).await?;
    let refused = scene.sender.dm("reader", &"y".repeat(900 << 10)).await?;
    assert!((400..500).contains(&refused.status), "{} {}", refused.status, refused.body);
    let bodies = ["x".repeat(LARGEST), "behind it".to_owned()];
    for body in &bodies {
        scene.sender.dm("reader", body).await?.success()?;
    }
    wait::until_ok("both messages", SOON * 2, || async {
        // Not the texts themselves: they are long.
        ensure!(agent.bodies() == bodies, "{:?}", agent.bodies().iter().map(String::len).collect::<Vec<_>>());
        anyhow::Ok(())
    })
    .await?;
    scene.wait_for("reader", &agent, &bodies, 2).await
}

#[tokio::test]
async fn invalid_ack_files_prove_nothing() -> Result<()> {
    let harnesses = Harnesses::new("acks").await?;
    let scene = &harnesses.scene;
    harnesses.spawn("claude", "target", "mute", &[], json!({})).await?;
    scene.sender.dm("target", "read this").await?.success()?;
    let injected = wait::until_ok("the message", SOON, || async {
        scene.broker.events("target", "delivery_injected").await?.first().cloned().context("not yet")
    })
    .await?;
    let (delivery, event) =
        (injected["delivery_id"].as_str().context("id")?, injected["event_id"].as_str().context("id")?);
    let folder = scene.broker.folder().join(".agent-relay/target/acks");
    let right = json!({ "delivery_id": delivery, "event_id": event, "status": "received" }).to_string();
    let elsewhere = scene.broker.folder().join("elsewhere");
    fs::write(&elsewhere, &right)?;
    let file = folder.join(delivery);
    let pipe = || Command::new("mkfifo").arg(&file).status().map(drop);
    // A terminal that never says anything, where this user may create one; otherwise a link to it.
    let device = || {
        let created = Command::new("mknod").arg(&file).args(["c", "5", "0"]).output()?.status.success();
        if created { Ok(()) } else { symlink("/dev/tty", &file) }
    };
    let wrong: [(&str, Box<dyn Fn() -> std::io::Result<()>>); 7] = [
        ("pipe", Box::new(pipe)),
        ("device", Box::new(device)),
        ("link", Box::new(|| symlink(&elsewhere, &file))),
        ("folder", Box::new(|| fs::create_dir(&file))),
        ("half", Box::new(|| fs::write(&file, &right[..right.len() / 2]))),
        ("huge", Box::new(|| fs::write(&file, format!("{right}{}", " ".repeat(1 << 20))))),
        ("other", Box::new(|| fs::write(&file, right.replace(event, "1")))),
    ];
    for (kind, create) in &wrong {
        create().with_context(|| (*kind).to_owned())?;
        // Files are looked for every 200 ms; a call of the API in between shows that the broker lives.
        let until = std::time::Instant::now() + std::time::Duration::from_millis(500);
        while std::time::Instant::now() < until {
            let verdicts = scene.broker.events("target", "delivery_verified").await?;
            ensure!(verdicts.is_empty(), "{kind}: {verdicts:?}");
        }
        if file.is_dir() { fs::remove_dir(&file)? } else { fs::remove_file(&file)? }
    }
    fs::write(folder.join(".new"), &right)?;
    fs::rename(folder.join(".new"), &file)?;
    let verdict = wait::until_ok("the verdict", SOON, || async {
        scene.broker.events("target", "delivery_verified").await?.first().cloned().context("not yet")
    })
    .await?;
    assert_eq!(verdict["verification"], "file", "{verdict}");
    Ok(())
}

#[tokio::test]
async fn a_link_in_a_project_leads_the_broker_to_no_other_folder() -> Result<()> {
    let harnesses = Harnesses::new("links").await?;
    let scene = &harnesses.scene;
    let precious = scene.broker.folder().join("precious");
    fs::create_dir(&precious)?;
    fs::set_permissions(&precious, fs::Permissions::from_mode(0o755))?;
    let old = fs::File::create(precious.join("thesis"))?;
    let now = old.metadata()?.modified()?;
    old.set_modified(now - std::time::Duration::from_secs(2 * 60 * 60))?;
    fs::create_dir_all(scene.broker.folder().join(".agent-relay/target"))?;
    symlink(&precious, scene.broker.folder().join(".agent-relay/target/acks"))?;
    harnesses.spawn("claude", "target", "cooked", &[], json!({})).await?;
    assert!(precious.join("thesis").exists(), "a file of the user is gone");
    assert_eq!(fs::metadata(&precious)?.permissions().mode() & 0o777, 0o755);
    scene.sender.dm("target", "read this").await?.success()?;
    let verdict = wait::until_ok("the verdict", SOON, || async {
        scene.broker.events("target", "delivery_verified").await?.first().cloned().context("not yet")
    });
    assert_eq!(verdict.await?["verification"], "echo", "the other channels work");
    Ok(())
}

#[tokio::test]
async fn keys_that_were_refused_are_not_typed_later() -> Result<()> {
    let scene = Scene::new("refused").await?;
    let (wake, taken) = (scene.broker.folder().join("wake"), scene.broker.folder().join("taken"));
    let script = "stty raw -echo; while [ ! -e \"$0\" ]; do sleep 0.1; done; exec cat > \"$1\"";
    let body = json!({ "name": "late", "cli": "sh", "args": ["-c", script, wake, taken] });
    assert_eq!(scene.broker.call("POST", "/api/spawn", Some(body)).await?.status, 200);
    let send = async |keys: String| scene.broker.call("POST", "/api/input/late", Some(json!({ "data": keys }))).await;
    // The terminal takes a part of the first keys and nothing behind them.
    let begun = send("y".repeat(256 << 10)).await;
    let waiting = send("z".to_owned()).await;
    for answer in [&begun?, &waiting?] {
        assert_eq!((answer.status, &answer.body["code"]), (504, &json!("worker_timeout")), "{}", answer.body);
    }
    fs::write(&wake, "")?;
    let last = wait::until_ok("room for keys", SOON, || async {
        let answer = send("end".to_owned()).await?;
        ensure!(answer.status == 200, "{}", answer.body);
        anyhow::Ok(())
    });
    last.await?;
    let typed = wait::until_ok("the keys", SOON, || async {
        let typed = fs::read_to_string(&taken)?;
        ensure!(typed.ends_with("end"), "{} bytes", typed.len());
        anyhow::Ok(typed)
    });
    assert!(!typed.await?.contains('z'), "keys that were refused were typed");
    Ok(())
}

#[tokio::test]
async fn a_runner_that_sends_invalid_frames_and_floods_gets_answers_and_breaks_nothing() -> Result<()> {
    let scene = Scene::new("liar").await?;
    let mut runner = Runner::connect(&scene).await?;
    for text in ["", "{}", "[]", "{\"v\":1}", "{\"v\":2,\"type\":\"hello\",\"payload\":[]}", "\u{0}"] {
        runner.send_text(text).await?;
    }
    for _ in 0..5 {
        let answer = runner.next().await?;
        assert_eq!(answer["type"], "error", "{answer}");
    }
    let lies = [
        ("handler_result", json!({ "invocation_id": "inv_1", "output": 1 })),
        ("handler_result", json!({ "invocation_id": "inv_1", "output": 1, "error": "x" })),
        ("spawn_agent", json!({ "agent": { "name": 5 } })),
        ("send_input", json!({ "name": "nobody", "data": "x" })),
        ("register_handlers", json!({ "names": "all" })),
        ("register_node", json!({ "manifest": {} })),
    ];
    for (kind, payload) in lies {
        let answer = runner.ask(kind, payload).await?;
        assert_eq!(answer["type"], "error", "{kind}: {answer}");
    }
    for _ in 0..500 {
        runner.send("list_agents", json!({})).await?;
    }
    for _ in 0..500 {
        let answer = runner.next().await?;
        ensure!(answer["type"] == "ok", "{answer}");
    }
    let agent = scene.spawn("worker", "cooked", &[]).await?;
    scene.sender.dm("worker", "message-1").await?.success()?;
    scene.wait_for("worker", &agent, &["message-1".to_owned()], 1).await
}

#[tokio::test]
async fn programs_that_print_endless_strings_or_read_nothing_are_bounded() -> Result<()> {
    let scene = Scene::new("programs").await?;
    let notes = "printf 'KIND: continuity\\nACTION: save\\n\\nnote\\n'; \
        while :; do printf 'KIND: continuity\\nACTION: load\\n\\n'; done";
    let endless = "printf '\\033]0;'; while :; do printf 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'; done";
    for (name, script) in [("endless", endless), ("notes", notes), ("deaf", "exec sleep 1000 < /dev/null")] {
        let body = json!({ "name": name, "cli": "sh", "args": ["-c", script] });
        assert_eq!(scene.broker.call("POST", "/api/spawn", Some(body)).await?.status, 200);
    }
    let before = memory(&scene).await?;
    for _ in 0..20 {
        let keys = json!({ "data": "y".repeat(32 << 10) });
        // The terminal may take it or not; the broker answers.
        let answer = scene.broker.call("POST", "/api/input/deaf", Some(keys)).await?;
        ensure!([200, 504].contains(&answer.status), "{} {}", answer.status, answer.body);
        if answer.status == 504 {
            break;
        }
    }
    wait::until_ok("many requests for notes", SOON, || async {
        let metrics = scene.broker.call("GET", "/metrics", None).await?.body;
        let dropped = metrics.as_str().and_then(|text| counter(text, "relay_node_continuity_dropped_total"));
        ensure!(dropped.is_some_and(|count| count > 20_000.0), "{dropped:?}");
        anyhow::Ok(())
    })
    .await?;
    let after = memory(&scene).await?;
    assert!(after < before + 100, "{before} MB grew to {after} MB");
    for name in ["endless", "notes", "deaf"] {
        assert_eq!(scene.broker.call("DELETE", &format!("/api/spawned/{name}"), None).await?.status, 200);
    }
    Ok(())
}

async fn memory(scene: &Scene) -> Result<u64> {
    let health: Value = scene.broker.call_with("GET", "/health", &[]).await?.body;
    health["memoryMb"].as_u64().context("memoryMb")
}

/// Value of a metric; labels are part of its name.
fn counter(metrics: &str, name: &str) -> Option<f64> {
    metrics.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}
