//! Questions of a program, whose answer must not be the Enter of a message.

use std::{fs, os::unix::fs::PermissionsExt as _};

use anyhow::{Context as _, Result, ensure};
use relay_testkit::{shared, wait};
use serde_json::json;

use crate::scene::{SOON, Scene};

const HARNESSES: &str = r#"
[asking]
match = ["asking"]
prompt = [">"]
gates = [{ name = "folder-trust", screen = ["Do you trust this folder?"], keys = "y\r" }]
ready = { prompt = [">"] }
"#;

/// Asks only after its first prompt, when the file is there. Then it notes its lines.
const ASKING: &str = r#"#!/bin/sh
printf '> '
while [ ! -e "$1" ]; do sleep 0.05; done
printf '\r\nDo you trust this folder? '
read -r answer
echo "answer $answer" >> "$2"
printf '\033[2J\033[H> '
while read -r line; do echo "$line" >> "$2"; printf '> '; done
"#;

#[tokio::test]
async fn a_question_behind_the_first_prompt_does_not_get_the_enter_of_a_message() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (table, program) = (folder.path().join("harnesses.toml"), folder.path().join("asking"));
    let (ask, lines) = (folder.path().join("ask"), folder.path().join("lines"));
    fs::write(&table, HARNESSES)?;
    fs::write(&program, ASKING)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    let args = ["--harnesses".to_owned(), table.display().to_string()];
    let scene = Scene::in_folder("asking", shared().await.any_gateway(), &args, tempfile::tempdir()?).await?;
    let body = json!({ "name": "careful", "cli": program, "args": [ask, lines] });
    assert_eq!(scene.broker.call("POST", "/api/spawn", Some(body)).await?.status, 200);
    wait::until_ok("the prompt", SOON, || async {
        ensure!(scene.broker.events("careful", "worker_ready").await?.len() == 1);
        anyhow::Ok(())
    })
    .await?;
    fs::write(&ask, "")?;
    wait::until_ok("the question", SOON, || async {
        let screen = scene.broker.call("GET", "/api/spawned/careful/snapshot?format=plain", None).await?.body;
        ensure!(screen.to_string().contains("Do you trust"), "{screen}");
        anyhow::Ok(())
    })
    .await?;

    scene.sender.dm("careful", "Do you trust this folder?").await?.success()?;
    wait::until_ok("the report", SOON, || async {
        let errors = scene.broker.events("careful", "worker_error").await?;
        ensure!(errors.iter().any(|error| error["code"] == "gate_open"), "{errors:?}");
        anyhow::Ok(())
    })
    .await
    .with_context(|| fs::read_to_string(&lines).unwrap_or_default())?;
    assert!(scene.broker.events("careful", "delivery_injected").await?.is_empty());
    assert!(!lines.exists(), "the message has answered the question");

    scene.broker.call("POST", "/api/input/careful", Some(json!({ "data": "n\r" }))).await?;
    // The first message quotes the question, which holds no other message once it has its verdict.
    scene.sender.dm("careful", "go on").await?.success()?;
    wait::until_ok("both messages", SOON, || async {
        let lines = fs::read_to_string(&lines)?;
        let found: Vec<&str> = lines.lines().map(|line| line.rsplit("]: ").next().unwrap_or(line)).collect();
        ensure!(found == ["answer n", "Do you trust this folder?", "go on"], "{lines}");
        anyhow::Ok(())
    })
    .await
}
