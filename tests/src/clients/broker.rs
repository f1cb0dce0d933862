//! The published broker as a process, used through its local API.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use relay_testkit::client::Api;
use relay_testkit::process::{Process, Spec};
use relay_testkit::wait;
use serde_json::{Value, json};

use super::install;

/// Published releases of the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BrokerRelease {
    V9,
    V12,
}

impl BrokerRelease {
    /// Returns the program's path below the folder with the npm packages.
    pub const fn program(self) -> &'static str {
        match self {
            // The SDK's package contains it.
            Self::V9 => "node_modules/@agent-relay/sdk/bin/agent-relay-broker-linux-x64",
            Self::V12 => "node_modules/@agent-relay/broker-linux-x64/bin/agent-relay-broker",
        }
    }
}

const START_TIMEOUT: Duration = Duration::from_secs(30);
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// Command for an agent: a script that records its input lines.
#[derive(Debug)]
pub struct AgentScript {
    program: PathBuf,
    heard: PathBuf,
}

impl AgentScript {
    /// Writes the script into `dir`.
    pub fn write(dir: &Path, name: &str) -> Result<Self> {
        let (program, heard) = (dir.join(format!("{name}.sh")), dir.join(format!("{name}.heard")));
        // The broker detects delivery by the terminal's echo of the input.
        let text = format!(
            "#!/bin/sh\necho ready\nwhile IFS= read -r line; do\n  printf '%s\\n' \"$line\" >> '{}'\n  echo \"got: $line\"\ndone\n",
            heard.display()
        );
        fs::write(&program, text)?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        Ok(Self { program, heard })
    }

    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Returns the recorded input.
    pub fn received_lines(&self) -> String {
        fs::read_to_string(&self.heard).unwrap_or_default()
    }
}

/// Position of a broker in one agent's mailbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Highest acknowledged seq.
    pub acked: i64,
    /// Highest received seq.
    pub received: i64,
}

#[derive(Debug)]
pub struct Broker {
    process: Process,
    api: Api,
    key: String,
}

impl Broker {
    /// Starts broker 12.4.1 that keeps its state in `dir`, and waits until its local API answers.
    pub async fn start(engine: &str, workspace_key: &str, name: &str, dir: &Path) -> Result<Self> {
        Self::start_release(BrokerRelease::V12, engine, workspace_key, name, dir).await
    }

    /// Starts a broker of this release that keeps its state in `dir`, and waits until its local API answers.
    pub async fn start_release(
        release: BrokerRelease,
        engine: &str,
        workspace_key: &str,
        name: &str,
        dir: &Path,
    ) -> Result<Self> {
        let program = install::npm_packages().await?.join(release.program());
        fs::create_dir_all(dir)?;
        let connection = dir.join("connection.json");
        // A file of an earlier process would be mistaken for that of the new one.
        let _ = fs::remove_file(&connection);
        let mut spec = Spec::new(name, program, dir.join("broker.log"));
        spec.args = ["init", "--instance-name", name, "--api-port", "0", "--channels", "general", "--state-dir"]
            .map(str::to_owned)
            .to_vec();
        spec.args.push(dir.display().to_string());
        spec.cwd = Some(dir.to_owned());
        let env = [
            ("HOME", dir.to_str().context("a folder's name")?),
            ("RELAY_BASE_URL", engine),
            ("RELAYCAST_BASE_URL", engine),
            ("RELAY_WORKSPACE_KEY", workspace_key),
            ("RELAY_API_KEY", workspace_key),
            ("AGENT_RELAY_NODE_HARNESSES", "echo"),
            ("AGENT_RELAY_TELEMETRY_DISABLED", "1"),
            ("DO_NOT_TRACK", "1"),
        ];
        spec.env = env.map(|(key, value)| (key.to_owned(), Some(value.to_owned()))).to_vec();
        // Broker 9 would keep its node's id there instead of in its home.
        let outside = ["XDG_DATA_HOME", "XDG_STATE_HOME"];
        let proxies = ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"];
        spec.env.extend(outside.into_iter().chain(proxies).map(|unset| (unset.to_owned(), None)));
        let process = Process::start(spec)?;
        let found = wait::until_ok("the broker's local API", START_TIMEOUT, || async {
            if !process.is_running() {
                return Ok(None);
            }
            let text = fs::read_to_string(&connection).context("not written yet")?;
            let found: Value = serde_json::from_str(&text).context("not complete yet")?;
            ensure!(found["pid"] == process.pid(), "written by another process");
            Ok::<_, anyhow::Error>(Some(found))
        })
        .await;
        let Ok(Some(found)) = found else {
            bail!("the broker did not come up ({found:?}); its log ends:\n{}", process.log_tail(40));
        };
        let field = |name: &str| found[name].as_str().map(str::to_owned).with_context(|| format!("no {name}"));
        Ok(Self { process, api: Api::anonymous(&field("url")?), key: field("api_key")? })
    }

    /// Starts an agent in a terminal once the broker has finished its startup.
    pub async fn spawn(&self, agent: &str, script: &AgentScript) -> Result<()> {
        let body = json!({ "name": agent, "cli": script.program, "args": [], "channels": ["general"],
                           "skipRelayPrompt": true });
        let answer = wait::until_ok("the broker to take a spawn", START_TIMEOUT, || async {
            let answer = self.call("POST", "/api/spawn", Some(body.clone())).await?;
            ensure!(answer.status != 503, "not ready: {}", answer.body);
            Ok::<_, anyhow::Error>(answer)
        })
        .await?;
        ensure!(answer.is_success(), "the broker refused to spawn {agent}: {} {}", answer.status, answer.body);
        Ok(())
    }

    /// Returns the agent's terminal as text.
    pub async fn screen(&self, agent: &str) -> Result<String> {
        let answer = self.call("GET", &format!("/api/spawned/{agent}/snapshot"), None).await?;
        Ok(answer.body["screen"].as_str().unwrap_or_default().to_owned())
    }

    /// Returns the position in the agent's mailbox, or `None` without one.
    pub async fn position(&self, agent: &str) -> Result<Option<Position>> {
        let answer = self.call("GET", "/api/node-delivery", None).await?;
        let cursors = answer.body["cursors"].as_array().cloned().unwrap_or_default();
        let cursor = cursors.iter().find(|cursor| cursor["agent_name"] == agent);
        Ok(cursor.map(|cursor| Position {
            acked: cursor["acked_up_to_seq"].as_i64().unwrap_or_default(),
            received: cursor["received_up_to_seq"].as_i64().unwrap_or_default(),
        }))
    }

    pub fn is_running(&self) -> bool {
        self.process.is_running()
    }

    pub fn kill9(&self) {
        self.process.kill9();
    }

    /// Sends SIGTERM and waits for the exit.
    pub async fn terminate(&self) -> Result<()> {
        self.process.stop_with(libc::SIGTERM, STOP_TIMEOUT).await.map(|_| ())
    }

    /// Returns the last lines of its log.
    pub fn log_tail(&self, lines: usize) -> String {
        self.process.log_tail(lines)
    }

    async fn call(&self, method: &str, path: &str, body: Option<Value>) -> Result<relay_testkit::client::Reply> {
        let method = method.parse().context("a method")?;
        self.api.call(method, path, body, &[("x-api-key", &self.key)]).await
    }
}
