//! The storm: everything is killed and restarted while all senders send, and the guarantees hold (docs/architecture.md,
//! "Invariants").

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use relay_acceptance::chaos::{
    by_run_size,
    ledger::Ledger,
    node::Node,
    random_below,
    scene::Scene,
    sender::{Outcome, SentMessage, Target, send_keyed, send_once, send_twice},
};
use relay_testkit::{
    client::{Agent, Api},
    stack::Stack,
    wait,
};
use tokio::{sync::watch, task::JoinSet};

const BROKERS: usize = 18;
const AGENTS_PER_BROKER: usize = 11;
const DIRECT_NODES: usize = 2;
const CHANNELS: usize = 10;
const SENDERS: usize = 8;
/// Time from the last fault to the last delivery.
const SETTLED_WITHIN: Duration = Duration::from_secs(90);

/// Agents, their nodes, and their channels.
struct Topology {
    nodes: Vec<Node>,
    agents: Vec<Agent>,
    /// Each channel with its members, as positions in `agents`.
    channels: Vec<(String, Vec<usize>)>,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_repeated_or_reordered_while_everything_is_killed() -> Result<()> {
    let scene = Arc::new(Scene::start_with(Stack::builder().through_proxies(true)).await?);
    // One live copy in twenty is lost throughout, in addition to the faults.
    scene.stack.nats_proxy().drop_nats_messages(|subject| subject.starts_with("relay.live.") && random_below(20) == 0);
    let cast = Arc::new(create_topology(&scene).await?);
    println!("{} agents on {} nodes", cast.agents.len(), cast.nodes.len());
    let total = by_run_size(3_000, 20_000);
    let next = Arc::new(AtomicUsize::new(0));
    let rounds = Arc::new(AtomicUsize::new(0));
    let (done, over) = watch::channel(false);
    let mut senders = JoinSet::new();
    let started = Instant::now();
    for number in 0..SENDERS {
        senders.spawn(sender(
            number,
            total,
            Arc::clone(&scene),
            Arc::clone(&cast),
            Arc::clone(&next),
            Arc::clone(&rounds),
        ));
    }
    let faults = tokio::spawn(inject_faults(Arc::clone(&scene), Arc::clone(&cast), over, rounds));
    let mut sent = Vec::new();
    while let Some(one) = senders.join_next().await {
        match one? {
            Ok(some) => sent.extend(some),
            // A fault that could not be repaired explains the failure better.
            Err(error) if faults.is_finished() => bail!("{:?}; then {error:#}", faults.await?),
            Err(error) => return Err(error.context(scene.stack.logs(15))),
        }
    }
    println!("{} messages sent in {:?}", sent.len(), started.elapsed());
    done.send(true)?;
    let counts = faults.await??;

    wait_settled(&scene).await?;
    scene.verify(&sent).await?;
    verify_complete(&scene.ledger, &cast)?;
    scene.ledger.assert_clean();
    let unknown = sent.iter().filter(|one| one.outcome == Outcome::Unknown).count();
    let refused = sent.iter().filter(|one| matches!(one.outcome, Outcome::Refused(_))).count();
    let again = sent.iter().filter(|one| one.attempts > 1).count();
    println!(
        "{counts:?}; {} sent, {unknown} unknown, {refused} refused, {again} tried again; {} frames came again; {:?}",
        sent.len(),
        scene.ledger.repeats(),
        started.elapsed()
    );
    ensure!(
        counts.kills >= 2 && counts.nats >= 1 && counts.postgres >= 1 && counts.resets >= 1,
        "too few faults: {counts:?}"
    );
    Ok(())
}

async fn create_topology(scene: &Scene) -> Result<Topology> {
    let (mut nodes, mut agents) = (Vec::new(), Vec::new());
    for broker in 0..BROKERS {
        let names: Vec<String> = (0..AGENTS_PER_BROKER).map(|n| format!("a{broker}-{n}")).collect();
        let home = scene.gateways_from(broker);
        let (node, hosted) =
            Node::broker(&scene.workspace, &format!("broker-{broker}"), &names, &home, &scene.ledger).await?;
        nodes.push(node);
        agents.extend(hosted);
    }
    for number in 0..DIRECT_NODES {
        let (node, agent) = scene.direct(&format!("direct-{number}"), number).await?;
        nodes.push(node);
        agents.push(agent);
    }
    let mut channels = Vec::new();
    for number in 0..CHANNELS {
        let name = format!("room-{number}");
        scene.workspace.create_channel(&name).await?;
        let members: Vec<usize> = (0..agents.len()).filter(|agent| agent % CHANNELS == number).collect();
        for member in &members {
            scene.workspace.as_agent(&agents[*member]).join(&name).await?;
        }
        channels.push((name, members));
    }
    Ok(Topology { nodes, agents, channels })
}

/// Sends until `total` messages are out in total and every kind of fault has occurred. Half of the messages have an
/// idempotency key and are retried until accepted, some at both gateways at once; the first answer to the others is
/// final.
async fn sender(
    number: usize,
    total: usize,
    scene: Arc<Scene>,
    cast: Arc<Topology>,
    next: Arc<AtomicUsize>,
    rounds: Arc<AtomicUsize>,
) -> Result<Vec<SentMessage>> {
    let mut sent = Vec::new();
    loop {
        let nth = next.fetch_add(1, Ordering::Relaxed);
        if nth >= total && rounds.load(Ordering::Relaxed) > KINDS {
            return Ok(sent);
        }
        let text = format!("m{nth} {}", uuid::Uuid::new_v4());
        let (from, target) = pick_target(&cast);
        let apis: [Api; 2] = [scene.api_of(from, number), scene.api_of(from, number + 1)];
        sent.push(if nth.is_multiple_of(10) {
            send_twice(&apis, &target, &text).await?
        } else if nth.is_multiple_of(2) {
            send_keyed(&apis, &target, &text).await?
        } else {
            let one = send_once(&apis[0], &target, &text).await?;
            if let Outcome::Refused(status) = one.outcome {
                ensure!(status >= 500, "{text} was refused with {status}");
            }
            one
        });
        // About 200 messages a second in total, so that faults hit traffic.
        tokio::time::sleep(Duration::from_millis(20 + random_below(40) as u64)).await;
    }
}

/// Picks a sender and a target: a channel for one in five.
fn pick_target(cast: &Topology) -> (&Agent, Target) {
    if random_below(5) == 0 {
        let (name, members) = &cast.channels[random_below(cast.channels.len())];
        let from = members[random_below(members.len())];
        let others = members.iter().filter(|member| **member != from);
        let others = others.map(|member| cast.agents[*member].name.clone()).collect();
        return (&cast.agents[from], Target::Channel(name.clone(), others));
    }
    let from = random_below(cast.agents.len());
    let to = (from + 1 + random_below(cast.agents.len() - 1)) % cast.agents.len();
    (&cast.agents[from], Target::Dm(cast.agents[to].name.clone()))
}

#[derive(Debug, Default)]
struct Faults {
    kills: u32,
    nats: u32,
    postgres: u32,
    pauses: u32,
    resets: u32,
}

/// Kinds of faults: kill a gateway, restart NATS, restart Postgres, pause a gateway, reset connections.
const KINDS: usize = 5;

/// Injects a fault every few seconds until the senders are done, and repairs it.
async fn inject_faults(
    scene: Arc<Scene>,
    cast: Arc<Topology>,
    mut over: watch::Receiver<bool>,
    rounds: Arc<AtomicUsize>,
) -> Result<Faults> {
    let mut counts = Faults::default();
    for round in 0.. {
        let pause = Duration::from_millis(800 + random_below(2500) as u64);
        if tokio::time::timeout(pause, over.wait_for(|over| *over)).await.is_ok() {
            return Ok(counts);
        }
        // The first rounds cover each kind and a second kill; later rounds are random, half of them kills.
        let kind = if round <= KINDS { round % KINDS } else { random_below(2 * KINDS) };
        match kind {
            1 => {
                counts.nats += 1;
                if random_below(2) == 0 {
                    scene.stack.nats().kill9();
                }
                scene.stack.nats().restart().await.context("restart nats")?;
            }
            2 => {
                counts.postgres += 1;
                if random_below(2) == 0 {
                    scene.stack.postgres().kill9();
                }
                scene.stack.postgres().restart().await.context("restart postgres")?;
            }
            3 => {
                counts.pauses += 1;
                let gateway = scene.stack.gateway(random_below(2));
                gateway.sigstop();
                tokio::time::sleep(Duration::from_millis(500 + random_below(by_run_size(4_000, 12_000)) as u64)).await;
                gateway.sigcont();
            }
            4 => {
                counts.resets += 1;
                // Everything in transit, COMMITs included, loses its connection.
                for _ in 0..5 {
                    scene.stack.postgres_proxy().reset_all();
                    tokio::time::sleep(Duration::from_millis(random_below(50) as u64)).await;
                }
                scene.stack.nats_proxy().reset_all();
            }
            _ => {
                counts.kills += 1;
                let victim = random_below(2);
                let other = scene.workspace.at(scene.stack.gateway(1 - victim).url());
                // Readable positions must not be repeated. While storage is unavailable, none is readable.
                let read = scene.read_floors(&other, cast.nodes.iter().map(Node::name)).await;
                if let Err(error) = read {
                    println!("floors were not readable: {error:#}");
                }
                scene.stack.gateway(victim).kill9();
                tokio::time::sleep(Duration::from_millis(random_below(1000) as u64)).await;
                scene.stack.gateway(victim).restart().await?;
            }
        }
        rounds.fetch_add(1, Ordering::Relaxed);
    }
    Ok(counts)
}

/// Waits until every agent has everything in its mailbox.
async fn wait_settled(scene: &Scene) -> Result<()> {
    let since = Instant::now();
    let all = wait::until_ok("everything to arrive", SETTLED_WITHIN, || async {
        let stands = scene.database.mailbox_positions().await?;
        let behind: Vec<String> = stands
            .iter()
            .filter(|(agent, stand)| scene.ledger.position(agent) != stand.head || stand.ack_floor != stand.head)
            .map(|(agent, stand)| format!("{agent} has {}: {stand:?}", scene.ledger.position(agent)))
            .collect();
        ensure!(behind.is_empty(), "{} behind, such as {:?}", behind.len(), &behind[..behind.len().min(5)]);
        Ok(())
    })
    .await;
    println!("settled {:?} after the last message", since.elapsed());
    all.with_context(|| {
        let down = scene.ledger.nodes_down();
        format!("nodes down: {down:?}; violations: {:?}\n{}", scene.ledger.violations(), scene.stack.logs(15))
    })
}

/// Verifies that every agent has 1..n, all of them messages.
fn verify_complete(ledger: &Ledger, cast: &Topology) -> Result<()> {
    for agent in &cast.agents {
        let frames = ledger.frames(&agent.name);
        let seqs: Vec<u64> = frames.keys().copied().collect();
        ensure!(seqs == (1..=seqs.len() as u64).collect::<Vec<_>>(), "{} has holes", agent.name);
        ensure!(frames.values().all(|frame| frame.text.is_some()), "{} first saw a tombstone", agent.name);
    }
    Ok(())
}
