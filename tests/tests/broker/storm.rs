//! Crashes of everything while messages flow: the broker, its gateway, its socket, its engine. In full with
//! `cargo xtask chaos --test broker -E 'test(/^storm::/)'`: 20 agents, 5000 messages.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use relay_acceptance::chaos;
use relay_testkit::client::Api;
use relay_testkit::node::{BrokerSpec, FakeAgent, NodeBroker};
use relay_testkit::proxy::TcpProxy;
use relay_testkit::stack::Stack;
use relay_testkit::wait;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::scene::{SOON, floors, is_running};

/// Processes of an agent: its program and two shells, which wait for a command each.
const PROGRAMS: [&str; 5] = ["fake-agent", "sh", "sh", "sleep", "sleep"];

struct Size {
    agents: usize,
    messages: usize,
    /// Crashes, each in a share of the messages.
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

/// Crashes and the numbers of the messages that they follow.
fn plan(size: &Size) -> Vec<(usize, Crash)> {
    let share = size.messages.div_ceil(size.crashes);
    let random = |below: usize| usize::from(uuid::Uuid::new_v4().as_bytes()[0]) % below;
    let first = random(CRASHES.len());
    (0..size.crashes).map(|turn| (turn * share + random(share) + 1, CRASHES[(first + turn) % CRASHES.len()])).collect()
}

/// Posts messages to all agents, as far as it may, and reports the last number that was accepted for each of them.
async fn post(
    sender: Api,
    names: Vec<String>,
    last: usize,
    mut allowed: watch::Receiver<usize>,
    accepted: watch::Sender<usize>,
) -> Result<()> {
    for number in 1..=last {
        allowed.wait_for(|allowed| *allowed >= number).await?;
        for name in &names {
            sender.dm(name, &format!("message-{number}")).await?.success()?;
        }
        accepted.send_replace(number);
    }
    Ok(())
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
async fn all_accepted_messages_arrive_in_order_despite_crashes() -> Result<()> {
    let size = size();
    let stack = Stack::builder().gateways(2).start().await?;
    let proxy = TcpProxy::start(stack.gateway(0).url().trim_start_matches("http://"))?;
    let workspace = Api::create_workspace(stack.gateway(1).url(), "storm").await?;
    let sender = workspace.as_agent(&workspace.register_agent("sender").await?);
    let folder = tempfile::tempdir()?;
    let _leftovers = Leftovers(folder.path());
    let engine = proxy.through(stack.gateway(0).url())?;
    let spec = BrokerSpec::new(&engine, workspace.token(), "storm", folder.path())?;
    let mut broker = NodeBroker::start(&spec).await?;

    let mut agents = Vec::new();
    for number in 0..size.agents {
        let name = format!("agent-{number}");
        let show = ["cooked", "screen", "raw"][number % 3];
        let stubborn = ["--ignore-signals", "--child", "--grandchild"];
        let agent = FakeAgent::new(show, folder.path().join(format!("{name}.log")), &stubborn);
        broker.spawn(&agent, &name, json!({})).await?;
        agents.push((name, agent));
    }
    let (plan, mut settled, began) = (plan(&size), Vec::new(), Instant::now());
    let (allow, allowed) = watch::channel(0);
    let (accept, mut accepted) = watch::channel(0);
    let names = agents.iter().map(|(name, _)| name.clone()).collect();
    let posting = tokio::spawn(post(sender, names, size.messages, allowed, accept));
    for (turn, (number, crash)) in plan.iter().enumerate() {
        allow.send_replace(*number);
        if accepted.wait_for(|accepted| accepted >= number).await.is_err() {
            break;
        }
        println!("{crash:?} at message {number}");
        // During the crash, messages up to the next one are accepted.
        allow.send_replace(plan.get(turn + 1).map_or(size.messages, |(next, _)| *next));
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
    posting.await?.context("post")?;
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
    ensure!(agent_processes(folder.path())?.len() <= agents.len(), "agents of dead brokers run");
    wait::until_ok("all processes of each agent", SOON, || async {
        let running = agent_processes(folder.path())?;
        let are_whole = running.values().all(|programs| programs.iter().map(|(_, name)| name).eq(PROGRAMS));
        ensure!(running.len() == agents.len() && are_whole, "{} agents, and these run: {running:?}", agents.len());
        anyhow::Ok(())
    })
    .await?;
    let typed: usize = agents.iter().map(|(_, agent)| agent.messages().len()).sum();
    let sent = agents.len() * size.messages;
    println!(
        "figures storm: {} agents, {sent} messages, {} crashes, {} typed again after a crash, {:?}",
        agents.len(),
        size.crashes,
        typed - sent,
        began.elapsed(),
    );
    broker.terminate().await?;
    let left = agent_processes(folder.path())?;
    ensure!(left.is_empty(), "these run without a broker: {left:?}");
    Ok(())
}

/// Processes of agents that run in this home, those of dead brokers included: by the start of the agent that they
/// belong to, ids and names of programs, ordered by name.
fn agent_processes(home: &Path) -> Result<HashMap<Vec<u8>, Vec<(u32, String)>>> {
    let home = format!("HOME={}", home.display()).into_bytes();
    let pids = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let mut starts: HashMap<_, Vec<_>> = HashMap::new();
    for pid in pids.filter(|pid| is_running(*pid)) {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let variables: Vec<&[u8]> = environment.split(|byte| *byte == 0).collect();
        let start = variables.iter().find(|name| name.starts_with(b"AGENT_RELAY_SPAWN_ID="));
        if let (Some(start), true) = (start, variables.contains(&home.as_slice())) {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            starts.entry(start.to_vec()).or_default().push((pid, name.trim_end().to_owned()));
        }
    }
    starts.values_mut().for_each(|programs| programs.sort_by(|one, other| one.1.cmp(&other.1)));
    Ok(starts)
}

/// Kills the agents in a home that a test which failed has left: they do not end with their broker.
struct Leftovers<'a>(&'a Path);

impl Drop for Leftovers<'_> {
    fn drop(&mut self) {
        let left: Vec<String> = agent_processes(self.0)
            .into_iter()
            .flatten()
            .flat_map(|(_, programs)| programs)
            .map(|(pid, _)| pid.to_string())
            .collect();
        if !left.is_empty() {
            let _ = Command::new("kill").arg("-9").args(left).status();
        }
    }
}

/// Each process has its messages in order and once, and leaves out only those that processes before it were given: what
/// is proven there is not repeated, even behind a message that is. All but the last process have ended. A repeat was
/// not settled.
fn check(name: &str, agent: &FakeAgent, settled: &[Settled]) -> Result<()> {
    let mut last: HashMap<u32, usize> = HashMap::new();
    let (mut messages, mut typed) = (Vec::new(), HashSet::new());
    for ((pid, _), body) in agent.messages().iter().zip(agent.bodies()) {
        let number: usize = body.trim_start_matches("message-").parse().with_context(|| body.clone())?;
        messages.push((*pid, number));
        let before = last.insert(*pid, number).unwrap_or(0);
        ensure!(number > before, "{name}: message-{number} follows message-{before} in process {pid}");
        let skipped = (before + 1..number).find(|skipped| !typed.contains(skipped));
        if let Some(skipped) = skipped {
            bail!("{name}: message-{number} was typed into {pid}, and message-{skipped} into no process before");
        }
        typed.insert(number);
    }
    let current = messages.last().map(|(pid, _)| *pid);
    let left: Vec<&u32> = last.keys().filter(|pid| Some(**pid) != current && is_running(**pid)).collect();
    ensure!(left.is_empty(), "{name}: {left:?} of dead brokers run");
    settled.iter().try_for_each(|settled| settled.check(name, &messages))
}
