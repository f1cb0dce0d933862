//! Failover to a standby of Postgres, under load and with running gateways.

use std::{
    collections::HashSet,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::{
    chaos::{
        bulk, by_run_size,
        database::Database,
        load::{Front, Senders},
        node::Node,
        scene::Scene,
        sender::{Outcome, SentMessage, Target, send_keyed},
    },
    relayctl::relayctl_with,
};
use relay_testkit::{
    client::Agent,
    history::{Losses, tick},
    proxy::TcpProxy,
    servers::Postgres,
    stack::{Service, Stack},
    wait,
};
use serde_json::Value;

/// Limit for a loaded machine; the measured times are printed.
const SOON: Duration = Duration::from_secs(60);
/// A longer recovery is explained by the logs.
const EXPECTED_WITHIN: Duration = Duration::from_secs(10);
const SENDERS: usize = 4;

/// Way from the engine to the proxy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Direct,
    /// Through a pooler, whose connections to the engine outlive the failover.
    Pooled,
}

impl Way {
    const fn suffix(self) -> &'static str {
        match self {
            Self::Direct => "",
            Self::Pooled => ", engine behind PgBouncer",
        }
    }
}

/// Engine behind a proxy, its primary, and a standby that follows the primary through a proxy of its own.
pub(super) struct Replicated {
    pub(super) scene: Scene,
    pub(super) standby: Postgres,
    pub(super) replication: TcpProxy,
    pub(super) sam: Agent,
    agents: Vec<Agent>,
    nodes: Vec<Node>,
}

impl Replicated {
    pub(super) async fn start() -> Result<Self> {
        Self::start_with(Way::Direct).await
    }

    async fn start_with(way: Way) -> Result<Self> {
        let pooled = way == Way::Pooled;
        let scene = Scene::start_with(Stack::builder().through_proxies(true).pooler(pooled)).await?;
        let sam = scene.workspace.register_agent("sam").await?;
        let (broker, mut agents) = scene.broker("broker-ada", &["ada", "eve"], 0).await?;
        let (direct, bob) = scene.direct("bob", 1).await?;
        agents.push(bob);
        let replication = TcpProxy::start(&scene.stack.postgres().address())?;
        let dir: PathBuf = scene.stack.state_dir().join("standby");
        let standby = scene.stack.postgres().start_standby(&dir, &replication.address()).await?;
        Ok(Self { scene, standby, replication, sam, agents, nodes: vec![broker, direct] })
    }

    fn senders(&self) -> Senders {
        let front = Front::new(&self.scene.gateways_from(0));
        Senders::start_persistent(SENDERS, &self.scene.workspace.as_agent(&self.sam), &self.agents, &front)
    }

    /// Waits until `relayctl doctor` reports this guarantee.
    async fn wait_guarantee(&self, guarantee: &str) -> Result<()> {
        let (database, nats) = (self.scene.stack.postgres().url_of("relay"), self.scene.stack.nats_url());
        let variables = [("DATABASE_URL", &*database), ("NATS_URL", &*nats)];
        wait::until_ok("the guarantee that doctor reports", SOON, || async {
            let findings: Value =
                serde_json::from_str(&relayctl_with(&["--json", "doctor"], &variables, "").await?.stdout)?;
            let findings = findings.as_array().context("findings")?;
            let replication =
                findings.iter().find(|one| one["check"] == "postgres replication").context("replication")?;
            let found = replication["found"].as_str().context("found")?;
            ensure!(found.starts_with(guarantee) && found.ends_with("; 1 standbys connected"), "{replication}");
            Ok(())
        })
        .await
    }

    /// Kills the primary, promotes the standby, and leads the engine to it. Returns the time from the promotion to the
    /// first accepted post at every gateway.
    async fn fail_over(&mut self) -> Result<Duration> {
        self.promote().await?;
        let promoted = Instant::now();
        self.scene.wait_service(&self.sam, "ada", "after the failover").await?;
        let took = promoted.elapsed();
        if took > EXPECTED_WITHIN {
            println!("service after {took:?} only:\n{}", self.scene.stack.logs(40));
        }
        Ok(took)
    }

    /// Kills the primary, promotes the standby, and leads the engine to it.
    pub(super) async fn promote(&mut self) -> Result<()> {
        self.scene.stack.postgres().kill9();
        self.standby.promote().await?;
        self.scene.stack.postgres_proxy().switch_to(&self.standby.address())?;
        self.scene.database = Database::connect(&self.standby.url_of("relay"))?;
        Ok(())
    }

    /// Ids of the messages that the standby has.
    pub(super) async fn replicated(&self) -> Result<HashSet<String>> {
        let database = Database::connect(&self.standby.url_of("relay"))?;
        Ok(database.messages().await?.into_values().flatten().collect())
    }

    /// Repeats requests that the standby had before the failover with their idempotency keys.
    pub(super) async fn repeat_keys(&self, sent: &[SentMessage], kept: &HashSet<String>) -> Result<()> {
        let is_kept = |one: &&SentMessage| matches!(&one.outcome, Outcome::Accepted(id) if kept.contains(id));
        self.scene.repeat_keys(&self.sam, sent.iter().filter(is_kept)).await
    }

