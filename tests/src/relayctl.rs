//! `relayctl` as a process.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_testkit::{binaries, shared};
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

/// Output of a finished command.
#[derive(Debug)]
pub struct CommandOutput {
    /// `true` for exit status 0.
    pub success: bool,
    pub stdout: String,
    pub stderr: String,
}

impl CommandOutput {
    /// Returns the output, or an error if the command failed.
    pub fn expect_success(self) -> Result<Self> {
        ensure!(self.success, "it failed: {}{}", self.stdout, self.stderr);
        Ok(self)
    }

    /// Returns the output as JSON, or an error if the command failed.
    pub fn json(self) -> Result<Value> {
        let done = self.expect_success()?;
        serde_json::from_str(&done.stdout).with_context(|| format!("no JSON: {}", done.stdout))
    }
}

/// Runs a command against the shared engine.
pub async fn relayctl(arguments: &[&str]) -> Result<CommandOutput> {
    relayctl_with(arguments, &[], "").await
}

/// Runs a command with environment variables and standard input.
pub async fn relayctl_with(arguments: &[&str], variables: &[(&str, &str)], input: &str) -> Result<CommandOutput> {
    let engine = shared().await;
    let mut command = Command::new(binaries::find(&binaries::directory()?, "relayctl")?);
    command.args(arguments).env("DATABASE_URL", &engine.database_url).env("NATS_URL", &engine.nats_url);
    command.envs(variables.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.kill_on_drop(true).spawn()?;
    let mut stdin = child.stdin.take().context("no standard input")?;
    // Fails harmlessly if the command has ended without reading.
    let _ = stdin.write_all(input.as_bytes()).await;
    drop(stdin);
    let output = tokio::time::timeout(Duration::from_secs(60), child.wait_with_output()).await??;
    Ok(CommandOutput {
        success: output.status.success(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}
