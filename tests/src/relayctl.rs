//! `relayctl` as an operator runs it.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_testkit::{binaries, shared};
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

/// What a command left behind.
#[derive(Debug)]
pub struct Done {
    /// Whether it ended well.
    pub success: bool,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Done {
    /// Itself, if it ended well.
    pub fn ok(self) -> Result<Self> {
        ensure!(self.success, "it failed: {}{}", self.stdout, self.stderr);
        Ok(self)
    }

    /// Its output as JSON, if it ended well.
    pub fn json(self) -> Result<Value> {
        let done = self.ok()?;
        serde_json::from_str(&done.stdout).with_context(|| format!("no JSON: {}", done.stdout))
    }
}

/// Runs it against the engine that all tests share.
pub async fn relayctl(arguments: &[&str]) -> Result<Done> {
    relayctl_with(arguments, &[], "").await
}

/// The same with variables and standard input.
pub async fn relayctl_with(arguments: &[&str], variables: &[(&str, &str)], input: &str) -> Result<Done> {
    let engine = shared().await;
    let mut command = Command::new(binaries::find(&binaries::directory()?, "relayctl")?);
    command.args(arguments).env("DATABASE_URL", &engine.database_url).env("NATS_URL", &engine.nats_url);
    command.envs(variables.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.kill_on_drop(true).spawn()?;
    let mut stdin = child.stdin.take().context("no standard input")?;
    // A command that reads nothing may have ended already.
    let _ = stdin.write_all(input.as_bytes()).await;
    drop(stdin);
    let output = tokio::time::timeout(Duration::from_secs(60), child.wait_with_output()).await??;
    Ok(Done {
        success: output.status.success(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}