    /// Judges the history. Messages may be lost as far as the standby did not have them.
    pub(super) async fn verify(
        &self,
        sent: &[SentMessage],
        losses: Losses<'_>,
        kept: &HashSet<String>,
    ) -> Result<usize> {
        let lost = self.scene.judge(sent, losses).await?;
        let wrong: Vec<&String> = lost.iter().filter(|id| kept.contains(*id)).collect();
        ensure!(wrong.is_empty(), "the standby had {wrong:?}");
        // A sender can find out: the id is unknown.
        if let Some(lost) = lost.first() {
            let reply = self.scene.api_of(&self.sam, 0).get(&format!("/v1/messages/{lost}")).await?;
            ensure!(reply.status == 404, "a lost message is answered with {}", reply.status);
        }
        Ok(lost.len())
    }

    /// Ends the node of bob's own socket, and waits until its gateway has noticed.
    async fn close_own_socket(&mut self) -> Result<()> {
        drop(self.nodes.pop());
        let bob = self.agents.last().context("bob")?;
        let node_id = format!("node_direct_{}", bob.id);
        wait::until_ok("the socket of bob to be closed", SOON, || async {
            ensure!(!self.scene.database.is_connected(&node_id).await?, "{node_id} is connected");
            anyhow::Ok(())
        })
        .await
    }

    async fn reopen_own_socket(&mut self) -> Result<()> {
        let bob = self.agents.last().context("bob")?;
        let Scene { workspace, ledger, .. } = &self.scene;
        self.nodes.push(Node::direct(workspace, bob, &self.scene.gateways_from(1), ledger).await?);
        Ok(())
    }

    async fn wait_settled(&self) -> Result<()> {
        self.scene.wait_settled(&self.agents, SOON).await
    }

    /// Recoveries that any process performed.
    async fn recoveries(&self) -> Result<f64> {
        let mut count = 0.0;
        for process in self.processes() {
            count += process.metric("relay_recoveries_total").await.unwrap_or(0.0);
        }
        Ok(count)
    }

