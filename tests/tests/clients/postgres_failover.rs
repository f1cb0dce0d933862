//! Published clients, unmodified, while Postgres fails over: everything arrives in order, once. With a standby that
//! lags, the engine finds what it lacks in JetStream.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::{
    chaos::{database::Database, sender::posted_message_id},
    clients::{AgentScript, Broker, BrokerRelease, ClientHistory, Script},
    golden::Tapped,
};
use relay_testkit::{client::Api, history::Losses, proxy::TcpProxy, servers::Postgres, stack::Stack, wait};
use relaycast::{CreateAgentRequest, CreateChannelRequest, RelayCast, RelayCastOptions, WorkspaceProvenance};

use super::broker::texts;

/// Limit for a loaded machine.
const RECOVERED_WITHIN: Duration = Duration::from_secs(60);

/// State of the standby when the primary is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standby {
    /// It has everything that was accepted.
    Synchronous,
    /// It lacks everything since [`Installation::hold_back`].
    Lagging,
}

/// Two gateways whose Postgres has a standby.
struct Installation {
    stack: Stack,
    standby: Postgres,
    state: Standby,
    replication: TcpProxy,
    /// Taps in front of the gateways, for the client and for the posts to it.
    gateways: Tapped<2>,
    /// Time from the promotion until every gateway took writes.
    service_after: OnceLock<Duration>,
}

impl Installation {
    async fn start(state: Standby) -> Result<Self> {
        let stack = Stack::builder().gateways(2).through_proxies(true).start().await?;
        let primary = stack.postgres();
        let replication = TcpProxy::start(&primary.address())?;
        let standby = primary.start_standby(&stack.state_dir().join("standby"), &replication.address()).await?;
        if state == Standby::Synchronous {
            primary.require_standby().await?;
        }
        let gateways = Tapped::new([0, 1].map(|gateway| stack.gateway(gateway).url())).await?;
        Ok(Self { stack, standby, state, replication, gateways, service_after: OnceLock::new() })
    }

    fn databases(&self) -> Result<[Database; 2]> {
        Ok([Database::connect(self.stack.database_url())?, Database::connect(&self.standby.url_of("relay"))?])
    }

    /// Lets a lagging standby have what was committed by now, and nothing after it.
    async fn hold_back(&self) -> Result<()> {
        if self.state == Standby::Lagging {
            let [primary, standby] = self.databases()?;
            standby.wait_replicated(&primary, RECOVERED_WITHIN).await?;
            self.replication.blackhole();
        }
        Ok(())
    }

    /// Kills the primary, promotes the standby, and waits until every gateway takes writes.
    async fn fail_over(&self) -> Result<()> {
        let [primary, standby] = self.databases()?;
        let (has, replicated) = (primary.messages().await?.len(), standby.messages().await?.len());
        ensure!(self.state == Standby::Synchronous || replicated < has, "the standby has all {has} messages");
        self.stack.postgres().kill9();
        self.standby.promote().await?;
        self.stack.postgres_proxy().switch_to(&self.standby.address())?;
        let promoted = Instant::now();
        for gateway in self.stack.gateways() {
            let name = format!("a write to be accepted by {}", gateway.name());
            wait::until_ok(&name, RECOVERED_WITHIN, || Api::create_workspace(gateway.url(), "after the failover"))
                .await?;
        }
        self.service_after.get_or_init(|| promoted.elapsed());
        Ok(())
    }

    /// Judges the history of the only client, in the workspace with this key, and prints its figures.
    async fn judge(&self, client: &str, history: &ClientHistory, workspace_key: &str) -> Result<()> {
        let ([_, standby], passed) = (self.databases()?, self.gateways.recording());
        let workspace = Api::new(self.stack.gateway(0).url(), workspace_key);
        // What the standby lacks is recovered from JetStream, so nothing is lost.
        history.judge(passed, &standby, &workspace, Losses::None).await?;
        let fault = match self.state {
            Standby::Synchronous => "synchronous standby",
            Standby::Lagging => "standby that lags",
        };
        let service_after = *self.service_after.get().context("no failover")?;
        history.print_row(&format!("primary killed, {fault}, {client}"), service_after, passed);
        Ok(())
    }

    /// Runs a client's script, which asks for a fault while its client is connected.
    async fn run(&self, client: &str, mut script: Script) -> Result<()> {
        let [front, other] = self.gateways.urls();
        let workspace = Api::create_workspace(other, "postgres-failover").await?;
        script = script.env("RELAY_FRONT", front).env("RELAY_OTHER", other).env("RELAY_KEY", workspace.token());
        if self.state == Standby::Lagging {
            script = script.env("RELAY_STANDBY_LAGS", "1");
        }
        let history = ClientHistory::new("ada");
        let done = script.run(async |request| match request.0.as_str() {
            "hold the standby back" => self.hold_back().await,
            "kill -9 the gateway" => self.fail_over().await,
            _ => history.record_report(&request).map(drop),
        });
        done.await.inspect_err(|_| println!("{}", self.stack.logs(30)))?;
        self.judge(client, &history, workspace.token()).await
    }

