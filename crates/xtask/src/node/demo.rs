//! The demo: three agents get messages, the broker is killed in between, each message arrives in order.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use relay_stack::client::Api;
use relay_stack::node::NodeBroker;
use relay_stack::wait;
use serde_json::{Value, json};

use crate::dev::{RunningEngine, register_or_rotate};

const SENDER: &str = "demo-ada";
/// A verdict takes 2 s for a silent agent, and longer behind a flood.
const SOON: Duration = Duration::from_secs(40);
/// Each agent's name, with the arguments of the program that plays it.
const AGENTS: [(&str, &[&str]); 3] =
    [("demo-screen", &["screen"]), ("demo-silent", &["mute"]), ("demo-chatty", &["cooked", "--flood", "20000"])];
const FIRST_ROUND: [&str; 2] = ["the build is green", "please review the parser"];
const SECOND_ROUND: [&str; 2] = ["are you still there?", "then tag a release"];

pub(super) async fn run(broker: &mut NodeBroker, engine: &RunningEngine, fake_agent: &Path) -> Result<()> {
    // Another gateway than the broker's, if there is one.
    let gateway = engine.gateways.last().context("no gateway")?;
    let workspace = Api::new(gateway, &engine.workspace_key);
    let sender = workspace.as_agent(&register_or_rotate(&workspace, SENDER).await?);
    println!("Demo: {SENDER} writes to three agents in terminals: full-screen, silent, and one that talks a lot.\n");
    for (name, args) in AGENTS {
        spawn(broker, fake_agent, name, args).await?;
    }
    let demo = Demo { workspace, sender };
    print_header();
    demo.round(broker, &FIRST_ROUND).await?;

    println!("\n  kill -9 of the broker (pid {}), and a start on the same directory", broker.pid());
    broker.kill_and_restart().await?;
    broker.wait_connected().await?;
    wait::until_ok("the agents to run again", SOON, || async {
        let names = broker.names().await?;
        ensure!(names.len() == AGENTS.len(), "{names:?}");
        anyhow::Ok(())
    })
    .await?;
    println!("  the broker is back (pid {}) and has started its agents again\n", broker.pid());
    print_header();
    demo.round(broker, &SECOND_ROUND).await?;
    println!("\n  level L0: written, L1: echoed, L2: in context, L3: acted on. A silent program stays at L0.");
    Ok(())
}

async fn spawn(broker: &NodeBroker, fake_agent: &Path, name: &str, args: &[&str]) -> Result<()> {
    let log = broker.folder().join(format!("{name}.log"));
    let mut words = args.to_vec();
    let log = log.to_str().context("the folder's name is not UTF-8")?;
    words.extend(["--log", log]);
    let body = json!({ "name": name, "cli": fake_agent, "args": words, "channels": ["general"] });
    let spawned = broker.call("POST", "/api/spawn", Some(body)).await?;
    ensure!(spawned.is_success(), "{name} could not be started: {}", spawned.body);
    println!("  {name} runs as pid {}: fake-agent {}", spawned.body["pid"], args.join(" "));
    Ok(())
}

struct Demo {
    workspace: Api,
    sender: Api,
}

impl Demo {
    async fn round(&self, broker: &NodeBroker, texts: &[&str]) -> Result<()> {
        for text in texts {
            for (name, _) in AGENTS {
                self.send(broker, name, text).await?;
            }
        }
        Ok(())
    }

    /// Posts one message and prints its verdict.
    async fn send(&self, broker: &NodeBroker, name: &str, text: &str) -> Result<()> {
        let posted = self.sender.dm(name, text).await?.success()?;
        let id = posted["message"]["id"].as_str().context("the answer has no message id")?;
        let seq = self.mailbox(name).await?["last_seq"].as_u64().context("the mailbox has no last_seq")?;
        let verdict = wait::until_ok("the verdict", SOON, || async {
            event(broker, name, "delivery_verified", id).await?.context("no verdict yet")
        })
        .await?;
        let typed = event(broker, name, "delivery_injected", id).await?.is_some();
        let floor = wait::until_ok("the ack", SOON, || async {
            let floor = self.mailbox(name).await?["ack_floor"].as_u64().context("the mailbox has no ack_floor")?;
            ensure!(floor >= seq, "the floor is {floor}");
            anyhow::Ok(floor)
        })
        .await?;
        let word = |key: &str| verdict[key].as_str().unwrap_or("?").to_owned();
        println!(
            "  {name:<12} {seq:>4}  {:<5}  {:<5}  {:<9} {:>6}  {floor:>9}  {text:?}",
            if typed { "yes" } else { "no" },
            word("level"),
            word("method"),
            verdict["latency_ms"],
        );
        Ok(())
    }

    async fn mailbox(&self, name: &str) -> Result<Value> {
        let mailboxes = self.workspace.get("/v1/observe/mailboxes?limit=200").await?.success()?;
        let mailboxes = mailboxes.as_array().context("no list of mailboxes")?;
        let own = mailboxes.iter().find(|mailbox| mailbox["agent_name"] == name);
        own.cloned().with_context(|| format!("{name} has no mailbox"))
    }
}

fn print_header() {
    println!("  agent         seq  typed  level  method        ms  ack floor  message");
}

/// The event of one kind about one message, if it has come.
async fn event(broker: &NodeBroker, name: &str, kind: &str, message: &str) -> Result<Option<Value>> {
    let events = broker.events(name, kind).await?;
    Ok(events.into_iter().find(|event| event["event_id"] == message))
}