    fn processes(&self) -> impl Iterator<Item = &Service> {
        self.scene.stack.gateways().iter().chain(self.scene.stack.workers())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_to_an_asynchronous_standby_loses_only_what_it_never_had() -> Result<()> {
    fail_over_asynchronously(Way::Direct).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_behind_a_pooler_loses_only_what_the_standby_never_had() -> Result<()> {
    fail_over_asynchronously(Way::Pooled).await
}

async fn fail_over_asynchronously(way: Way) -> Result<()> {
    let mut installation = Replicated::start_with(way).await?;
    installation.wait_guarantee("asynchronous:").await?;
    let senders = installation.senders();
    senders.send(by_run_size(200, 2000)).await?;
    // From here on the standby lags. The gateways deliver, and take acks, of deliveries that it will never have.
    let lags_since = tick();
    installation.replication.blackhole();
    let lacking = by_run_size(200, 1000);
    senders.send(lacking).await?;
    let kept = installation.replicated().await?;
    let took = installation.fail_over().await?;
    let span = lags_since..tick();
    senders.send(by_run_size(100, 1000)).await?;
    let report = senders.stop().await?;
    installation.wait_settled().await?;
    installation.repeat_keys(&report.sent, &kept).await?;
    let lost = installation.verify(&report.sent, Losses::Within(&[span]), &kept).await?;
    let fault = format!("primary killed, the asynchronous standby lacks the last {lacking} messages{}", way.suffix());
    installation.scene.print_row(&fault, took, &report.sent);
    ensure!(lost == 0, "JetStream had them all, and {lost} are lost");
    let recoveries = installation.recoveries().await?;
    ensure!((recoveries - 1.0).abs() < f64::EPSILON, "{recoveries} processes recovered the database");
    for node in &installation.nodes {
        let links = installation.scene.ledger.links(node.name());
        ensure!(links.up && links.registered >= 2, "{} did not come back: {links:?}", node.name());
        // Every gateway closes its sockets, also one that did not recover the database itself.
        ensure!(links.ended.contains(&Some(1012)), "{}: {links:?}", node.name());
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_to_a_synchronous_standby_loses_nothing() -> Result<()> {
    fail_over_synchronously(Way::Direct).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_behind_a_pooler_to_a_synchronous_standby_loses_nothing() -> Result<()> {
    fail_over_synchronously(Way::Pooled).await
}

async fn fail_over_synchronously(way: Way) -> Result<()> {
    let mut installation = Replicated::start_with(way).await?;
    installation.scene.stack.postgres().require_standby().await?;
    installation.wait_guarantee("synchronous:").await?;
    let senders = installation.senders();
    senders.send(by_run_size(200, 2000)).await?;
    let kept = installation.replicated().await?;
    let took = installation.fail_over().await?;
    senders.send(by_run_size(100, 1000)).await?;
    let report = senders.stop().await?;
    installation.wait_settled().await?;
    installation.repeat_keys(&report.sent, &kept).await?;
    installation.verify(&report.sent, Losses::None, &kept).await?;
    let fault = format!("primary killed, synchronous standby{}", way.suffix());
    installation.scene.print_row(&fault, took, &report.sent);
    Ok(())
}

/// Socket of bob's own node when the primary is killed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Socket {
    Open,
    /// Its gateway knows it no more, and bob returns when all gateways serve again.
    Closed,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_after_a_failover_are_not_taken_for_lost_ones() -> Result<()> {
    lose_received_messages(Socket::Open).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_after_a_failover_are_not_taken_for_those_of_a_closed_socket() -> Result<()> {
    lose_received_messages(Socket::Closed).await
}

/// Neither the log nor the standby has the deliveries. The broker of ada reports what it received; for bob's own socket
/// only its gateway knows the numbers. Otherwise they are assigned again: the client takes the new deliveries for
/// repetitions, and its acks cover them.
async fn lose_received_messages(socket: Socket) -> Result<()> {
    const NEVER_REPLICATED: usize = 5;
    let newest = 1 + NEVER_REPLICATED as u64;
    let mut installation = Replicated::start().await?;
    let names = ["ada", "bob"];
    let apis = [0, 1].map(|gateway| [installation.scene.api_of(&installation.sam, gateway)]);
    let send = async |name: &str, gateway: usize, text: String| {
        send_keyed(&apis[gateway], &Target::Dm(name.to_owned()), &text).await
    };
    let mut sent = Vec::new();
    for name in names {
        sent.push(send(name, 0, format!("kept for {name}")).await?);
        installation.scene.wait_acked(name, 1, SOON).await;
    }
    let lags_since = tick();
    installation.replication.blackhole();
    installation.scene.stack.nats().stop().await?;
    for name in names {
        for number in 0..NEVER_REPLICATED {
            sent.push(send(name, number % 2, format!("never replicated {number} for {name}")).await?);
        }
        installation.scene.wait_received(name, newest, SOON).await;
        installation.scene.wait_acked(name, newest, SOON).await;
    }
    if socket == Socket::Closed {
        installation.close_own_socket().await?;
    }
    let kept = installation.replicated().await?;
    installation.promote().await?;
    let (span, promoted) = (lags_since..tick(), Instant::now());
    installation.scene.stack.nats().restart().await?;
    let mut service_after = None;
    for name in names {
        for number in 0..10 {
            sent.push(send(name, number % 2, format!("after {number} for {name}")).await?);
            if number == 1 {
                // Each gateway has accepted a post.
                service_after.get_or_insert(promoted.elapsed());
            }
        }
    }
    if socket == Socket::Closed {
        installation.reopen_own_socket().await?;
    }
    ensure!(sent.iter().all(|one| matches!(one.outcome, Outcome::Accepted(_))), "{sent:?}");
    installation.wait_settled().await?;
    installation.repeat_keys(&sent, &kept).await?;
    let lost = installation.verify(&sent, Losses::Within(&[span]), &kept).await?;
    let suffix = if socket == Socket::Closed { ", a direct socket closed before" } else { "" };
    let fault = format!("primary killed, the standby lags and NATS was unavailable{suffix}");
    installation.scene.print_row(&fault, service_after.context("no post")?, &sent);
    ensure!(lost == names.len() * NEVER_REPLICATED, "{lost} messages are lost");
    Ok(())
}

/// A minute of log at 1 000 deliveries per second, at full size 20 000.
async fn fail_over_with_a_long_log(has_nats: bool) -> Result<()> {
    let mut installation = Replicated::start().await?;
    let (mailboxes, each) = by_run_size((2000, 30), (20_000, 60));
    bulk::load(&installation.scene, &installation.standby.url_of("relay"), mailboxes, each).await?;
    if !has_nats {
        installation.scene.stack.nats().kill9();
    }
    let took = installation.fail_over().await?;
    let nats = if has_nats { "" } else { ", NATS unavailable" };
    let fault = format!("primary killed, {} entries in {mailboxes} mailboxes, all replicated{nats}", mailboxes * each);
    ensure!(took < EXPECTED_WITHIN * by_run_size(3, 1), "service after {took:?}");
    installation.wait_settled().await?;
    if !has_nats {
        installation.scene.stack.nats().restart().await?;
    }
    // Live copies work again.
    installation.scene.dm(&installation.sam, 0, "eve", "after the return of nats").await?;
    installation.wait_settled().await?;
    // Without NATS all numbers jump.
    let losses = if has_nats { Losses::None } else { Losses::Within(&[]) };
    installation.verify(&[], losses, &HashSet::new()).await?;
    installation.scene.print_row(&fault, took, &[]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_log_does_not_delay_service() -> Result<()> {
    fail_over_with_a_long_log(true).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_without_nats_does_not_wait_for_it() -> Result<()> {
    fail_over_with_a_long_log(false).await
}
