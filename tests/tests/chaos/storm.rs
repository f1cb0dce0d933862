//! The storm: everything is killed and restarted while everybody sends, and the contract holds.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use relay_acceptance::chaos::{
    below,
    ledger::Ledger,
    node::Node,
    scene::Scene,
    sender::{Outcome, Sent, Target, send_keyed, send_once, send_twice},
    sized,
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
/// From the last fault until everything has arrived.
const SETTLED_WITHIN: Duration = Duration::from_secs(90);

/// The agents, the nodes that host them, and the channels they share.
struct Cast {
    nodes: Vec<Node>,
    agents: Vec<Agent>,
    /// Each channel with its members, as positions in `agents`.
    channels: Vec<(String, Vec<usize>)>,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_repeated_or_reordered_while_everything_is_killed() -> Result<()> {
    let scene = Arc::new(Scene::with(Stack::builder().through_proxies(true)).await?);
    // One live copy in twenty is lost throughout, beside what the faults lose.
    scene.stack.nats_proxy().drop_nats_messages(|subject| subject.starts_with("live.") && below(20) == 0);
    let cast = Arc::new(cast(&scene).await?);
    println!("{} agents on {} nodes", cast.agents.len(), cast.nodes.len());
    let total = sized(3_000, 20_000);
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
    let faults = tokio::spawn(faults(Arc::clone(&scene), Arc::clone(&cast), over, rounds));
    let mut sent = Vec::new();
    while let Some(one) = senders.join_next().await {
        match one? {
            Ok(some) => sent.extend(some),
            // A fault that could not be put right explains it better.
            Err(error) if faults.is_finished() => bail!("{:?}; then {error:#}", faults.await?),
            Err(error) => return Err(error.context(scene.stack.logs(15))),
        }
    }
    println!("{} messages sent in {:?}", sent.len(), started.elapsed());
    done.send(true)?;
    let counts = faults.await??;

    settled(&scene).await?;
    scene.judge(&sent).await?;
    whole(&scene.ledger, &cast)?;
    scene.ledger.assert_clean();
    let unknown = sent.iter().filter(|one| one.outcome == Outcome::Unknown).count();
    let refused = sent.iter().filter(|one| matches!(one.outcome, Outcome::Refused(_))).count();
    let again = sent.iter().filter(|one| one.tries > 1).count();
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

async fn cast(scene: &Scene) -> Result<Cast> {
    let (mut nodes, mut agents) = (Vec::new(), Vec::new());
    for broker in 0..BROKERS {
        let names: Vec<String> = (0..AGENTS_PER_BROKER).map(|n| format!("a{broker}-{n}")).collect();
        let home = scene.from(broker);
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
    Ok(Cast { nodes, agents, channels })
}

/// Sends until `total` messages are out, by all senders together, and every kind of fault has met them. Half of the
/// messages carry a key and are tried until accepted, some at both gateways at once; of the others the first answer is
/// final.
async fn sender(
    number: usize,
    total: usize,
    scene: Arc<Scene>,
    cast: Arc<Cast>,
    next: Arc<AtomicUsize>,
    rounds: Arc<AtomicUsize>,
) -> Result<Vec<Sent>> {
    let mut sent = Vec::new();
    loop {
        let nth = next.fetch_add(1, Ordering::Relaxed);
        if nth >= total && rounds.load(Ordering::Relaxed) > KINDS {
            return Ok(sent);
        }
        let text = format!("m{nth} {}", uuid::Uuid::new_v4());
        let (from, target) = draw(&cast);
        let apis: [Api; 2] = [scene.speaker(from, number), scene.speaker(from, number + 1)];
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
        // Some 200 messages a second in all: the faults shall meet traffic.
        tokio::time::sleep(Duration::from_millis(20 + below(40) as u64)).await;
    }
}

/// A sender and a target: a channel for one in five.
fn draw(cast: &Cast) -> (&Agent, Target) {
    if below(5) == 0 {
        let (name, members) = &cast.channels[below(cast.channels.len())];
        let from = members[below(members.len())];
        let others = members.iter().filter(|member| **member != from);
        let others = others.map(|member| cast.agents[*member].name.clone()).collect();
        return (&cast.agents[from], Target::Channel(name.clone(), others));
    }
    let from = below(cast.agents.len());
    let to = (from + 1 + below(cast.agents.len() - 1)) % cast.agents.len();
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

/// Breaks something every few seconds until the senders are done, and puts it right again.
async fn faults(
    scene: Arc<Scene>,
    cast: Arc<Cast>,
    mut over: watch::Receiver<bool>,
    rounds: Arc<AtomicUsize>,
) -> Result<Faults> {
    let mut counts = Faults::default();
    for round in 0.. {
        let pause = Duration::from_millis(800 + below(2500) as u64);
        if tokio::time::timeout(pause, over.wait_for(|over| *over)).await.is_ok() {
            return Ok(counts);
        }
        // The first rounds make sure that each kind occurs, and a second kill; then chance decides: half of it kills.
        let kind = if round <= KINDS { round % KINDS } else { below(2 * KINDS) };
        match kind {
            1 => {
                counts.nats += 1;
                if below(2) == 0 {
                    scene.stack.nats().kill9();
                }
                scene.stack.nats().restart().await.context("restart nats")?;
            }
            2 => {
                counts.postgres += 1;
                if below(2) == 0 {
                    scene.stack.postgres().kill9();
                }
                scene.stack.postgres().restart().await.context("restart postgres")?;
            }
            3 => {
                counts.pauses += 1;
                let gateway = scene.stack.gateway(below(2));
                gateway.sigstop();
                tokio::time::sleep(Duration::from_millis(500 + below(sized(4_000, 12_000)) as u64)).await;
                gateway.sigcont();
            }
            4 => {
                counts.resets += 1;
                // Whatever is in flight, COMMITs included, loses its connection.
                for _ in 0..5 {
                    scene.stack.postgres_proxy().reset_all();
                    tokio::time::sleep(Duration::from_millis(below(50) as u64)).await;
                }
                scene.stack.nats_proxy().reset_all();
            }
            _ => {
                counts.kills += 1;
                let victim = below(2);
                let other = scene.workspace.at(scene.stack.gateway(1 - victim).url());
                // What is readable now must not come back. Storage may just be away: then nothing was readable.
                let read = scene.read_floors(&other, cast.nodes.iter().map(Node::name)).await;
                if let Err(error) = read {
                    println!("floors were not readable: {error:#}");
                }
                scene.stack.gateway(victim).kill9();
                tokio::time::sleep(Duration::from_millis(below(1000) as u64)).await;
                scene.stack.gateway(victim).restart().await?;
            }
        }
        rounds.fetch_add(1, Ordering::Relaxed);
    }
    Ok(counts)
}

/// Waits until every agent has everything that its mailbox holds.
async fn settled(scene: &Scene) -> Result<()> {
    let since = Instant::now();
    let all = wait::until_ok("everything to arrive", SETTLED_WITHIN, || async {
        let stands = scene.database.stands().await?;
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

/// Every agent has 1..n, all of them messages.
fn whole(ledger: &Ledger, cast: &Cast) -> Result<()> {
    for agent in &cast.agents {
        let frames = ledger.frames(&agent.name);
        let seqs: Vec<u64> = frames.keys().copied().collect();
        ensure!(seqs == (1..=seqs.len() as u64).collect::<Vec<_>>(), "{} has holes", agent.name);
        ensure!(frames.values().all(|frame| frame.text.is_some()), "{} first saw a tombstone", agent.name);
    }
    Ok(())
}
