//! The published driver, unmodified, with our broker.

use std::os::unix::fs::PermissionsExt as _;
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
    let claude = programs.path().join("claude");
    std::fs::write(&claude, "#!/bin/sh\nexit 0\n")?;
    std::fs::set_permissions(&claude, std::fs::Permissions::from_mode(0o755))?;
    let path = std::env::var("PATH")?;
    let mut node = Command::new("node");
    node.arg(&script)
        .arg(binaries::find(&binaries, "agent-relay-broker")?)
        .arg(binaries::find(&binaries, "fake-agent")?)
        .arg(folder.path())
        .arg(folder.path().join("agent.log"))
        .env("PATH", format!("{}:{path}", programs.path().display()))
        .env("RELAYCAST_BASE_URL", gateway)
        .env("RELAY_BASE_URL", gateway)
        .env("RELAY_WORKSPACE_KEY", workspace.token())
        .env("XDG_DATA_HOME", folder.path())
        .kill_on_drop(true);
    for proxy in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
        node.env_remove(proxy);
    }
    let output = timeout(LIMIT, node.output()).await.context("the script hangs")??;
    std::fs::remove_file(&script)?;
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success() && text.contains("done"), "{text}");
    Ok(())
}
