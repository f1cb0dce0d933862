//! Postgres under Patroni, as operators run it: the leader changes under load, and gateways are not restarted.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::chaos::{
    by_run_size,
    database::Database,
    load::{Front, Senders},
    node::Node,
    scene::Scene,
    sender::{Outcome, SentMessage},
};
use relay_testkit::{
    client::Agent,
    history::{Losses, Tick, tick},
    servers::{PatroniCluster, Replication},
    stack::Stack,
};

/// Limit for a loaded machine.
const SOON: Duration = Duration::from_secs(60);
const MEMBERS: usize = 3;
const SENDERS: usize = 4;
const DATABASE: &str = "relay";

/// End of a leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// An operator hands the leadership over.
    Switchover,
    /// `kill -9` of the leader's Postgres.
    PostgresKilled,
    /// `kill -9` of the leader's Postgres and Patroni, so that the others wait for the end of its lease.
    HostKilled,
}

const THREE_OF_EACH: [Fault; 6] = [
    Fault::Switchover,
    Fault::HostKilled,
    Fault::Switchover,
    Fault::PostgresKilled,
    Fault::Switchover,
    Fault::HostKilled,
];

/// Engine at the address that follows the leader of a cluster.
struct Operated {
    scene: Scene,
    cluster: PatroniCluster,
    replication: Replication,
    sam: Agent,
    agents: Vec<Agent>,
    _nodes: [Node; 2],
    /// Longest time from a fault to service.
    service_after: Duration,
    /// Spans in which accepted messages may be lost.
    losses: Vec<Range<Tick>>,
    /// For each of them, the messages that the new leader had before the old one ended.
    known: Vec<HashSet<String>>,
}

impl Operated {
    async fn start(replication: Replication) -> Result<Self> {
        let cluster = PatroniCluster::start(MEMBERS, replication).await?;
        let database = cluster.create_database(DATABASE).await?;
        let scene = Scene::start_with(Stack::builder().database(database)).await?;
        let sam = scene.workspace.register_agent("sam").await?;
        let (broker, mut agents) = scene.broker("broker-ada", &["ada", "eve"], 0).await?;
        let (direct, bob) = scene.direct("bob", 1).await?;
        agents.push(bob);
        let nodes = [broker, direct];
        Ok(Self {
            scene,
            cluster,
            replication,
            sam,
            agents,
            _nodes: nodes,
            service_after: Duration::ZERO,
            losses: Vec::new(),
            known: Vec::new(),
        })
    }

    fn senders(&self) -> Senders {
        let front = Front::new(&self.scene.gateways_from(0));
        Senders::start_persistent(SENDERS, &self.scene.workspace.as_agent(&self.sam), &self.agents, &front)
    }

    /// Ends the leader while messages are sent, and returns when the cluster is complete again.
    async fn pass_through(&mut self, fault: Fault, senders: &Senders) -> Result<()> {
        senders.send(by_run_size(100, 500)).await?;
        let (former, began) = (self.cluster.leader().await?, Instant::now());
        let leader = match fault {
            Fault::Switchover => self.cluster.switch_over().await?,
            Fault::PostgresKilled | Fault::HostKilled => self.kill_leader(fault, former, senders).await?,
        };
        let leads = began.elapsed();
        self.scene.wait_service(&self.sam, "ada", &format!("{fault:?} of {former} at {:?}", tick())).await?;
        let served = began.elapsed();
        println!("{fault:?}: member {leader} leads after {leads:?}, every gateway serves after {served:?}");
        self.service_after = self.service_after.max(served);
        self.cluster.start_again(former)?;
        self.cluster.wait_healthy().await
    }

    /// Kills the leader, with standbys that lag if commits do not wait for them. Returns the next leader.
    async fn kill_leader(&mut self, fault: Fault, former: usize, senders: &Senders) -> Result<usize> {
        let lags_since = tick();
        let mut known = HashMap::new();
        if self.replication == Replication::Asynchronous {
            self.cluster.stall_replication(former);
            senders.send(by_run_size(100, 500)).await?;
            for member in (0..MEMBERS).filter(|member| *member != former) {
                let standby = Database::connect(&self.cluster.url_of_member(member, DATABASE))?;
                let messages: HashSet<String> = standby.messages().await?.into_values().flatten().collect();
                known.insert(member, messages);
            }
        }
        if fault == Fault::HostKilled {
            self.cluster.kill9_leading_host().await?;
        } else {
            self.cluster.kill9_leading_postgres().await?;
        }
        let leader = self.cluster.wait_other_leader(former).await?;
        if self.replication == Replication::Asynchronous {
            self.cluster.restore_replication(former);
            self.known.push(known.remove(&leader).unwrap_or_default());
            self.losses.push(lags_since..tick());
        }
        Ok(leader)
    }

    /// Returns whether a message was accepted and no new leader lacked it. One that was lacked may be restored from the
    /// log, without its idempotency key, and then be known to later leaders.
    fn is_kept(&self, sent: &SentMessage) -> bool {
        let Outcome::Accepted(id) = &sent.outcome else { return false };
        let earlier = self.losses.iter().zip(&self.known).filter(|(span, _)| sent.ticks.0 < span.end);
        earlier.into_iter().all(|(_, known)| known.contains(id))
    }

    /// Judges everything that happened in these faults.
    async fn finish(self, senders: Senders, faults: &[Fault]) -> Result<()> {
        senders.send(by_run_size(100, 500)).await?;
        let report = senders.stop().await?;
        self.scene.wait_settled(&self.agents, SOON).await?;
        let kept: Vec<&SentMessage> = report.sent.iter().filter(|sent| self.is_kept(sent)).collect();
        self.scene.repeat_keys(&self.sam, kept.iter().copied()).await?;
        let losses = if self.losses.is_empty() { Losses::None } else { Losses::Within(&self.losses) };
        let judged = self.scene.judge(&report.sent, losses).await;
        let lost = judged.with_context(|| format!("{}{}", self.cluster.logs(60), self.scene.stack.logs(60)))?;
        let is_lost = |sent: &&SentMessage| matches!(&sent.outcome, Outcome::Accepted(id) if lost.contains(id));
        let wrong: Vec<&SentMessage> = kept.into_iter().filter(is_lost).collect();
        let switchovers = faults.iter().filter(|fault| **fault == Fault::Switchover).count();
        let (kills, replication) = (faults.len() - switchovers, format!("{:?}", self.replication).to_lowercase());
        let fault = format!("{switchovers} switchovers and {kills} kills of the leader, {replication} cluster");
        self.scene.print_row(&fault, self.service_after, &report.sent);
        ensure!(wrong.is_empty(), "a new leader had {wrong:?}");
        Ok(())
    }
}

async fn pass_through(replication: Replication, faults: &[Fault]) -> Result<()> {
    let mut operated = Operated::start(replication).await?;
    let senders = operated.senders();
    for fault in faults {
        let passed = operated.pass_through(*fault, &senders).await;
        passed.with_context(|| format!("{fault:?}\n{}{}", operated.cluster.logs(20), operated.scene.stack.logs(20)))?;
    }
    operated.finish(senders, faults).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_synchronous_cluster_loses_nothing() -> Result<()> {
    let faults = by_run_size(&[Fault::Switchover, Fault::PostgresKilled][..], &THREE_OF_EACH);
    pass_through(Replication::Synchronous, faults).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_asynchronous_cluster_loses_only_what_the_new_leader_lacks() -> Result<()> {
    let faults = by_run_size(&[Fault::PostgresKilled][..], &THREE_OF_EACH);
    pass_through(Replication::Asynchronous, faults).await
}
