//! Secrets: who gets them, and where they must not be.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use relay_testkit::wait;
use serde_json::json;

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
async fn files_are_for_the_owner_and_the_broker_cannot_be_read() -> Result<()> {
    let scene = Scene::new("files").await?;
    scene.spawn("agent", "cooked", &[]).await?;
    let folder = scene.broker.folder().join(".agentworkforce/relay");
    assert_eq!(fs::metadata(&folder)?.permissions().mode() & 0o777, 0o700);
    let mut count = 0;
    for entry in fs::read_dir(&folder)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            assert_eq!(entry.metadata()?.permissions().mode() & 0o777, 0o600, "{:?}", entry.file_name());
            count += 1;
        }
    }
    assert!(count >= 4, "{count} files");
    let owner = fs::metadata(format!("/proc/{}/environ", scene.broker.pid()))?;
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&owner), 0, "a process that cannot be dumped belongs to root");
    Ok(())
}

fn node_token(folder: &Path) -> Result<String> {
    for entry in fs::read_dir(folder.join(".agentworkforce/relay"))? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("node-token") {
            let content: serde_json::Value = serde_json::from_slice(&fs::read(entry.path())?)?;
            return content["token"].as_str().map(str::to_owned).context("no token");
        }
    }
    anyhow::bail!("no file with a node token")
}
