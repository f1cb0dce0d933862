//! The published driver and the published Python client, unmodified, with our broker.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use relay_acceptance::clients;
use relay_testkit::client::Api;
use relay_testkit::{binaries, shared};
use tokio::process::Command;
use tokio::time::timeout;

/// Time for the whole script on a loaded machine.
const LIMIT: Duration = Duration::from_secs(150);

#[tokio::test]
async fn every_method_of_the_published_driver_works() -> Result<()> {
    let gateway = shared().await.any_gateway();
    let workspace = Api::create_workspace(gateway, "driver").await?;
    // The package has the published driver beside it.
    let package = clients::runner_package().await?;
    let script = package.join(format!("driver-{}.mjs", std::process::id()));
    std::fs::copy(clients::scripts().join("driver.mjs"), &script)?;
    let folder = tempfile::tempdir()?;
    let binaries = binaries::directory()?;
    let programs = tempfile::tempdir()?;
    let mut node = Command::new("node");
    node.arg(&script)
        .arg(binaries::find(&binaries, "agent-relay-broker")?)
        .arg(binaries::find(&binaries, "fake-agent")?)
        .arg(folder.path())
        .arg(folder.path().join("agent.log"))
        .env("PATH", path_with_claude(programs.path())?);
    let outcome = succeeds(node, gateway, workspace.token(), folder.path()).await;
    std::fs::remove_file(&script)?;
    outcome
}

#[tokio::test]
async fn every_method_of_the_published_python_client_works() -> Result<()> {
    let gateway = shared().await.any_gateway();
    let workspace = Api::create_workspace(gateway, "python-driver").await?;
    let packages = clients::python_broker_packages().await?;
    let folder = tempfile::tempdir()?;
    let binaries = binaries::directory()?;
    let programs = folder.path().join("programs");
    std::fs::create_dir(&programs)?;
    let path = path_with_claude(&programs)?;
    let mut python = Command::new("python3");
    python
        .arg(clients::scripts().join("broker_client.py"))
        .arg(binaries::find(&binaries, "agent-relay-broker")?)
        .arg(binaries::find(&binaries, "fake-agent")?)
        .arg(folder.path())
        .arg(folder.path().join("agent.log"))
        .env("PYTHONPATH", packages)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("PATH", path);
    succeeds(python, gateway, workspace.token(), folder.path()).await
}

/// The path with a program `claude` in front, which takes every message.
fn path_with_claude(programs: &Path) -> Result<String> {
    let claude = programs.join("claude");
    std::fs::write(&claude, "#!/bin/sh\nexit 0\n")?;
    std::fs::set_permissions(&claude, std::fs::Permissions::from_mode(0o755))?;
    Ok(format!("{}:{}", programs.display(), std::env::var("PATH")?))
}

/// Runs a script that prints `done` at its end.
async fn succeeds(mut script: Command, gateway: &str, workspace_key: &str, home: &Path) -> Result<()> {
    script
        .env("RELAYCAST_BASE_URL", gateway)
        .env("RELAY_BASE_URL", gateway)
        .env("RELAY_WORKSPACE_KEY", workspace_key)
        .env("XDG_DATA_HOME", home)
        .kill_on_drop(true);
    for proxy in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
        script.env_remove(proxy);
    }
    let output = timeout(LIMIT, script.output()).await.context("the script hangs")??;
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success() && text.contains("done"), "{text}");
    Ok(())
}
