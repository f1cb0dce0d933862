//! A workspace with a sender, and a broker in it.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use relay_testkit::client::Api;
use relay_testkit::node::{BrokerSpec, FakeAgent, NodeBroker};
use relay_testkit::proxy::TcpProxy;
use relay_testkit::{shared, wait};
use serde_json::{Value, json};
use tempfile::TempDir;

pub(crate) const SOON: Duration = Duration::from_secs(40);

pub(crate) struct Scene {
    pub(crate) workspace: Api,
    pub(crate) sender: Api,
    pub(crate) broker: NodeBroker,
    folder: TempDir,
}

impl Scene {
    pub(crate) async fn new(name: &str) -> Result<Self> {
        Self::with_args(name, &[]).await
    }

    /// A scene whose broker has further arguments.
    pub(crate) async fn with_args(name: &str, args: &[String]) -> Result<Self> {
        Self::at(name, shared().await.any_gateway(), args).await
    }

    /// A scene whose broker uses the engine at this URL.
    async fn at(name: &str, engine: &str, args: &[String]) -> Result<Self> {
        Self::in_folder(name, engine, args, tempfile::tempdir()?).await
    }

    /// A scene whose broker runs in a folder that was prepared.
    pub(crate) async fn in_folder(name: &str, engine: &str, args: &[String], folder: TempDir) -> Result<Self> {
        let gateway = shared().await.any_gateway();
        let workspace = Api::create_workspace(gateway, name).await?;
        let sender = workspace.as_agent(&workspace.register_agent("sender").await?);
        let mut spec = BrokerSpec::new(engine, workspace.token(), name, folder.path())?;
        spec.args = args.to_vec();
        let broker = NodeBroker::start(&spec).await?;
        Ok(Self { workspace, sender, broker, folder })
    }

    /// A scene whose broker reaches the engine through a proxy that can be cut.
    pub(crate) async fn behind_proxy(name: &str) -> Result<(Self, TcpProxy)> {
        let gateway = shared().await.any_gateway();
        let proxy = TcpProxy::start(gateway.trim_start_matches("http://"))?;
        let scene = Self::at(name, &proxy.through(gateway)?, &[]).await?;
        Ok((scene, proxy))
    }

    /// Starts a fake agent and returns what it notes.
    pub(crate) async fn spawn(&self, name: &str, show: &str, more: &[&str]) -> Result<FakeAgent> {
        self.spawn_with(name, show, more, json!({})).await
    }

    /// Returns what an agent has noted.
    pub(crate) fn agent_log(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path().join(format!("{name}.log"))).unwrap_or_default()
    }

    pub(crate) async fn spawn_with(&self, name: &str, show: &str, more: &[&str], body: Value) -> Result<FakeAgent> {
        let file = name.replace(|character: char| !character.is_ascii_alphanumeric(), "-");
        let agent = FakeAgent::new(show, self.folder.path().join(format!("{file}.log")), more);
        let is_ours = !is_published_broker();
        let mut spawned = self.broker.spawn(&agent, name, body.clone()).await?;
        for _ in 0..5 {
            if is_ours || spawned.status != 500 {
                break;
            }
            // The published 12.4.1 refuses a spawn now and then, by a race about the agent's channels.
            self.broker.call("DELETE", &format!("/api/spawned/{name}"), None).await?;
            spawned = self.broker.spawn(&agent, name, body.clone()).await?;
        }
        ensure!(spawned.is_success(), "{} {}\n{}", spawned.status, spawned.body, self.broker.log_tail(30));
        // Of a published broker it is known only later, which is a fault of its own and must not hide the others.
        ensure!(!is_ours || spawned.body["pid"].as_i64().is_some_and(|pid| pid > 0), "{}", spawned.body);
        Ok(agent)
    }

    /// Returns the position up to which the engine knows an agent's messages to be settled.
    pub(crate) async fn floor(&self, agent: &str) -> Result<i64> {
        let floors = floors(&self.workspace).await?;
        floors.get(agent).copied().context("the agent is not on the node")
    }

    /// Waits until the engine has an ack up to `floor`, where a message failed that could not be verified.
    pub(crate) async fn wait_unverified(&self, agent: &str, floor: i64) -> Result<()> {
        wait::until_ok("the ack behind the failure", SOON, || async {
            let known = self.floor(agent).await?;
            ensure!(known == floor, "the floor is {known}");
            anyhow::Ok(())
        })
        .await?;
        let dead = self.workspace.get("/v1/dead-letters").await?.success()?;
        ensure!(dead.to_string().contains("verification_failed"), "{dead}");
        Ok(())
    }

    /// Waits until an agent has these messages, in this order, and the engine has an ack up to `floor`.
    pub(crate) async fn wait_for(&self, name: &str, agent: &FakeAgent, bodies: &[String], floor: i64) -> Result<()> {
        let received = wait::until_ok("messages in the terminal and their ack", SOON, || async {
            let found = agent.bodies();
            ensure!(found == bodies, "the agent has {found:?}");
            let known = self.floor(name).await?;
            ensure!(known == floor, "the engine has an ack up to {known}");
            Ok::<_, anyhow::Error>(())
        });
        received.await.with_context(|| self.broker.log_tail(60))
    }
}

/// Returns the positions up to which the engine knows the messages of a broker's agents to be settled.
pub(crate) async fn floors(workspace: &Api) -> Result<HashMap<String, i64>> {
    let nodes = workspace.get("/v1/nodes").await?.success()?;
    let nodes = nodes.as_array().context("a list of nodes")?;
    let node = nodes.iter().find(|node| node["role"] == "broker").context("the broker's node")?;
    let name = node["name"].as_str().context("a name")?;
    let agents = workspace.get(&format!("/v1/nodes/{name}/agents")).await?.success()?;
    let agents = agents.as_array().context("a list of agents")?;
    let floor = |entry: &Value| Some((entry["agent_name"].as_str()?.to_owned(), entry["delivery_ack_seq"].as_i64()?));
    Ok(agents.iter().filter_map(floor).collect())
}

/// Names of messages from `first` to `last`.
pub(crate) fn numbered(first: u32, last: u32) -> Vec<String> {
    (first..=last).map(|number| format!("message-{number}")).collect()
}

/// Returns whether the tests run against a published broker.
pub(crate) fn is_published_broker() -> bool {
    std::env::var_os("RELAY_NODE_BROKER").is_some()
}

/// Returns whether a process runs; one that has ended and was not waited for does not.
pub(crate) fn is_running(pid: u32) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    state.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}
