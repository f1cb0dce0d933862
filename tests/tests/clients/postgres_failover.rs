//! Published clients, unmodified, while Postgres fails over to a synchronous standby: everything arrives in order, once.

use std::time::Duration;

use anyhow::{Context as _, Result};
use relay_acceptance::clients::Script;
use relay_testkit::{client::Api, servers::Postgres, stack::Stack, wait};
use relaycast::{CreateAgentRequest, CreateChannelRequest, RelayCast, RelayCastOptions, WorkspaceProvenance};

/// Limit for a loaded machine.
const RECOVERED_WITHIN: Duration = Duration::from_secs(60);

/// Two gateways whose Postgres has a standby.
struct Installation {
    stack: Stack,
    standby: Postgres,
}

impl Installation {
    async fn start() -> Result<Self> {
        let stack = Stack::builder().gateways(2).through_proxies(true).start().await?;
        let primary = stack.postgres();
        let standby = primary.start_standby(&stack.state_dir().join("standby"), &primary.address()).await?;
        primary.require_standby().await?;
        Ok(Self { stack, standby })
    }

    /// Kills the primary, promotes the standby, and waits until every gateway takes writes.
    async fn fail_over(&self) -> Result<()> {
        self.stack.postgres().kill9();
        self.standby.promote().await?;
        self.stack.postgres_proxy().switch_to(&self.standby.address())?;
        for gateway in self.stack.gateways() {
            let name = format!("a write to be accepted by {}", gateway.name());
            wait::until_ok(&name, RECOVERED_WITHIN, || Api::create_workspace(gateway.url(), "after the failover"))
                .await?;
        }
        Ok(())
    }

    /// Runs a client's script, which asks for a fault while its client is connected.
    async fn run(&self, script: Script) -> Result<()> {
        let (front, other) = (self.stack.gateway(0).url(), self.stack.gateway(1).url());
        let workspace = Api::create_workspace(other, "postgres-failover").await?;
        let script = script.env("RELAY_FRONT", front).env("RELAY_OTHER", other).env("RELAY_KEY", workspace.token());
        let done = script.run(async |request| {
            assert_eq!(request.0, "kill -9 the gateway");
            self.fail_over().await
        });
        done.await.inspect_err(|_| println!("{}", self.stack.logs(30)))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_javascript_sdk_survives_a_failover_of_postgres() -> Result<()> {
    Installation::start().await?.run(Script::node("failover.mjs").await?).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_python_sdk_survives_a_failover_of_postgres() -> Result<()> {
    Installation::start().await?.run(Script::python("failover.py").await?).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rust_sdk_survives_a_failover_of_postgres() -> Result<()> {
    let installation = Installation::start().await?;
    let (here, there) = (installation.stack.gateway(0).url(), installation.stack.gateway(1).url());
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
    let mut received = Vec::new();
    let mut sent = Vec::new();
    for number in 0..10 {
        if number == 5 {
            installation.fail_over().await?;
        }
        let text = format!("message {number}");
        ada.send("#plans", &text, None, None, None).await?;
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
    Ok(())
}
