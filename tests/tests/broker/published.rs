//! The published driver and the published Python client, unmodified, with our broker.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use relay_acceptance::clients;
use relay_testkit::client::Api;
use relay_testkit::{binaries, shared};
use tokio::process::Command;
use tokio::time::timeout;

/// Time for the whole script on a loaded machine.
const LIMIT: Duration = Duration::from_secs(150);

#[tokio::test]
async fn every_method_of_the_published_driver_works() -> Result<()> {
    let [first, second, ..] = &shared().await.gateways[..] else { bail!("two gateways are needed") };
    let workspace = Api::create_workspace(first, "driver").await?;
    let sender = workspace.register_agent("sender").await?;
    // Node looks for packages in the folders above a script.
    let package = clients::runner_package().await?;
    let scripts = tempfile::tempdir_in(&package)?;
    for name in ["driver.mjs", "driver_parts.mjs", "driver_surface.mjs"] {
        std::fs::copy(clients::scripts().join(name), scripts.path().join(name))?;
    }
    let folder = tempfile::tempdir()?;
    let binaries = binaries::directory()?;
    let programs = tempfile::tempdir()?;
    let mut node = Command::new("node");
    node.arg(scripts.path().join("driver.mjs"))
        .arg(binaries::find(&binaries, "agent-relay-broker")?)
        .arg(binaries::find(&binaries, "fake-agent")?)
        .arg(folder.path())
        .arg(folder.path().join("agent.log"))
        .env("SENDER_TOKEN", &sender.token)
        .env("SECOND_GATEWAY", second)
        .env("PATH", path_with_programs(programs.path())?);
    let text = succeeds(node, first, workspace.token(), folder.path()).await?;
    text.lines().filter(|line| line.starts_with("figures")).for_each(|line| println!("{line}"));
    Ok(())
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
    let path = path_with_programs(&programs)?;
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
    succeeds(python, gateway, workspace.token(), folder.path()).await.map(drop)
}

/// The path with programs `claude` and `opencode` in front, which take every message.
fn path_with_programs(programs: &Path) -> Result<String> {
    // Without a terminal they are started for each message.
    let script = "#!/bin/sh\nfor word; do case $word in -p|run) exit 0;; esac; done\nexec cat\n";
    for name in ["claude", "opencode"] {
        let program = programs.join(name);
        std::fs::write(&program, script)?;
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
    }
    Ok(format!("{}:{}", programs.display(), std::env::var("PATH")?))
}

/// Runs a script that prints `done` at its end, and returns what it has printed.
async fn succeeds(mut script: Command, gateway: &str, workspace_key: &str, home: &Path) -> Result<String> {
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
    Ok(text)
}
