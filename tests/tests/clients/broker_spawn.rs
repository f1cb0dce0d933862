//! `agent-relay-broker` 12.4.1 from npm, unmodified: agents that the engine spawns and releases, also after a crash of
//! the gateway that held the broker's socket.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use relay_acceptance::chaos::{database::Database, sender::posted_message_id};
use relay_acceptance::clients::{AgentScript, Broker, ClientHistory, Front};
use relay_acceptance::golden::{Recording, Tapped};
use relay_testkit::client::Api;
use relay_testkit::history::Losses;
use relay_testkit::stack::Stack;
use relay_testkit::wait;
use serde_json::{Value, json};

const NODE: &str = "box";
/// Capability that the broker advertises; the input's `cli` selects the command.
const CAPABILITY: &str = "spawn:echo";
/// Time for the broker to start an agent, join channels and inspect the terminal, or to ack a message.
const IN_TIME: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_spawns_and_releases_through_the_engine_and_again_after_its_gateway_died() -> Result<()> {
    let stack = Stack::builder().gateways(2).start().await?;
    twice(&stack).await.inspect_err(|_| println!("{}", stack.logs(40)))
}

async fn twice(stack: &Stack) -> Result<()> {
    let (victim, other) = (stack.gateway(0), stack.gateway(1));
    let front = Front::start(&[victim.url(), other.url()]).await?;
    let workspace = Api::create_workspace(other.url(), "broker-spawn").await?;
    let lead = workspace.as_agent(&workspace.register_agent("lead").await?);
    let gateways = Tapped::new([front.url()]).await?;
    let broker = Broker::start(gateways.urls()[0], workspace.token(), NODE, &stack.state_dir().join("broker")).await?;
    let through = Through { stack, workspace, lead, broker, passed: gateways.recording() };

    assert_eq!(front.current(), 0);
    through
        .run_lifecycle("w1")
        .await
        .inspect_err(|_| println!("the broker's log ends:\n{}", through.broker.log_tail(60)))?;
    println!("the broker's gateway is killed");
    victim.kill9();
    through
        .run_lifecycle("w2")
        .await
        .inspect_err(|_| println!("the broker's log ends:\n{}", through.broker.log_tail(60)))?;
    assert_eq!(front.current(), 1);
    assert!(through.broker.is_running());
    gateways.compare("broker_spawn")
}

struct Through<'a> {
    stack: &'a Stack,
    workspace: Api,
    lead: Api,
    broker: Broker,
    passed: &'a Recording,
}

impl Through<'_> {
    /// Runs spawn, message and release.
    async fn run_lifecycle(&self, name: &str) -> Result<()> {
        let script = AgentScript::write(self.stack.state_dir(), name)?;
        let body = json!({
            "name": name, "capability": CAPABILITY, "cli": script.program(), "args": [], "channels": ["general"],
            "skipRelayPrompt": true,
        });
        let spawned = wait::until_ok("the node to take a spawn", IN_TIME, || async {
            self.lead.post("/v1/agents/spawn", body.clone()).await?.success()
        })
        .await?;
        println!("{name}: {spawned}");
        let done = self.outcome("spawn", &spawned).await?;
        ensure!(done["status"] == "completed", "{done}");
        assert_eq!((&done["output"]["spawned"], &done["output"]["name"]), (&json!(true), &json!(name)), "{done}");

        let hosted = self.workspace.get(&format!("/v1/nodes/{NODE}/agents")).await?.success()?;
        let here = hosted.as_array().context("a list")?.iter().any(|agent| agent["agent_name"] == name);
        ensure!(here, "{name} is not on the roster: {hosted}");
        let text = format!("text-for-{name}");
        let history = ClientHistory::new(name);
        history.record_post(&text, &posted_message_id(&self.lead.post_message("general", &text).await?)?);
        wait::until_ok("the text in the terminal, acked", IN_TIME, || async {
            ensure!(script.received_lines().contains(&text), "the command was given {:?}", script.received_lines());
            let hosted = self.workspace.get(&format!("/v1/nodes/{NODE}/agents")).await?.success()?;
            let agent = hosted.as_array().and_then(|all| all.iter().find(|agent| agent["agent_name"] == name)).cloned();
            ensure!(agent.as_ref().is_some_and(|agent| agent["delivery_ack_seq"] == 1), "{agent:?}");
            Ok::<_, anyhow::Error>(())
        })
        .await?;

        let database = Database::connect(self.stack.database_url())?;
        history.judge(self.passed, &database, &self.workspace, Losses::None).await?;

        let released =
            self.lead.post("/v1/agents/release", json!({ "name": name, "reason": "done" })).await?.success()?;
        let done = self.outcome("release", &released).await?;
        ensure!(done["status"] == "completed" && done["output"]["released"] == true, "{done}");
        wait::until_ok("the agent to be off the roster", IN_TIME, || async {
            let hosted = self.workspace.get(&format!("/v1/nodes/{NODE}/agents")).await?.success()?;
            ensure!(!hosted.to_string().contains(name), "{hosted}");
            let agent = self.workspace.get(&format!("/v1/agents/{name}")).await?.success()?;
            ensure!(agent["status"] == "offline", "{agent}");
            Ok::<_, anyhow::Error>(())
        })
        .await
    }

    async fn outcome(&self, action: &str, ack: &Value) -> Result<Value> {
        let id = ack["invocation_id"].as_str().context("an id")?;
        let path = format!("/v1/actions/{action}/invocations/{id}");
        wait::until_ok("the outcome", IN_TIME, || async {
            let row = self.lead.get(&path).await?.success()?;
            ensure!(row["completed_at"].is_string(), "not yet: {row}");
            Ok::<_, anyhow::Error>(row)
        })
        .await
    }
}
