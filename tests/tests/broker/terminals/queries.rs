//! Questions of programs to their terminal, which the broker answers.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::StreamExt as _;
use relay_testkit::wait;
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;

use crate::event_log::EventLog;
use crate::scene::{SOON, Scene};

/// Answers to the questions of the fake agent, which it asks behind its prompt: position, status, both attributes.
const ANSWERS: &str = "\x1b[1;3R\x1b[0n\x1b[?62;22c\x1b[>";

/// Types into an agent that has asked, and returns everything that came before.
async fn answers(scene: &Scene, name: &str, keys: &std::path::Path) -> Result<String> {
    let asked = || async {
        let text = fs::read_to_string(keys)?;
        ensure!(text.starts_with(ANSWERS) && text.ends_with('c'), "{text:?}");
        anyhow::Ok(())
    };
    wait::until_ok("all answers", SOON, asked).await?;
    // Whatever answers a second time has done it when a message has come and gone.
    scene.sender.dm(name, "message-1").await?.success()?;
    wait::until_ok("the ack", SOON, || async {
        let floor = scene.floor(name).await?;
        ensure!(floor == 1, "the floor is {floor}");
        anyhow::Ok(())
    })
    .await
    .with_context(|| scene.broker.log_tail(20))?;
    let text = fs::read_to_string(keys)?;
    let (before, message) =
        text.split_once("Relay message from ").with_context(|| format!("no message in {text:?}"))?;
    ensure!(!message.contains('\x1b'), "{message:?}");
    Ok(before.to_owned())
}

#[tokio::test]
async fn questions_of_a_program_are_answered_once_with_and_without_a_driver() -> Result<()> {
    let scene = Scene::new("queries").await?;
    for is_attached in [false, true] {
        let name = if is_attached { "watched" } else { "alone" };
        let keys = scene.broker.folder().join(format!("{name}.keys"));
        let file = keys.display().to_string();
        // A driver is there before the program asks.
        let more = ["--query", "--keys", &file, "--start-ms", if is_attached { "3000" } else { "0" }];
        scene.spawn(name, "raw", &more).await?;
        let mut driver = None;
        if is_attached {
            let events = EventLog::subscribe(&scene.broker, Duration::ZERO).await?;
            let path = format!("/api/input/{name}/stream");
            let mut request = scene.broker.socket_url(&path).into_client_request()?;
            request.headers_mut().insert("x-api-key", scene.broker.key().parse()?);
            let (mut input, _) = connect_async(request).await?;
            input.next().await.context("the stream is not ready")??;
            ensure!(fs::read_to_string(&keys).unwrap_or_default().is_empty(), "the program has asked before");
            driver = Some((events, input));
        }
        let found = answers(&scene, name, &keys).await?;
        let attributes = found.strip_prefix(ANSWERS).with_context(|| format!("{found:?}"))?;
        let secondary = attributes.strip_suffix('c').context("secondary attributes")?;
        assert!(secondary.bytes().all(|byte| byte.is_ascii_digit() || byte == b';'), "answered twice: {found:?}");
        if let Some((events, _input)) = driver {
            assert!(events.output_bytes() > 0, "the driver has seen the questions");
        }
    }
    Ok(())
}
