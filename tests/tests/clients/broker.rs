//! `agent-relay-broker` 12.4.1 from npm, unmodified: agents in terminals, a restarted broker, a killed gateway.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use relay_acceptance::chaos::{database::Database, sender::posted_message_id};
use relay_acceptance::clients::{AgentScript, Broker, ClientHistory, Front, Position};
use relay_acceptance::golden::Tapped;
use relay_testkit::client::{Api, Reply};
use relay_testkit::history::Losses;
use relay_testkit::stack::Stack;
use relay_testkit::{shared, wait};
use reqwest::Method;
use serde_json::json;

const NODE: &str = "box";
const AGENT: &str = "w1";
/// The broker acks a message once it is echoed and the terminal is quiet: up to 11 s.
const HEARD_WITHIN: Duration = Duration::from_secs(45);

/// Workspace with an agent that posts through the surviving gateway.
struct Lead {
    workspace: Api,
    api: Api,
    history: ClientHistory,
}

impl Lead {
    async fn new(gateway: &str) -> Result<Self> {
        let workspace = Api::create_workspace(gateway, "broker").await?;
        let lead = workspace.register_agent("lead").await?;
        Ok(Self { api: workspace.as_agent(&lead), workspace, history: ClientHistory::new(AGENT) })
    }

    /// Waits until the broker has enrolled its node, which it does after its local API answers.
    async fn wait_for_node(&self) -> Result<()> {
        let path = format!("/v1/nodes/{NODE}");
        wait::until_ok("the broker's node", HEARD_WITHIN, || async { self.workspace.get(&path).await?.success() })
            .await?;
        Ok(())
    }

    async fn posts(&self, text: &str) -> Result<()> {
        println!("lead posts {text}");
        let reply = self.api.post_message("general", text).await?;
        self.history.record_post(text, &posted_message_id(&reply)?);
        Ok(())
    }

    /// Returns `delivery_ack_seq` as shown for the node.
    async fn floor(&self) -> Result<i64> {
        let agents = self.workspace.get(&format!("/v1/nodes/{NODE}/agents")).await?.success()?;
        let agents = agents.as_array().context("a list of agents")?;
        let agent = agents.iter().find(|agent| agent["agent_name"] == AGENT).context("the agent is not on the node")?;
        agent["delivery_ack_seq"].as_i64().context("a number")
    }

    async fn agent_id(&self) -> Result<String> {
        let agent = self.workspace.get(&format!("/v1/agents/{AGENT}")).await?.success()?;
        Ok(agent["id"].as_str().context("an id")?.to_owned())
    }

    /// Waits until the agent's command has received `text`, and everything up to `floor` is acked.
    async fn wait_for_text(&self, broker: &Broker, script: &AgentScript, text: &str, floor: i64) -> Result<()> {
        let what = format!("{text} in the terminal, acked up to {floor}");
        let heard = wait::until_ok(&what, HEARD_WITHIN, || async {
            ensure!(script.received_lines().contains(text), "the command was given {:?}", script.received_lines());
            let known = self.floor().await?;
            let position = broker.position(AGENT).await?;
            ensure!(known == floor, "delivery_ack_seq is {known}, the broker is at {position:?}");
            // The broker sends its ack before it records it.
            let acked = position.map(|position| position.acked);
            ensure!(acked == Some(floor), "the broker is at {position:?}");
            Ok::<_, anyhow::Error>(())
        });
        heard.await.inspect_err(|_| println!("the broker's log ends:\n{}", broker.log_tail(60)))?;
        println!("{text} was heard; acked up to {floor}");
        Ok(())
    }
}

/// Returns the lines with these names in the order of arrival.
pub(super) fn texts(heard: &str) -> Vec<&str> {
    heard.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with("text-"))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_hosts_an_agent_through_restarts_of_itself_and_of_its_gateway() -> Result<()> {
    let stack = Stack::builder().gateways(2).start().await?;
    through_restarts(&stack).await.inspect_err(|_| println!("{}", stack.logs(40)))
}

