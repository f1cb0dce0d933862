//! Texts of 900 KiB through every door of the broker that takes a text: typed whole and once, or refused.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use futures::{SinkExt as _, StreamExt as _};
use relay_testkit::wait;
use serde_json::{Value, json};
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite::{Message, client::IntoClientRequest as _};

use crate::runner::Runner;
use crate::scene::{SOON, Scene};

const SIZE: usize = 900 << 10;

/// A text of this size whose parts all differ, so that a hole or a repetition shows.
fn large(mark: &str) -> String {
    let text: String = (0..SIZE / 8).map(|number| format!("{mark}{number:06}.")).collect();
    text[..SIZE].to_owned()
}

/// A program that writes down everything that is typed into it, and shows nothing.
async fn spawn_recorder(scene: &Scene, name: &str, fields: Value) -> Result<PathBuf> {
    let file = scene.broker.folder().join(format!("{name}.typed"));
    let script = "stty raw -echo; printf '$ '; exec cat > \"$0\"";
    let mut body = json!({ "name": name, "cli": "sh", "args": ["-c", script, file] });
    if let (Value::Object(body), Value::Object(fields)) = (&mut body, fields) {
        body.extend(fields);
    }
    let spawned = scene.broker.call("POST", "/api/spawn", Some(body)).await?;
    ensure!(spawned.status == 200, "{} {}", spawned.status, spawned.body);
    wait::until_ok("the prompt", SOON, || async {
        let path = format!("/api/spawned/{name}/snapshot");
        let screen = scene.broker.call("GET", &path, None).await?.body;
        ensure!(screen["screen"].as_str().is_some_and(|screen| screen.contains('$')), "{screen}");
        anyhow::Ok(())
    })
    .await?;
    Ok(file)
}

/// Waits until a file ends with this text, and returns its content.
async fn wait_for_end(file: &PathBuf, end: &str) -> Result<String> {
    wait::until_ok("the whole text", SOON * 2, || async {
        let typed = fs::read_to_string(file)?;
        ensure!(typed.ends_with(end), "{} bytes", typed.len());
        anyhow::Ok(typed)
    })
    .await
}

#[tokio::test]
async fn keys_of_900_kib_are_typed_whole_and_once() -> Result<()> {
    let scene = Scene::new("large-keys").await?;
    let before = super::memory(&scene).await?;
    let file = spawn_recorder(&scene, "target", json!({})).await?;
    let mut expected = String::new();

    let keys = large("a");
    let typed = scene.broker.call("POST", "/api/input/target", Some(json!({ "data": keys }))).await?;
    ensure!((typed.status, &typed.body["bytes_written"]) == (200, &json!(SIZE)), "{} {}", typed.status, typed.body);
    expected.push_str(&keys);

    let mut request = scene.broker.socket_url("/api/input/target/stream").into_client_request()?;
    request.headers_mut().insert("x-api-key", scene.broker.key().parse()?);
    let (mut stream, _) = connect_async(request).await?;
    stream.next().await.context("the stream is not ready")??;
    for mark in ["b", "c"] {
        let keys = large(mark);
        stream.send(Message::text(keys.clone())).await?;
        expected.push_str(&keys);
    }
    for _ in 0..2 {
        let frame = tokio::time::timeout(SOON, stream.next()).await?.context("no ack")??;
        let ack: Value = serde_json::from_str(frame.to_text()?)?;
        ensure!(ack["bytes_written"] == SIZE, "{ack}");
    }

    let mut runner = Runner::connect(&scene).await?;
    let keys = large("d");
    let answer = runner.ask("send_input", json!({ "name": "target", "data": keys })).await?;
    ensure!(answer["payload"]["result"]["bytes_written"] == SIZE, "{answer}");
    expected.push_str(&keys);

    let found = wait_for_end(&file, &keys[SIZE - 100..]).await?;
    // Not the texts themselves: they are long.
    assert!(found == expected, "{} bytes of {} were typed", found.len(), expected.len());
    let after = super::memory(&scene).await?;
    assert!(after < before + 100, "{before} MB have grown to {after} MB");
    Ok(())
}

#[tokio::test]
async fn a_task_of_900_kib_is_typed_whole_and_once() -> Result<()> {
    let scene = Scene::new("large-task").await?;
    let before = super::memory(&scene).await?;
    let task = large("t");
    let file = spawn_recorder(&scene, "worker", json!({ "task": task })).await?;
    let typed = wait_for_end(&file, "\r").await?;
    let (header, rest) = typed.split_at(typed.find("]: ").context("a header")? + 3);
    assert!(header.starts_with("Relay message from broker [init_"), "{header}");
    assert!(rest == format!("{task}\r"), "{} bytes of {SIZE} were typed", rest.len());

    // The same by a runner, whose frame may be that long.
    let mut runner = Runner::connect(&scene).await?;
    let file = scene.broker.folder().join("hosted.typed");
    let script = "stty raw -echo; printf '$ '; exec cat > \"$0\"";
    let agent = json!({ "name": "hosted", "cli": "sh", "args": ["-c", script, file] });
    let answer = runner.ask("spawn_agent", json!({ "agent": agent, "initial_task": task })).await?;
    ensure!(answer["type"] == "ok", "{answer}");
    let typed = wait_for_end(&file, "\r").await?;
    assert!(typed.ends_with(&format!("]: {task}\r")), "{} bytes of {SIZE} were typed", typed.len());
    let after = super::memory(&scene).await?;
    assert!(after < before + 100, "{before} MB have grown to {after} MB");
    Ok(())
}

#[tokio::test]
async fn a_message_of_900_kib_is_refused_and_nothing_of_it_is_typed() -> Result<()> {
    let scene = Scene::new("large-message").await?;
    scene.broker.wait_connected().await?;
    let before = super::memory(&scene).await?;
    let agent = scene.spawn("target", "raw", &[]).await?;
    let text = large("m");
    let mut runner = Runner::connect(&scene).await?;
    for key in ["text", "message", "body", "content"] {
        let body = json!({ "to": "target", key: text });
        let refused = scene.broker.call("POST", "/api/send", Some(body.clone())).await?;
        let found = (refused.status, &refused.body["code"], &refused.body["success"]);
        ensure!(found == (400, &json!("invalid_request"), &json!(false)), "{key}: {} {}", refused.status, refused.body);
        let refused = runner.ask("send_message", body).await?;
        ensure!(refused["payload"]["code"] == "invalid_request", "{key}: {refused}");
        ensure!(refused["payload"]["retryable"] == false, "{key}: {refused}");
    }
    let with_data = json!({ "to": "target", "text": "small", "data": { "large": text } });
    let refused = scene.broker.call("POST", "/api/send", Some(with_data)).await?;
    ensure!((400..500).contains(&refused.status) && refused.body["code"].is_string(), "{}", refused.body);
    scene.sender.dm("target", "behind it").await?.success()?;
    scene.wait_for("target", &agent, &["behind it".to_owned()], 1).await?;
    let after = super::memory(&scene).await?;
    assert!(after < before + 100, "{before} MB have grown to {after} MB");
    Ok(())
}
