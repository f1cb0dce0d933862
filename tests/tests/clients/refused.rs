//! Published clients, unmodified, whose upgrades are refused with 503, because their workspace has all the sockets that
//! it may have, and whose next socket is closed with 1013: they connect again by themselves, and receive what was
//! posted meanwhile, once and in order.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::{
    chaos::database::{Database, MailboxPosition},
    clients::{AgentScript, Broker, BrokerRelease, Script},
};
use relay_testkit::{
    client::{Api, NodeSocket},
    proxy::{ConnectionId, Direction, TcpProxy, Verdict},
    stack::Stack,
    wait,
};
use relaycast::{CreateAgentRequest, CreateChannelRequest, RelayCast, RelayCastOptions};
use serde_json::json;

use super::broker::texts;

/// Sockets that the workspace and its child may have, and requests in progress.
const LIMIT: usize = 8;
/// Limit for a loaded machine. Clients wait longer after each refusal, up to 30 s.
const SOON: Duration = Duration::from_secs(90);
/// End of a close frame with 1013.
const NOT_REGISTERED: &[u8] = b"\x03\xf5not registered in time";

/// Sockets of the client that passed the proxy.
#[derive(Default)]
struct Passed {
    upgrades: HashSet<ConnectionId>,
    /// Number of upgrades that were answered with 503.
    refused: usize,
    /// Number of sockets that were closed with 1013.
    closed: usize,
    /// The client's registration is lost on the way, until a socket was closed.
    loses_registration: bool,
}

/// Gateway with few sockets for a workspace, whose client reaches it through a proxy.
struct Scene {
    stack: Stack,
    proxy: TcpProxy,
    workspace: Api,
    /// Agent of a child of the workspace, whose sockets count with those of the client.
    other: Api,
    others: tokio::sync::Mutex<Vec<NodeSocket>>,
    passed: Arc<Mutex<Passed>>,
}

impl Scene {
    async fn start() -> Result<Self> {
        let stack = Stack::builder()
            .gateways(1)
            .env("RELAY_MAX_CONNECTIONS_PER_WORKSPACE", LIMIT.to_string())
            .env("RELAY_REGISTRATION_TIMEOUT_SECONDS", "4")
            .start()
            .await?;
        let gateway = stack.gateway(0).url();
        let proxy = TcpProxy::start(gateway.trim_start_matches("http://"))?;
        let workspace = Api::create_workspace(gateway, "refused").await?;
        let child = workspace.post("/v1/workspaces", json!({ "name": "child" })).await?.success()?;
        let child = workspace.with_token(child["api_key"].as_str().context("a key")?);
        let mut others = Vec::new();
        for nth in 1..LIMIT {
            let agent = child.register_agent(&format!("other-{nth}")).await?;
            others.push(child.as_agent(&agent).direct_socket().await?);
        }
        let other = child.as_agent(&child.register_agent("other").await?);
        Ok(Self { stack, proxy, workspace, other, others: others.into(), passed: Arc::default() })
    }

    fn front(&self) -> String {
        format!("http://{}", self.proxy.address())
    }

