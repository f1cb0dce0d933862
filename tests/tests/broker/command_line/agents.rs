//! Commands for one agent in a terminal, and the stream of a broker's events.

use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Context, Result, ensure};
use relay_testkit::process::{Process, Spec};
use relay_testkit::wait;
use serde_json::{Value, json};

use crate::command_line::CommandLine;
use crate::scene::SOON;

/// Agent that answers each line, so that its answer is no echo of the keys.
const AGENT: &str = "#!/bin/sh\nwhile read -r line; do echo \"got $line\"; done\n";
const CTRL_C: &str = "\u{3}";

struct Project {
    cli: CommandLine,
    /// Program of the agent.
    program: String,
    /// Command that holds the broker.
    holder: Process,
}

impl Project {
    /// Starts a broker. In the background it would have to be ready within 10 s, on a busy machine too.
    async fn start(name: &str) -> Result<Self> {
        let cli = CommandLine::new(name).await?;
        let program = cli.folder.path().join("answering.sh");
        std::fs::write(&program, AGENT)?;
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
        let mut spec = Spec::new("up", "node", cli.folder.path().join("up.log"));
        let command_line = cli.program().display().to_string();
        spec.args = [&command_line, "local", "up", "--no-spawn", "--broker-name", name].map(str::to_owned).to_vec();
        spec.env = cli.environment()?;
        spec.cwd = Some(cli.folder.path().to_owned());
        let holder = Process::start(spec)?;
        cli.run(&["local", "status", "--wait-for", "60"]).await.with_context(|| holder.log_tail(30))?;
        Ok(Self { cli, program: program.display().to_string(), holder })
    }

    /// Waits until the agent's route answers with a text.
    async fn wait_for(&self, route: &str, text: &str) -> Result<()> {
        wait::until_ok(&format!("{text} of {route}"), SOON, || async {
            let answer = self.cli.call(&format!("/api/spawned/answering/{route}")).await?;
            ensure!(answer.to_string().contains(text), "{answer}");
            anyhow::Ok(())
        })
        .await
    }

    /// Waits until events are read by the holder of the broker and this number of others.
    async fn wait_for_readers(&self, others: u64) -> Result<()> {
        wait::until_ok("readers of events", SOON, || async {
            let health = self.cli.call("/health").await?;
            ensure!(health["wsConnections"] == others + 1, "{health}");
            anyhow::Ok(())
        })
        .await
    }

    /// Runs `local tail` while a message is sent, until it has shown a line with it. Returns this line.
    async fn tail(&self, args: &[&str], message: &str) -> Result<String> {
        self.wait_for_readers(0).await?;
        let command = [&["local", "tail"], args].concat();
        let tail = self.cli.in_terminal(&command, json!([["wait", message], ["wait", "\n"], ["type", CTRL_C]]));
        let post = async {
            self.wait_for_readers(1).await?;
            self.cli.sender.dm("answering", message).await?.success()
        };
        let (output, _) = tokio::try_join!(tail, post)?;
        Ok(output.lines().find(|line| line.contains(message)).context("the line")?.trim().to_owned())
    }

    /// Spawns the agent and drives it in one command.
    async fn spawn_and_drive(&self) -> Result<()> {
        let new = ["local", "agent", "new", &self.program, "--name", "answering"];
        let steps = json!([["raw", ""], ["type", "driven\r"], ["wait", "got driven"], ["type", CTRL_C]]);
        self.cli.in_terminal(&new, steps).await?;
        self.wait_for("delivery-mode", "auto_inject").await
    }

    /// Types for the agent while messages get through that were held before.
    async fn pass_through(&self) -> Result<()> {
        self.cli.run(&["local", "agent", "message", "hold", "answering"]).await?;
        self.cli.sender.dm("answering", "held-message").await?.success()?;
        self.wait_for("pending", "held-message").await?;
        let attach = ["local", "agent", "attach", "answering", "--mode", "passthrough"];
        let steps = json!([
            ["wait", "held-message"],
            ["raw", ""],
            ["type", "passed\r"],
            ["wait", "got passed"],
            ["type", CTRL_C]
        ]);
        self.cli.in_terminal(&attach, steps).await?;
        self.wait_for("delivery-mode", "manual_flush").await.context("the mode before comes back")
    }

    /// Ends the broker and the command that holds it.
    async fn stop(&self) -> Result<()> {
        self.cli.run(&["local", "down"]).await?;
        ensure!(self.cli.connection().is_err(), "the broker runs");
        self.holder.stop_with(libc::SIGTERM, SOON).await.map(drop)
    }
}

#[tokio::test]
async fn an_agent_is_driven_given_a_model_watched_and_typed_for() -> Result<()> {
    let project = Project::start("agents").await?;
    project.spawn_and_drive().await?;

    project.cli.run(&["local", "agent", "set-model", "answering", "opus"]).await?;
    project.wait_for("snapshot", "got /model opus").await?;

    let line = project.tail(&[], "first-message").await?;
    let event: Value = serde_json::from_str(&line).with_context(|| line.clone())?;
    assert!(event["kind"].is_string(), "{event}");
    let output = project.tail(&["--agent", "answering"], "second-message").await?;
    assert!(!output.starts_with('{'), "{output}");

    project.pass_through().await?;
    project.stop().await
}