async fn through_restarts(stack: &Stack) -> Result<()> {
    let (victim, other) = (stack.gateway(0), stack.gateway(1));
    let front = Front::start(&[victim.url(), other.url()]).await?;
    let lead = Lead::new(other.url()).await?;
    let gateways = Tapped::new([front.url()]).await?;
    let dir = stack.state_dir().join("broker");
    let script = AgentScript::write(stack.state_dir(), AGENT)?;
    let start = || Broker::start(gateways.urls()[0], lead.workspace.token(), NODE, &dir);

    let broker = start().await?;
    lead.wait_for_node().await?;
    broker.spawn(AGENT, &script).await?;
    let agent_id = lead.agent_id().await?;
    lead.posts("text-1").await?;
    lead.posts("text-2").await?;
    lead.wait_for_text(&broker, &script, "text-2", 2).await?;
    let screen = broker.screen(AGENT).await?.replace('\n', "");
    assert!(screen.contains("text-1") && screen.contains("lead"), "the terminal shows {screen}");

    println!("the broker is restarted, and with it the agent");
    broker.terminate().await?;
    lead.posts("text-3").await?;
    let broker = start().await?;
    broker.spawn(AGENT, &script).await?;
    assert_eq!(lead.agent_id().await?, agent_id, "the same agent came back");
    lead.posts("text-4").await?;
    lead.wait_for_text(&broker, &script, "text-4", 4).await?;

    println!("the broker's gateway is killed");
    assert_eq!(front.current(), 0);
    victim.kill9();
    lead.posts("text-5").await?;
    lead.posts("text-6").await?;
    lead.wait_for_text(&broker, &script, "text-6", 6).await?;
    assert_eq!(front.current(), 1);

    println!("the broker is killed");
    broker.kill9();
    lead.posts("text-7").await?;
    let broker = start().await?;
    broker.spawn(AGENT, &script).await?;
    assert_eq!(lead.agent_id().await?, agent_id, "the same agent came back");
    lead.wait_for_text(&broker, &script, "text-7", 7).await?;
    assert_eq!(broker.position(AGENT).await?, Some(Position { acked: 7, received: 7 }));
    assert!(broker.is_running());

    let heard = script.received_lines();
    let expected: Vec<String> = (1..=7).map(|n| format!("text-{n}")).collect();
    assert_eq!(texts(&heard), expected, "each once and in order, over three broker processes:\n{heard}");
    let database = Database::connect(stack.database_url())?;
    lead.history.judge(gateways.recording(), &database, &lead.workspace, Losses::None).await?;
    gateways.compare("broker")
}

async fn spawn_again(workspace: &Api, key: &str, cli: &str) -> Result<Reply> {
    let body = json!({ "name": AGENT, "type": "agent", "auto_join_general": false, "metadata": { "cli": cli } });
    workspace.call(Method::POST, "/v1/agents", Some(body), &[("idempotency-key", key)]).await
}

#[tokio::test]
async fn a_spawn_restores_an_agent_that_is_not_running() -> Result<()> {
    let engine = shared().await;
    let workspace = Api::create_workspace(engine.any_gateway(), "respawn").await?;
    let agent = workspace.register_agent(AGENT).await?;
    let taken = |reply: Reply| reply.refused(409, "agent_already_exists");

    taken(spawn_again(&workspace, "some-other-key", "sh").await?)?;
    let answer = spawn_again(&workspace, "relay-spawn:1", "sh").await?;
    assert_eq!(answer.status, 201);
    assert!(answer.headers.get("idempotency-replayed").is_none());
    let spawned = answer.success()?;
    assert_eq!(spawned["id"], agent.id.as_str());
    let token = spawned["token"].as_str().context("a token")?;
    assert_ne!(token, agent.token);
    workspace.with_token(&agent.token).get("/v1/agent").await?.refused(401, "agent_token_invalid")?;

    let socket = workspace.with_token(token).direct_socket().await?;
    taken(spawn_again(&workspace, "relay-spawn:2", "sh").await?)?;
    taken(workspace.post("/v1/agents", json!({ "name": AGENT })).await?)?;
    let again = spawn_again(&workspace.at(engine.any_gateway()), "relay-spawn:1", "sh").await?;
    assert_eq!(again.headers.get("idempotency-replayed").map(|value| value.as_bytes()), Some(&b"true"[..]));
    assert_eq!(again.success()?["id"], agent.id.as_str(), "the same key is answered the same way");
    spawn_again(&workspace, "relay-spawn:1", "bash").await?.refused(409, "idempotency_key_reused")?;

    drop(socket);
    wait::until_ok("the agent to be let go", Duration::from_secs(20), || async {
        spawn_again(&workspace, "relay-spawn:3", "sh").await?.success()
    })
    .await?;
    Ok(())
}
