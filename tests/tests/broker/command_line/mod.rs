//! The published command line, unmodified, with our broker.

mod agents;
mod fleet;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use relay_acceptance::clients::{self, BrokerRelease};
use relay_testkit::client::Api;
use relay_testkit::{binaries, shared, wait};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;
use tokio::time::timeout;

use crate::scene::{SOON, is_running};

/// Time for one command on a loaded machine.
const LIMIT: Duration = Duration::from_secs(90);

/// Process of `local up` that holds a broker in the background. It stays when its broker has ended.
struct Holder(String);

impl Holder {
    /// Finds the process that started the broker with this process ID.
    fn of_broker(pid: u32) -> Result<Self> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).context("no parent")?.trim();
        ensure!(parent != "1", "the broker has no parent");
        Ok(Self(parent.to_owned()))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = std::process::Command::new("kill").arg(&self.0).status();
    }
}

/// A project directory in which commands are run, at the first gateway.
pub(crate) struct CommandLine {
    pub(crate) workspace: Api,
    /// Agent that uses the second gateway.
    pub(crate) sender: Api,
    pub(crate) gateway: String,
    /// Folder with the packages.
    pub(crate) packages: PathBuf,
    broker: PathBuf,
    pub(crate) folder: TempDir,
}

impl CommandLine {
    /// Runs the commands with our broker.
    pub(crate) async fn new(name: &str) -> Result<Self> {
        Self::with_broker(name, binaries::find(&binaries::directory()?, "agent-relay-broker")?).await
    }

    /// Runs the commands with the broker that was published with them.
    pub(crate) async fn with_published_broker(name: &str) -> Result<Self> {
        let broker = clients::command_line().await?.join(BrokerRelease::V9.program());
        Self::with_broker(name, broker).await
    }

    async fn with_broker(name: &str, broker: PathBuf) -> Result<Self> {
        let gateways = &shared().await.gateways;
        let workspace = Api::create_workspace(&gateways[0], name).await?;
        let sender = workspace.as_agent(&workspace.register_agent("sender").await?).at(&gateways[1]);
        let (packages, folder) = (clients::command_line().await?, tempfile::tempdir()?);
        Ok(Self { workspace, sender, gateway: gateways[0].clone(), packages, broker, folder })
    }

    pub(crate) fn program(&self) -> PathBuf {
        self.packages.join("node_modules/agent-relay/dist/cli/index.js")
    }

    pub(crate) fn environment(&self) -> Result<Vec<(String, Option<String>)>> {
        let broker = self.broker.display().to_string();
        let folder = self.folder.path().display().to_string();
        let set = [
            ("AGENT_RELAY_BIN", broker.as_str()),
            ("AGENT_RELAY_TELEMETRY_DISABLED", "1"),
            ("DO_NOT_TRACK", "1"),
            ("HOME", folder.as_str()),
            ("XDG_DATA_HOME", folder.as_str()),
            ("RELAYCAST_BASE_URL", self.gateway.as_str()),
            ("RELAY_BASE_URL", self.gateway.as_str()),
            ("RELAY_WORKSPACE_KEY", self.workspace.token()),
            ("TERM", "xterm-256color"),
        ];
        let unset = ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"];
        let set = set.into_iter().map(|(name, value)| (name.to_owned(), Some(value.to_owned())));
        Ok(set.chain(unset.into_iter().map(|name| (name.to_owned(), None))).collect())
    }

    /// Runs a command of it and returns its output.
    pub(crate) async fn run(&self, args: &[&str]) -> Result<String> {
        let mut command = Command::new("node");
        command.arg(self.program()).args(args);
        self.output(command).await.with_context(|| format!("agent-relay {}", args.join(" ")))
    }

    /// Runs a command of it in a terminal, with steps for `terminal.py`.
    async fn in_terminal(&self, args: &[&str], steps: Value) -> Result<String> {
        let mut command = Command::new("python3");
        command.arg(clients::scripts().join("terminal.py")).arg(steps.to_string());
        command.arg("node").arg(self.program()).args(args);
        self.output(command).await.with_context(|| format!("agent-relay {} in a terminal", args.join(" ")))
    }

    async fn output(&self, mut command: Command) -> Result<String> {
        for (name, value) in self.environment()? {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let output = timeout(LIMIT, command.current_dir(self.folder.path()).kill_on_drop(true).output()).await;
        let output = output.context("it hangs")??;
        let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.success(), "{}: {stdout}{stderr}", output.status);
        Ok(stdout.into_owned())
    }

    pub(crate) fn connection(&self) -> Result<Value> {
        let file = self.folder.path().join(".agentworkforce/relay/connection.json");
        Ok(serde_json::from_str(&std::fs::read_to_string(file).context("no connection file")?)?)
    }

    async fn call(&self, path: &str) -> Result<Value> {
        let connection = self.connection()?;
        let text = |key: &str| connection[key].as_str().map(str::to_owned).with_context(|| format!("no {key}"));
        let (api, key) = (Api::anonymous(&text("url")?), text("api_key")?);
        Ok(api.call("GET".parse()?, path, None, &[("x-api-key", &key)]).await?.body)
    }
}

#[tokio::test]
async fn the_command_line_runs_a_broker_in_the_background_with_its_agents() -> Result<()> {
    let cli = CommandLine::new("background").await?;
    cli.run(&["local", "up", "--background", "--no-spawn", "--broker-name", "background"]).await?;
    cli.run(&["local", "status", "--wait-for", "30"]).await?;
    let pid = cli.connection()?["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).context("a pid")?;
    let _holder = Holder::of_broker(pid)?;
    cli.run(&["local", "agent", "spawn", "cat", "--name", "purr"]).await?;
    let list: Value = serde_json::from_str(&cli.run(&["local", "agent", "list"]).await?)?;
    assert_eq!((&list[0]["name"], &list[0]["runtime"]), (&json!("purr"), &json!("pty")), "{list}");

    cli.run(&["local", "agent", "message", "hold", "purr"]).await?;
    cli.sender.dm("purr", "held-message").await?.success()?;
    wait::until_ok("a held message", SOON, || async {
        let pending = cli.call("/api/spawned/purr/pending").await?;
        ensure!(pending["pending"][0]["body"] == "held-message", "{pending}");
        anyhow::Ok(())
    })
    .await?;
    let flushed: Value = serde_json::from_str(&cli.run(&["local", "agent", "message", "flush", "purr"]).await?)?;
    assert_eq!(flushed["flushed"], 1, "{flushed}");
    cli.run(&["local", "agent", "message", "auto", "purr"]).await?;

    let view = ["local", "agent", "attach", "purr", "--mode", "view"];
    cli.in_terminal(&view, json!([["wait", "held-message"], ["type", "\u{3}"]])).await?;
    let drive = ["local", "agent", "attach", "purr", "--mode", "drive"];
    let steps = json!([["raw", ""], ["type", "by-hand\r"], ["wait", "by-hand"], ["type", "\u{3}"]]);
    cli.in_terminal(&drive, steps).await?;
    let screen = cli.call("/api/spawned/purr/snapshot").await?;
    assert!(screen["screen"].as_str().is_some_and(|text| text.contains("by-hand")), "{screen}");
    let mode = cli.call("/api/spawned/purr/delivery-mode").await?;
    assert_eq!(mode["mode"], "auto_inject", "the mode before comes back");

    cli.run(&["local", "agent", "release", "purr"]).await?;
    cli.run(&["local", "down"]).await?;
    assert!(cli.connection().is_err());
    assert!(!is_running(pid));
    Ok(())
}
