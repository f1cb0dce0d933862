//! [`NodeBroker`]: a broker that was started, with a state directory of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::FakeAgent;
use crate::client::{Api, Reply};
use crate::process::{Process, Spec};
use crate::{binaries, wait};

/// Path of another broker, such as a published one, that tests are run against to compare.
const PROGRAM_VARIABLE: &str = "RELAY_NODE_BROKER";
const READY_WITHIN: Duration = Duration::from_secs(30);
const STOP_WITHIN: Duration = Duration::from_secs(10);

/// State directory of a broker, below the directory that it runs in.
const STATE_DIRECTORY: &str = ".agentworkforce/relay";

/// Description of a broker to start.
#[derive(Debug, Clone)]
pub struct BrokerSpec {
    /// Path of the program.
    pub program: PathBuf,
    /// URL of the engine.
    pub engine: String,
    /// Key of the workspace.
    pub workspace_key: String,
    /// Instance name of the broker and of its node.
    pub name: String,
    /// Directory that it runs in; created if it does not exist.
    pub folder: PathBuf,
    /// Runs without an owner's lease. Its state is kept either way.
    pub persists: bool,
    /// Arguments behind `init --instance-name NAME`.
    pub args: Vec<String>,
    /// Environment in addition.
    pub env: Vec<(String, String)>,
}

impl BrokerSpec {
    /// Describes a broker with default settings: ours, or the one that `RELAY_NODE_BROKER` names.
    pub fn new(engine: &str, workspace_key: &str, name: &str, folder: &Path) -> Result<Self> {
        let program = match std::env::var_os(PROGRAM_VARIABLE) {
            Some(program) => program.into(),
            None => binaries::find(&binaries::directory()?, "agent-relay-broker")?,
        };
        Ok(Self {
            program,
            engine: engine.to_owned(),
            workspace_key: workspace_key.to_owned(),
            name: name.to_owned(),
            folder: folder.to_owned(),
            persists: true,
            args: Vec::new(),
            env: Vec::new(),
        })
    }

    fn process(&self) -> Result<Spec> {
        let mut spec = Spec::new(&self.name, &self.program, self.folder.join("broker.log"));
        spec.args = ["init", "--instance-name", &self.name].map(str::to_owned).to_vec();
        let kept: &[&str] = if self.persists { &["--persist"] } else { &["--state-dir", STATE_DIRECTORY] };
        spec.args.extend(kept.iter().map(|word| (*word).to_owned()));
        spec.args.extend(self.args.iter().cloned());
        spec.cwd = Some(self.folder.clone());
        let home = self.folder.to_str().context("the folder's name is not UTF-8")?;
        let environment = [
            // Settings and state of the user who runs the tests must not reach the broker, nor its own reach them.
            ("HOME", home),
            ("XDG_DATA_HOME", home),
            ("RELAYCAST_BASE_URL", &self.engine),
            ("RELAY_BASE_URL", &self.engine),
            ("RELAY_WORKSPACE_KEY", &self.workspace_key),
            ("RELAY_DEFAULT_CHANNELS", "general"),
        ];
        spec.env = environment.map(|(key, value)| (key.to_owned(), Some(value.to_owned()))).to_vec();
        spec.env.extend(self.env.iter().map(|(key, value)| (key.clone(), Some(value.clone()))));
        // The engine is on this machine, where a proxy of the environment could not reach it.
        for proxy in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"] {
            spec.env.push((proxy.to_owned(), None));
        }
        Ok(spec)
    }
}

/// A broker with a state directory of its own.
#[derive(Debug)]
pub struct NodeBroker {
    process: Process,
    folder: PathBuf,
    api: Api,
    key: String,
}

impl NodeBroker {
    /// Starts a persistent broker and waits until its API is ready.
    pub async fn start(spec: &BrokerSpec) -> Result<Self> {
        fs::create_dir_all(&spec.folder)?;
        let mut broker = Self {
            process: Process::start(spec.process()?)?,
            folder: spec.folder.clone(),
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
        let path = self.folder.join(STATE_DIRECTORY).join("connection.json");
        let pid = self.process.pid();
        let found = wait::until_ok("the broker to be ready", READY_WITHIN, || async {
            // Ends the polling: a broker that has exited will not become ready.
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

    /// Waits until it is connected to the engine, which it is some time after its start.
    pub async fn wait_connected(&self) -> Result<()> {
        wait::until_ok("the broker to be connected", READY_WITHIN, || async {
            let health = self.call_with("GET", "/health", &[]).await?.body;
            ensure!(health["relaycastConnected"] == true, "{health}");
            anyhow::Ok(())
        })
        .await
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
        let mut fields =
            json!({ "name": name, "cli": agent.program()?, "args": agent.args(), "channels": ["general"] });
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

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Returns whether it runs.
    pub fn is_running(&self) -> bool {
        self.process.is_running()
    }

    /// Sends SIGTERM and waits for the exit.
    pub async fn terminate(&self) -> Result<std::process::ExitStatus> {
        self.process.stop_with(libc::SIGTERM, STOP_WITHIN).await
    }

    /// Returns the URL of the listen API.
    pub fn url(&self) -> &str {
        self.api.base()
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
