//! Secrets: who gets them, and where they must not be.

mod planted;

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use relay_testkit::client::Api;
use relay_testkit::node::{BrokerSpec, NodeBroker};
use relay_testkit::{shared, wait};
use serde_json::json;

use crate::run_as::{UID, install, is_root};
use crate::scene::{SOON, Scene};

const PLANTED: &str = "planted-secret-9f2c";

#[tokio::test]
async fn secrets_stay_where_they_belong() -> Result<()> {
    let scene = Scene::new("secrets").await?;
    let environment = scene.broker.folder().join("environment");
    let script = format!("env > {0}.tmp; mv {0}.tmp {0}; read line; exit 3", environment.display());
    let config = json!({ "runtime": "pty", "command": "sh", "args": ["-c", script], "env": { "PLANTED": PLANTED } });
    let body = json!({ "name": "agent", "harnessConfig": config, "agentResultSchema": true });
    let spawned = scene.broker.call("POST", "/api/spawn", Some(body)).await?;
    assert_eq!(spawned.status, 200, "{}", spawned.body);
    let variables = wait::until_ok("the environment", SOON, || async { fs::read_to_string(&environment) }).await?;
    let value =
        |name: &str| variables.lines().find_map(|line| line.strip_prefix(&format!("{name}="))).map(str::to_owned);
    for name in ["RELAY_BROKER_API_KEY", "RELAY_NODE_TOKEN", "RELAY_BROKER_URL"] {
        assert_eq!(value(name), None, "{name} is given to agents");
    }
    assert!(!variables.contains(scene.broker.key()), "the key of the API is given to agents");
    let node_token = node_token(scene.broker.folder())?;
    assert!(!variables.contains(&node_token));

    // A crash, an error, and a message.
    scene.broker.call("POST", "/api/input/agent", Some(json!({ "data": "x\r" }))).await?;
    wait::until_ok("the end", SOON, || async {
        ensure!(!scene.broker.events("agent", "agent_exited").await?.is_empty(), "it runs");
        anyhow::Ok(())
    })
    .await?;
    let wrong = json!({ "name": "agent", "harnessConfig": { "command": "/no/such", "env": { "PLANTED": PLANTED } } });
    let refused = scene.broker.call("POST", "/api/spawn", Some(wrong)).await?;
    assert_eq!(refused.status, 400);
    let tokens = ["RELAY_AGENT_TOKEN", "AGENT_RELAY_ACK_TOKEN", "AGENT_RELAY_RESULT_TOKEN"];
    let mut secrets: Vec<String> = tokens.iter().filter_map(|name| value(name)).collect();
    assert_eq!(secrets.len(), 3);
    secrets.extend([PLANTED.to_owned(), scene.broker.key().to_owned(), node_token, scene.workspace.token().to_owned()]);
    let mut places =
        vec![("the log".to_owned(), scene.broker.log_tail(10_000)), ("an error".to_owned(), refused.body.to_string())];
    for path in [
        "/health",
        "/api/events/replay?sinceSeq=0",
        "/api/crash-insights",
        "/api/status",
        "/api/metrics",
        "/metrics",
        "/api/verification",
    ] {
        places.push((path.to_owned(), scene.broker.call("GET", path, None).await?.body.to_string()));
    }
    for (place, text) in &places {
        let found: Vec<&String> = secrets.iter().filter(|secret| text.contains(secret.as_str())).collect();
        assert!(found.is_empty(), "{place} shows {found:?}");
    }
    Ok(())
}

#[tokio::test]
async fn files_are_for_the_owner() -> Result<()> {
    let scene = Scene::new("files").await?;
    let agent = scene.spawn("agent", "cooked", &[]).await?;
    scene.sender.dm("agent", "message-1").await?.success()?;
    scene.wait_for("agent", &agent, &["message-1".to_owned()], 1).await?;
    let note = "printf 'KIND: continuity\\nACTION: save\\n\\nnote\\n'; exit 3";
    let body = json!({ "name": "writer", "cli": "sh", "args": ["-c", note] });
    assert_eq!(scene.broker.call("POST", "/api/spawn", Some(body)).await?.status, 200);
    let state = scene.broker.folder().join(".agentworkforce/relay");
    wait::until_ok("a crash and a note", SOON, || async {
        fs::metadata(state.join("crash-insights.json"))?;
        let notes = fs::read_dir(state.join("continuity"))?.count();
        ensure!(notes == 1, "{notes} notes");
        anyhow::Ok(())
    })
    .await?;
    let count = count_private_files(&state)?;
    assert!(count >= 6, "{count} files");
    Ok(())
}

/// Counts the files of a folder and of those in it, none of which may be open to other users.
fn count_private_files(folder: &Path) -> Result<usize> {
    let mode = |path: &Path| fs::symlink_metadata(path).map(|facts| facts.permissions().mode() & 0o777);
    assert_eq!(mode(folder)?, 0o700, "{}", folder.display());
    let mut count = 0;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            count += count_private_files(&path)?;
        } else if let Ok(mode) = mode(&path) {
            // A file that has disappeared was a temporary one.
            assert_eq!(mode, 0o600, "{}", path.display());
            count += 1;
        }
    }
    Ok(count)
}

#[tokio::test]
async fn agents_of_the_same_user_cannot_read_the_broker() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let engine = shared().await.any_gateway();
    let workspace = Api::create_workspace(engine, "unreadable").await?;
    let mut spec = BrokerSpec::new(engine, workspace.token(), "unreadable", folder.path())?;
    // Root reads everything, so the broker of root and its agents become another user.
    let programs = tempfile::tempdir()?;
    if is_root()? {
        fs::set_permissions(programs.path(), fs::Permissions::from_mode(0o755))?;
        install("agent-relay-broker", programs.path(), "agent-relay-broker")?;
        chown(folder.path(), Some(UID), Some(UID))?;
        spec.program = programs.path().join("start");
        let become_another = format!("setpriv --reuid {UID} --regid {UID} --clear-groups --pdeathsig KILL");
        let program = programs.path().join("agent-relay-broker");
        fs::write(&spec.program, format!("#!/bin/sh\nexec {become_another} {} \"$@\"\n", program.display()))?;
        fs::set_permissions(&spec.program, fs::Permissions::from_mode(0o755))?;
    }
    let broker = NodeBroker::start(&spec).await?;
    let script = "for pid in $$ \"$0\"; do for file in environ maps; do \
        cat /proc/$pid/$file > /dev/null && echo open || echo closed; done; done > facts.tmp; mv facts.tmp facts; cat";
    let body = json!({ "name": "reader", "cli": "sh", "args": ["-c", script, broker.pid().to_string()] });
    let spawned = broker.call("POST", "/api/spawn", Some(body)).await?;
    ensure!(spawned.status == 200, "{}", spawned.body);
    let facts = wait::until_ok("the facts", SOON, || async { fs::read_to_string(folder.path().join("facts")) }).await?;
    let facts: Vec<&str> = facts.lines().collect();
    assert_eq!(facts, ["open", "open", "closed", "closed"], "environment and memory of itself and of the broker");
    Ok(())
}

fn state_folder(folder: &Path) -> PathBuf {
    folder.join(".agentworkforce/relay")
}

fn node_token(folder: &Path) -> Result<String> {
    for entry in fs::read_dir(state_folder(folder))? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("node-token") {
            let content: serde_json::Value = serde_json::from_slice(&fs::read(entry.path())?)?;
            return content["token"].as_str().map(str::to_owned).context("no token");
        }
    }
    anyhow::bail!("no file with a node token")
}
