//! Cluster of three nats-servers with three copies of each stream.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use async_nats::jetstream;
use relay_acceptance::chaos::{by_run_size, posts::Posts, scene::Scene};
use relay_testkit::{servers::NatsCluster, stack::Stack, wait};

const SOON: Duration = Duration::from_secs(60);
const AGENTS: [&str; 2] = ["ada", "bob"];

struct Clustered {
    cluster: NatsCluster,
    scene: Scene,
    posts: Posts,
}

impl Clustered {
    /// Describes the delivery stream, asked at any server.
    async fn stream(&self) -> Result<jetstream::stream::Info> {
        let servers = self.cluster.servers().iter().filter(|server| server.is_running());
        let urls: Vec<_> = servers.map(|server| server.url()).collect();
        let client = async_nats::connect(urls).await?;
        let context = jetstream::new(client);
        Ok(context.get_stream("RELAY_DELIVERIES").await?.cached_info().clone())
    }

    /// Waits until all three copies of the delivery stream are complete.
    async fn wait_complete(&self) -> Result<()> {
        wait::until_ok("three copies of the stream", SOON, || async {
            let cluster = self.stream().await?.cluster.context("no cluster")?;
            let complete = cluster.replicas.iter().filter(|peer| peer.current && !peer.offline).count();
            ensure!(cluster.leader.is_some() && complete == 2, "{cluster:?}");
            anyhow::Ok(())
        })
        .await
    }

    /// Lets posts go on for a while with a fault, until both agents have everything that was posted in it.
    async fn observe(&self, fault: &str, first: usize) -> Result<()> {
        let began = Instant::now();
        wait::until("the fault to last", SOON, || async { began.elapsed() > Duration::from_secs(by_run_size(5, 30)) })
            .await;
        let posted = self.posts.count();
        let caught_up = Instant::now();
        wait::until_ok("the messages of the fault", SOON, || async {
            let received: usize = AGENTS.iter().map(|agent| self.scene.ledger.texts(agent).len()).sum();
            ensure!(received >= posted, "{received} of {posted} received");
            anyhow::Ok(())
        })
        .await
        .with_context(|| self.scene.stack.logs(15))?;
        println!("{fault}: received {:?} later", caught_up.elapsed());
        println!("{}", self.posts.report(fault, first)?);
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn posts_are_accepted_and_delivered_while_a_nats_server_fails() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let home: PathBuf = dir.path().join("nats");
    let cluster = NatsCluster::start(&home, 3).await?;
    let builder = Stack::builder().env("NATS_URL", cluster.url()).env("RELAY_NATS_REPLICAS", "3");
    let scene = Scene::start_with(builder).await?;
    let sam = scene.workspace.register_agent("sam").await?;
    let (_broker, _) = scene.broker("broker-ada", &["ada"], 0).await?;
    let (_direct, _) = scene.direct("bob", 1).await?;
    let posts = Posts::start((0..2).map(|gateway| scene.api_of(&sam, gateway)).collect(), &AGENTS);
    let this = Clustered { cluster, scene, posts };
    this.wait_complete().await?;
    this.observe("no fault", this.posts.count()).await?;

    let leader = this.stream().await?.cluster.and_then(|cluster| cluster.leader).context("a leader")?;
    let leader: usize = leader.trim_start_matches("relay-").parse()?;
    let first = this.posts.count();
    this.cluster.servers()[leader].kill9();
    this.observe("leader killed", first).await?;
    this.cluster.servers()[leader].restart().await?;
    this.wait_complete().await?;

    // The server with most of the engine's processes, which notice nothing at first.
    let used = (0..3).max_by_key(|server| this.cluster.client_count(*server)).context("a server")?;
    let first = this.posts.count();
    this.cluster.partition(used);
    this.observe("server partitioned", first).await?;
    this.cluster.heal(used);
    this.wait_complete().await?;

    let first = this.posts.count();
    let lost = &this.cluster.servers()[(leader + 1) % 3];
    lost.kill9();
    std::fs::remove_dir_all(lost.store_dir())?;
    lost.restart().await?;
    this.observe("storage of one server lost", first).await?;
    this.wait_complete().await?;

    let Clustered { scene, posts, .. } = this;
    let longest = posts.longest();
    let sent = posts.stop().await?;
    wait::until("the rest to be received", SOON, || async {
        AGENTS.iter().map(|agent| scene.ledger.texts(agent).len()).sum::<usize>() == sent.len()
    })
    .await;
    scene.verify(&sent).await?;
    let fault = "of three NATS servers one killed, one partitioned, the storage of one lost, until a post is answered";
    scene.print_row(fault, longest, &sent);
    Ok(())
}