    /// Runs a broker of this release with an agent in a terminal.
    async fn run_broker(&self, release: BrokerRelease) -> Result<()> {
        let [front, other] = self.gateways.urls();
        let workspace = Api::create_workspace(other, "postgres-failover").await?;
        let lead = workspace.as_agent(&workspace.register_agent("lead").await?);
        let script = AgentScript::write(self.stack.state_dir(), "w1")?;
        let dir = self.stack.state_dir().join("broker");
        let broker = Broker::start_release(release, front, workspace.token(), "box", &dir).await?;
        broker.spawn("w1", &script).await?;
        self.hold_back().await?;
        let (history, mut sent) = (ClientHistory::new("w1"), Vec::new());
        for number in 0..10 {
            if number == 5 {
                self.fail_over().await?;
            }
            let text = format!("text-{number}");
            history.record_post(&text, &posted_message_id(&lead.post_message("general", &text).await?)?);
            sent.push(text);
            let heard = wait::until_ok("the message in the terminal", RECOVERED_WITHIN, || async {
                let lines = script.received_lines();
                ensure!(texts(&lines) == sent, "the command was given {lines:?}");
                anyhow::Ok(())
            });
            heard.await.inspect_err(|_| println!("the broker's log ends:\n{}", broker.log_tail(60)))?;
        }
        ensure!(broker.is_running(), "the broker has ended");
        let client = match release {
            BrokerRelease::V9 => "broker 9.1.6",
            BrokerRelease::V12 => "broker 12.4.1",
        };
        self.judge(client, &history, workspace.token()).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_javascript_sdk_survives_a_failover_of_postgres() -> Result<()> {
    Installation::start(Standby::Synchronous).await?.run("@relaycast/sdk", Script::node("failover.mjs").await?).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_javascript_sdk_survives_a_failover_to_a_lagging_standby() -> Result<()> {
    Installation::start(Standby::Lagging).await?.run("@relaycast/sdk", Script::node("failover.mjs").await?).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_agent_relay_sdk_survives_a_failover_of_postgres() -> Result<()> {
    Installation::start(Standby::Synchronous)
        .await?
        .run("@agent-relay/sdk", Script::node("failover_agent_relay.mjs").await?)
        .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_agent_relay_sdk_survives_a_failover_to_a_lagging_standby() -> Result<()> {
    Installation::start(Standby::Lagging)
        .await?
        .run("@agent-relay/sdk", Script::node("failover_agent_relay.mjs").await?)
        .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_python_sdk_survives_a_failover_of_postgres() -> Result<()> {
    Installation::start(Standby::Synchronous).await?.run("relaycast-sdk", Script::python("failover.py").await?).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_python_sdk_survives_a_failover_to_a_lagging_standby() -> Result<()> {
    Installation::start(Standby::Lagging).await?.run("relaycast-sdk", Script::python("failover.py").await?).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broker_9_survives_a_failover_of_postgres() -> Result<()> {
    Installation::start(Standby::Synchronous).await?.run_broker(BrokerRelease::V9).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broker_12_survives_a_failover_of_postgres() -> Result<()> {
    Installation::start(Standby::Synchronous).await?.run_broker(BrokerRelease::V12).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broker_9_survives_a_failover_to_a_lagging_standby() -> Result<()> {
    Installation::start(Standby::Lagging).await?.run_broker(BrokerRelease::V9).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broker_12_survives_a_failover_to_a_lagging_standby() -> Result<()> {
    Installation::start(Standby::Lagging).await?.run_broker(BrokerRelease::V12).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rust_sdk_survives_a_failover_of_postgres() -> Result<()> {
    rust_sdk(Standby::Synchronous).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rust_sdk_survives_a_failover_to_a_lagging_standby() -> Result<()> {
    rust_sdk(Standby::Lagging).await
}

async fn rust_sdk(standby: Standby) -> Result<()> {
    let installation = Installation::start(standby).await?;
    let [here, there] = installation.gateways.urls();
    let made = RelayCast::create_workspace("postgres-failover", Some(there), WorkspaceProvenance::sdk()).await?;
    let options = |url: &str| RelayCastOptions::new(made.api_key.as_str()).with_base_url(url);
    let (here, there) = (RelayCast::new(options(here))?, RelayCast::new(options(there))?);
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
    installation.hold_back().await?;
    let history = ClientHistory::new("bob");
    let mut received: Vec<String> = Vec::new();
    let mut sent = Vec::new();
    for number in 0..10 {
        if number == 5 {
            installation.fail_over().await?;
        }
        let text = format!("message {number}");
        history.record_post(&text, &ada.send("#plans", &text, None, None, None).await?.id);
        sent.push(text);
        while received.len() < sent.len() {
            let next = tokio::time::timeout(RECOVERED_WITHIN, events.recv()).await;
            let event = next.with_context(|| format!("only {received:?} arrived"))?.context("the client's stream")?;
            let event = serde_json::to_value(event)?;
            // Of a delivery whose ack was lost with the primary, this client shows the repetition.
            let text = event["message"]["text"].as_str().map(str::to_owned);
            received.extend(text.filter(|text| !received.contains(text)));
        }
    }
    assert_eq!(received, sent);
    bob.disconnect().await;
    installation.judge("crate relaycast", &history, made.api_key.as_str()).await
}