    fn passed(&self) -> MutexGuard<'_, Passed> {
        lock(&self.passed)
    }

    /// Cuts the client's connections and takes the place of its socket. Returns once its upgrades are refused.
    async fn refuse(&self) -> Result<()> {
        // A message whose ack is lost in the cut comes again, and some clients show it again.
        let database = Database::connect(self.stack.database_url())?;
        wait::until_ok("the ack of the client", SOON, || async {
            let positions = database.mailbox_positions().await?;
            let is_acked = |position: &MailboxPosition| position.head > 0 && position.ack_floor == position.head;
            ensure!(positions.values().any(is_acked), "{positions:?}");
            anyhow::Ok(())
        })
        .await?;
        self.proxy.cut();
        let last = wait::until_ok("the place of the client", SOON, || self.other.direct_socket()).await?;
        self.others.lock().await.push(last);
        self.proxy.restore();
        self.watch();
        wait::until("refused upgrades", SOON, || async { self.passed().refused >= 2 }).await;
        Ok(())
    }

    /// Lets the client connect again, but loses its first registration, so that the gateway closes its socket.
    async fn admit(&self) -> Result<()> {
        self.passed().loses_registration = true;
        // Two places: a socket that was closed keeps its own until its client has answered.
        let mut others = self.others.lock().await;
        others.truncate(LIMIT - 2);
        wait::until("a socket to be closed with 1013", SOON, || async { self.passed().closed > 0 }).await;
        Ok(())
    }

    /// Watches the client's sockets.
    fn watch(&self) {
        let passed = Arc::clone(&self.passed);
        self.proxy.set_filter(Direction::ToServer, move |connection, bytes| {
            let mut passed = lock(&passed);
            if bytes.starts_with(b"GET /v1/node/ws") {
                passed.upgrades.insert(connection);
            } else if passed.loses_registration && passed.upgrades.contains(&connection) {
                return Verdict::DropThenStall;
            }
            Verdict::Forward
        });
        let passed = Arc::clone(&self.passed);
        self.proxy.set_filter(Direction::ToClient, move |connection, bytes| {
            let mut passed = lock(&passed);
            if passed.upgrades.contains(&connection) {
                passed.refused += usize::from(bytes.starts_with(b"HTTP/1.1 503"));
                if bytes.ends_with(NOT_REGISTERED) {
                    passed.closed += 1;
                    passed.loses_registration = false;
                }
            }
            Verdict::Forward
        });
    }

    /// Runs a client's script, which asks for the fault while its client is connected.
    async fn run(&self, script: Script) -> Result<()> {
        let script = script.env("RELAY_FRONT", self.front()).env("RELAY_OTHER", self.stack.gateway(0).url());
        let script = script.env("RELAY_KEY", self.workspace.token()).env("RELAY_REFUSED", "1");
        let ended = script.run(async |request| match request.0.as_str() {
            "kill -9 the gateway" => self.refuse().await,
            "let the client connect" => self.admit().await,
            // The script itself checks what arrives.
            _ => Ok(()),
        });
        ended.await.inspect_err(|_| println!("{}", self.stack.logs(30)))
    }

    /// Runs a broker of this release with an agent in a terminal.
    async fn run_broker(&self, release: BrokerRelease) -> Result<()> {
        let lead = self.workspace.as_agent(&self.workspace.register_agent("lead").await?);
        let script = AgentScript::write(self.stack.state_dir(), "w1")?;
        let dir = self.stack.state_dir().join("broker");
        let broker = Broker::start_release(release, &self.front(), self.workspace.token(), "box", &dir).await?;
        broker.spawn("w1", &script).await?;
        let mut sent = Vec::new();
        for number in 1..=3 {
            if number == 2 {
                self.refuse().await?;
            }
            let text = format!("text-{number}");
            lead.post_message("general", &text).await?.success()?;
            sent.push(text);
            if number == 2 {
                self.admit().await?;
            }
            let heard = wait::until_ok("the message in the terminal", SOON, || async {
                let lines = script.received_lines();
                ensure!(texts(&lines) == sent, "the command was given {lines:?}");
                anyhow::Ok(())
            });
            heard.await.inspect_err(|_| println!("the broker's log ends:\n{}", broker.log_tail(60)))?;
        }
        ensure!(broker.is_running(), "the broker has ended");
        Ok(())
    }
}

fn lock(passed: &Mutex<Passed>) -> MutexGuard<'_, Passed> {
    passed.lock().unwrap_or_else(PoisonError::into_inner)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_javascript_sdk_comes_back_after_refusals() -> Result<()> {
    Scene::start().await?.run(Script::node("failover.mjs").await?).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_agent_relay_sdk_comes_back_after_refusals() -> Result<()> {
    Scene::start().await?.run(Script::node("failover_agent_relay.mjs").await?).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_python_sdk_comes_back_after_refusals() -> Result<()> {
    Scene::start().await?.run(Script::python("failover.py").await?).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broker_9_comes_back_after_refusals() -> Result<()> {
    Scene::start().await?.run_broker(BrokerRelease::V9).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broker_12_comes_back_after_refusals() -> Result<()> {
    Scene::start().await?.run_broker(BrokerRelease::V12).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rust_sdk_comes_back_after_refusals() -> Result<()> {
    let scene = Scene::start().await?;
    let options = |base: &str| RelayCastOptions::new(scene.workspace.token()).with_base_url(base);
    let (here, there) =
        (RelayCast::new(options(&scene.front()))?, RelayCast::new(options(scene.stack.gateway(0).url()))?);
    let agent = |name: &str| {
        let agent_type = Some("agent".to_owned());
        CreateAgentRequest { name: name.to_owned(), agent_type, persona: None, metadata: None }
    };
    let ada = there.as_agent(there.register_agent(agent("ada")).await?.token)?;
    let mut bob = here.as_agent(there.register_agent(agent("bob")).await?.token)?;
    ada.create_channel(CreateChannelRequest { name: "plans".to_owned(), topic: None, metadata: None }).await?;
    bob.join_channel("plans").await?;
    bob.connect().await?;
    let mut events = bob.subscribe_events()?;
    for text in ["before", "meanwhile", "after"] {
        if text == "meanwhile" {
            scene.refuse().await?;
        }
        ada.send("#plans", text, None, None, None).await?;
        if text == "meanwhile" {
            scene.admit().await?;
        }
        let received = loop {
            let event = tokio::time::timeout(SOON, events.recv()).await.context("no message")?;
            let event = serde_json::to_value(event.context("the client's stream")?)?;
            if let Some(text) = event["message"]["text"].as_str() {
                break text.to_owned();
            }
        };
        ensure!(received == text, "{received} instead of {text}");
    }
    bob.disconnect().await;
    Ok(())
}
