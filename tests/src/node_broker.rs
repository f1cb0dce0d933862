//! Our broker as a process, used through its listen API, with fake agents in its terminals.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use relay_testkit::client::{Api, Reply};
use relay_testkit::process::{Process, Spec};
use relay_testkit::{binaries, wait};
use serde_json::{Value, json};

const READY_WITHIN: Duration = Duration::from_secs(30);
const STOP_WITHIN: Duration = Duration::from_secs(10);

/// A broker with a state directory of its own.
#[derive(Debug)]
pub struct NodeBroker {
    process: Process,
    folder: PathBuf,
    api: Api,
    key: String,
}

impl NodeBroker {
    /// Starts a persistent broker in `folder` and waits until it has joined the engine.
    pub async fn start(engine: &str, workspace_key: &str, name: &str, folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let program = binaries::find(&binaries::directory()?, "agent-relay-broker")?;
        let mut spec = Spec::new(name, program, folder.join("broker.log"));
        spec.args = ["init", "--instance-name", name, "--persist"].map(str::to_owned).to_vec();
        spec.cwd = Some(folder.to_owned());
        let home = folder.to_str().context("a folder's name")?;
        let environment = [
            ("HOME", home),
            ("XDG_DATA_HOME", home),
            ("RELAYCAST_BASE_URL", engine),
            ("RELAY_WORKSPACE_KEY", workspace_key),
            ("RELAY_DEFAULT_CHANNELS", "general"),
        ];
        spec.env = environment.map(|(key, value)| (key.to_owned(), Some(value.to_owned()))).to_vec();
        for proxy in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
            spec.env.push((proxy.to_owned(), None));
        }
        let mut broker = Self {
            process: Process::start(spec)?,
            folder: folder.to_owned(),
            api: Api::anonymous(""),
            key: String::new(),
        };
        broker.wait_ready().await?;
        Ok(broker)
    }

    /// Kills it and starts it again on the same state directory.
    pub async fn kill_and_restart(&mut self) -> Result<()> {
        self.process.kill9();
        self.process.start_again()?;
        self.wait_ready().await
    }

    async fn wait_ready(&mut self) -> Result<()> {
        let path = self.folder.join(".agentworkforce/relay/connection.json");
        let pid = self.process.pid();
        let found = wait::until_ok("the broker to be ready", READY_WITHIN, || async {
            if !self.process.is_running() {
                return Ok(None);
            }
            let found: Value = serde_json::from_str(&fs::read_to_string(&path).context("no connection file")?)?;
            ensure!(found["pid"] == pid, "a file of an earlier broker");
            let text = |key: &str| found[key].as_str().map(str::to_owned).with_context(|| format!("no {key}"));
            let (api, key) = (Api::anonymous(&text("url")?), text("api_key")?);
            let session = api.call("GET".parse()?, "/api/session", None, &[("x-api-key", &key)]).await?;
            ensure!(session.status == 200, "{} {}", session.status, session.body);
            Ok::<_, anyhow::Error>(Some((api, key)))
        });
        match found.await {
            Ok(Some((api, key))) => {
                (self.api, self.key) = (api, key);
                Ok(())
            }
            failed => bail!("the broker did not come up ({failed:?}):\n{}", self.log_tail(40)),
        }
    }

    /// Calls the listen API with the broker's key.
    pub async fn call(&self, method: &str, path: &str, body: Option<Value>) -> Result<Reply> {
        self.api.call(method.parse().context("a method")?, path, body, &[("x-api-key", &self.key)]).await
    }

    /// Calls the listen API with other headers.
    pub async fn call_with(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> Result<Reply> {
        self.api.call(method.parse().context("a method")?, path, None, headers).await
    }

    /// Starts a fake agent.
    pub async fn spawn(&self, agent: &FakeAgent, name: &str, body: Value) -> Result<Reply> {
        let mut fields = json!({ "name": name, "cli": agent.command()?, "args": agent.args, "channels": ["general"] });
        if let (Value::Object(fields), Value::Object(more)) = (&mut fields, body) {
            fields.extend(more);
        }
        self.call("POST", "/api/spawn", Some(fields)).await
    }

    /// Returns the names of the agents.
    pub async fn names(&self) -> Result<Vec<String>> {
        let list = self.call("GET", "/api/spawned", None).await?;
        let agents = list.body["agents"].as_array().context("a list")?;
        Ok(agents.iter().filter_map(|agent| agent["name"].as_str().map(str::to_owned)).collect())
    }

    /// Returns the kept events of one agent and kind.
    pub async fn events(&self, name: &str, kind: &str) -> Result<Vec<Value>> {
        let replay = self.call("GET", "/api/events/replay?sinceSeq=0", None).await?;
        let events = replay.body["events"].as_array().context("a list")?;
        Ok(events.iter().filter(|event| event["name"] == name && event["kind"] == kind).cloned().collect())
    }

    /// Sends SIGTERM and waits for the exit.
    pub async fn terminate(&self) -> Result<std::process::ExitStatus> {
        self.process.stop_with(libc::SIGTERM, STOP_WITHIN).await
    }

    /// Returns the URL of a socket of the listen API.
    pub fn socket_url(&self, path: &str) -> String {
        format!("{}{path}", self.api.ws_base())
    }

    /// Returns the key of the listen API.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Returns the directory that it runs in.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the last lines of its log.
    pub fn log_tail(&self, lines: usize) -> String {
        self.process.log_tail(lines)
    }
}

/// Fake agent that notes its messages in a file.
#[derive(Debug, Clone)]
pub struct FakeAgent {
    log: PathBuf,
    args: Vec<String>,
}

impl FakeAgent {
    /// Describes an agent that shows messages in one way (`cooked`, `screen` or `mute`).
    pub fn new(show: &str, log: PathBuf, more: &[&str]) -> Self {
        let path = log.display().to_string();
        let args = [show, "--log", &path].into_iter().chain(more.iter().copied()).map(str::to_owned).collect();
        Self { log, args }
    }

    fn command(&self) -> Result<String> {
        Ok(binaries::find(&binaries::directory()?, "fake-agent")?.display().to_string())
    }

    /// Returns the submitted messages, each with the process that received it.
    pub fn messages(&self) -> Vec<(u32, String)> {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let parse = |line: &str| {
            let (pid, text) = line.split_once(' ')?;
            Some((pid.parse().ok()?, text.to_owned()))
        };
        text.lines().filter_map(parse).collect()
    }

    /// Returns the words after the last colon of each message: the bodies, if they have no colon.
    pub fn bodies(&self) -> Vec<String> {
        let body = |(_, text): (u32, String)| text.rsplit_once("]: ").map(|(_, body)| body.to_owned());
        self.messages().into_iter().filter_map(body).collect()
    }
}
