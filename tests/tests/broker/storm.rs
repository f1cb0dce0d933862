//! Crashes of everything while messages flow: the broker, its gateway, its socket, its engine. In full with
//! `cargo xtask chaos --test broker -E 'test(/^storm::/)'`: 20 agents, 5000 messages.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use relay_acceptance::chaos;
use relay_testkit::client::Api;
use relay_testkit::node::{BrokerSpec, FakeAgent, NodeBroker};
use relay_testkit::proxy::TcpProxy;
use relay_testkit::stack::Stack;
use relay_testkit::wait;
use serde_json::json;
use tokio::time::sleep;

use crate::scene::{floors, is_running};

struct Size {
    agents: usize,
    messages: usize,
    /// Crashes, each followed by a share of the messages.
    crashes: usize,
    outage: Duration,
    patience: Duration,
}

fn size() -> Size {
    if chaos::is_full() {
        Size {
            agents: 20,
            messages: 250,
            crashes: 25,
            outage: Duration::from_secs(60),
            patience: Duration::from_secs(600),
        }
    } else {
        Size { agents: 4, messages: 30, crashes: 5, outage: Duration::from_secs(3), patience: Duration::from_secs(90) }
    }
}

#[derive(Debug, Clone, Copy)]
enum Crash {
    Broker,
    Gateway,
    Socket,
    Engine,
}

/// Each kind comes in its turn, in an order and at places that differ from run to run.
const CRASHES: [Crash; 5] = [Crash::Broker, Crash::Socket, Crash::Broker, Crash::Gateway, Crash::Engine];

/// Crashes by the number of the message that they follow.
fn plan(size: &Size) -> HashMap<usize, Crash> {
    let share = size.messages.div_ceil(size.crashes);
    let random = |below: usize| usize::from(uuid::Uuid::new_v4().as_bytes()[0]) % below;
    let first = random(CRASHES.len());
    (0..size.crashes).map(|turn| (turn * share + random(share), CRASHES[(first + turn) % CRASHES.len()])).collect()
}

/// Messages settled when the broker was killed: no later process gets them again.
struct Settled {
    floors: HashMap<String, i64>,
    /// Processes that had typed messages by then.
    processes: HashSet<u32>,
}

impl Settled {
    async fn now(workspace: &Api, agents: &[(String, FakeAgent)]) -> Result<Self> {
        let floors = floors(workspace).await?;
        let pids = agents.iter().flat_map(|(_, agent)| agent.messages().into_iter().map(|(pid, _)| pid));
        Ok(Self { floors, processes: pids.collect() })
    }

    fn check(&self, name: &str, messages: &[(u32, usize)]) -> Result<()> {
        let floor = self.floors.get(name).copied().unwrap_or(0);
        for (pid, number) in messages.iter().filter(|(pid, _)| !self.processes.contains(pid)) {
            let is_repeat = messages.iter().any(|(other, known)| known == number && self.processes.contains(other));
            ensure!(!is_repeat || *number as i64 > floor, "{name}: message-{number} was settled, {pid} has it again");
        }
        Ok(())
    }
}

#[tokio::test]
async fn everything_that_was_accepted_arrives_in_order_whatever_crashes() -> Result<()> {
    let size = size();
    let stack = Stack::builder().gateways(2).start().await?;
    let proxy = TcpProxy::start(stack.gateway(0).url().trim_start_matches("http://"))?;
    let workspace = Api::create_workspace(stack.gateway(1).url(), "storm").await?;
    let sender = workspace.as_agent(&workspace.register_agent("sender").await?);
    let folder = tempfile::tempdir()?;
    let engine = proxy.through(stack.gateway(0).url())?;
    let spec = BrokerSpec::new(&engine, workspace.token(), "storm", folder.path())?;
    let mut broker = NodeBroker::start(&spec).await?;

    let mut agents = Vec::new();
    for number in 0..size.agents {
        let name = format!("agent-{number}");
        let show = ["cooked", "screen", "raw"][number % 3];
        let agent = FakeAgent::new(show, folder.path().join(format!("{name}.log")), &["--ignore-signals"]);
        broker.spawn(&agent, &name, json!({})).await?;
        agents.push((name, agent));
    }
    let (plan, mut settled, began) = (plan(&size), Vec::new(), Instant::now());
    for number in 0..size.messages {
        for (name, _) in &agents {
            sender.dm(name, &format!("message-{}", number + 1)).await?.success()?;
        }
        if let Some(crash) = plan.get(&number) {
            println!("{crash:?} at message {number}");
            match crash {
                Crash::Broker => {
                    settled.push(Settled::now(&workspace, &agents).await?);
                    broker.kill_and_restart().await?;
                }
                Crash::Socket => proxy.reset_all(),
                Crash::Gateway => {
                    stack.gateway(0).kill9();
                    stack.gateway(0).restart().await?;
                }
                Crash::Engine => {
                    proxy.cut();
                    sleep(size.outage).await;
                    proxy.restore();
                }
            }
        }
    }
    for (name, agent) in &agents {
        wait::until_ok("all messages", size.patience, || async {
            let bodies: HashSet<String> = agent.bodies().into_iter().collect();
            ensure!(bodies.len() == size.messages, "{name} has {} of {}", bodies.len(), size.messages);
            anyhow::Ok(())
        })
        .await
        .with_context(|| broker.log_tail(40))?;
        check(name, agent, &settled)?;
    }
    let running = agent_processes(folder.path())?;
    ensure!(running.len() == agents.len(), "{} agents, and these run: {running:?}", agents.len());
    let typed: usize = agents.iter().map(|(_, agent)| agent.messages().len()).sum();
    let sent = agents.len() * size.messages;
    println!(
        "figures storm: {} agents, {sent} messages, {} crashes, {} typed again after a crash, {:?}",
        agents.len(),
        size.crashes,
        typed - sent,
        began.elapsed(),
    );
    Ok(())
}

/// Agents that run in this home, those of dead brokers included.
fn agent_processes(home: &Path) -> Result<Vec<u32>> {
    let home = format!("HOME={}", home.display()).into_bytes();
    let pids = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let is_agent = |pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let variables: Vec<&[u8]> = environment.split(|byte| *byte == 0).collect();
        variables.contains(&home.as_slice()) && variables.iter().any(|name| name.starts_with(b"AGENT_RELAY_SPAWN_ID="))
    };
    Ok(pids.filter(is_agent).filter(|pid| is_running(*pid)).collect())
}

/// Each process has its messages in order and once, and all but the last one have ended. A repeat was not settled.
fn check(name: &str, agent: &FakeAgent, settled: &[Settled]) -> Result<()> {
    let mut last: HashMap<u32, usize> = HashMap::new();
    let mut messages = Vec::new();
    for ((pid, _), body) in agent.messages().iter().zip(agent.bodies()) {
        let number: usize = body.trim_start_matches("message-").parse().with_context(|| body.clone())?;
        messages.push((*pid, number));
        let before = last.insert(*pid, number).unwrap_or(0);
        ensure!(number > before, "{name}: message-{number} follows message-{before} in process {pid}");
    }
    let current = messages.last().map(|(pid, _)| *pid);
    let left: Vec<&u32> = last.keys().filter(|pid| Some(**pid) != current && is_running(**pid)).collect();
    ensure!(left.is_empty(), "{name}: {left:?} of dead brokers run");
    settled.iter().try_for_each(|settled| settled.check(name, &messages))
}
