//! Revocations while a gateway is cut off: without hints within a second, without Postgres within half a minute.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::chaos::by_run_size;
use relay_testkit::{
    binaries,
    client::{Api, EventSource, NodeSocket, NodeToken, ObserverSocket},
    ports::Port,
    proxy::TcpProxy,
    stack::{Backends, Service, ServiceSpec, Stack},
    wait,
};
use serde_json::json;

const SOON: Duration = Duration::from_secs(30);
/// Time for which a gateway without hints accepts a cached token.
const CACHED_FOR: Duration = Duration::from_secs(1);
/// Longest wait of a request for Postgres.
const CONNECTION_WAIT: Duration = Duration::from_secs(3);
/// Time within which a socket of a revoked token is closed.
const CLOSED_WITHIN: Duration = Duration::from_secs(5);
/// After half a minute without Postgres a gateway accepts no token.
const BELIEVED_FOR: Duration = Duration::from_secs(30);
/// Beyond a bound: requests that a loaded machine delays.
const SLACK: Duration = Duration::from_secs(1);
/// Nodes that are deleted one after the other, 3 s each: together longer than the 12 s between checks of take-overs.
const LATER_NODES: usize = 5;

/// Engine with a second gateway that reaches Postgres and NATS through proxies of its own.
struct CutOffScene {
    stack: Stack,
    cut_off: Service,
    postgres: TcpProxy,
    nats: TcpProxy,
}

impl CutOffScene {
    async fn start() -> Result<Self> {
        let stack = Stack::builder().gateways(1).start().await?;
        let (postgres, nats) =
            (TcpProxy::start(&stack.postgres().address())?, TcpProxy::start(&stack.nats().address())?);
        let backends = Backends {
            database_url: postgres.through(stack.database_url())?,
            nats_url: format!("nats://{}", nats.address()),
        };
        let env = [("RELAY_FILES_DIR".to_owned(), stack.state_dir().join("files").to_string_lossy().into_owned())];
        let spec = ServiceSpec {
            name: "gateway-cut-off",
            program: binaries::find(&binaries::directory()?, "relay-gateway")?,
            backends: &backends,
            env: &env,
            log: stack.state_dir().join("logs").join("gateway-cut-off.log"),
        };
        let (main, metrics) = (Port::free()?, Port::free()?);
        let cut_off =
            Service::gateway(&spec, &main.address(), &metrics.address())?.with_reserved_ports([main, metrics]);
        cut_off.wait_ready().await?;
        Ok(Self { stack, cut_off, postgres, nats })
    }

    fn here(&self) -> &str {
        self.stack.gateway(0).url()
    }

    /// A broker's socket at the gateway that will be cut off.
    async fn broker(&self, key: &Api, name: &str) -> Result<NodeSocket> {
        self.connect(&key.create_broker_node(&format!("node_{name}"), name).await?).await
    }

    async fn connect(&self, node: &NodeToken) -> Result<NodeSocket> {
        let mut socket = NodeSocket::connect(&self.cut_off.ws_url(), &node.token).await?;
        socket.register_broker(&node.node_id, &node.name, "run-1").await?;
        Ok(socket)
    }
}

/// Sends a heartbeat with this name of the node.
async fn rename(socket: &NodeSocket, name: &str) -> Result<()> {
    let heartbeat =
        json!({ "v": 1, "type": "node.heartbeat", "active_agents": 0, "handlers_live": true, "name": name });
    socket.send_json(&heartbeat).await
}

#[tokio::test]
async fn without_hints_a_revocation_counts_within_a_second() -> Result<()> {
    let scene = CutOffScene::start().await?;
    let key = Api::create_workspace(scene.here(), "unhinted").await?;
    let mut token = key.register_agent("bob").await?.token;
    let mut socket = scene.broker(&key, "far").await?;
    socket.register_agent("ann").await?;
    let mut later = Vec::new();
    for nth in 0..LATER_NODES {
        later.push(scene.broker(&key, &format!("later-{nth}")).await?);
    }

    scene.nats.cut();
    let rotations = by_run_size(1, 20);
    let mut took = Vec::new();
    for _ in 0..rotations {
        let bob = key.with_token(&token).at(scene.cut_off.url());
        bob.get("/v1/agent").await?.success()?;
        let rotated = key.post("/v1/agents/bob/rotate-token", json!({})).await?.success()?;
        let answered = Instant::now();
        wait::until("the token to be refused", SOON, || async {
            bob.get("/v1/agent").await.is_ok_and(|reply| reply.code() == "agent_token_invalid")
        })
        .await;
        took.push(answered.elapsed());
        rotated["token"].as_str().context("a token")?.clone_into(&mut token);
    }
    took.sort_unstable();
    let slowest = took[rotations - 1];
    println!("{rotations} revocations without hints: p50 {:?}, max {slowest:?}", took[rotations / 2]);
    ensure!(slowest < CACHED_FOR + by_run_size(SLACK, Duration::ZERO), "{took:?}");
    key.delete("/v1/nodes/far").await?.success()?;
    let revoked = Instant::now();
    ensure!(socket.register_agent("late").await.is_err(), "a socket of a deleted node served a request");
    ensure!(socket.closed(SOON).await?.is_some_and(|code| code == 1008), "the socket of a deleted node");
    println!("closed without a hint after {:?}", revoked.elapsed());
    ensure!(revoked.elapsed() < CLOSED_WITHIN + SLACK, "{:?}", revoked.elapsed());
    // One check of tokens closes each, so that one of them is first found by the rarer check of take-overs.
    for (nth, mut socket) in later.into_iter().enumerate() {
        key.delete(&format!("/v1/nodes/later-{nth}")).await?.success()?;
        let code = socket.closed(CLOSED_WITHIN + SLACK).await?;
        ensure!(code == Some(1008), "the socket of a deleted node closed with {code:?}");
    }
    Ok(())
}

/// A heartbeat with another name is served to a valid token only.
#[tokio::test]
async fn without_hints_a_revoked_node_keeps_its_name() -> Result<()> {
    let scene = CutOffScene::start().await?;
    let key = Api::create_workspace(scene.here(), "renamed").await?;
    let witness = scene.broker(&key, "witness").await?;
    let mut deleted = scene.broker(&key, "deleted").await?;
    let stolen = key.create_broker_node("node_far", "far").await?;
    let mut socket = scene.connect(&stolen).await?;
    let with_stolen = key.with_token(&stolen.token).at(scene.cut_off.url());

    scene.nats.cut();
    // A check of all sockets closes this one, so that the next check is not due before the heartbeat.
    key.delete("/v1/nodes/deleted").await?.success()?;
    ensure!(deleted.closed(CLOSED_WITHIN + SLACK).await? == Some(1008), "the socket of a deleted node");
    key.create_broker_node("node_far", "far").await?;
    wait::until("the token to be refused", SOON, || async {
        with_stolen.get("/v1/channels").await.is_ok_and(|reply| reply.code() == "node_token_invalid")
    })
    .await;
    rename(&socket, "taken").await?;
    ensure!(socket.closed(CLOSED_WITHIN + SLACK).await? == Some(1008), "the socket of a rotated token");
    // Heartbeats are written together: the second of these names is written after those that came before the first.
    for name in ["witness-1", "witness-2"] {
        rename(&witness, name).await?;
        wait::until_ok("the name of the other node", SOON, || async {
            key.get(&format!("/v1/nodes/{name}")).await?.success()
        })
        .await?;
    }
    key.get("/v1/nodes/taken").await?.refused(404, "node_not_found")?;
    key.get("/v1/nodes/far").await?.success()?;
    Ok(())
}

/// The gateway has heard of nothing: neither hints nor Postgres reach it.
#[tokio::test]
async fn a_gateway_without_postgres_accepts_no_token_for_long() -> Result<()> {
    let scene = CutOffScene::start().await?;
    let key = Api::create_workspace(scene.here(), "blind").await?;
    let bob = key.register_agent("bob").await?;
    let bob = key.as_agent(&bob).at(scene.cut_off.url()).without_retries();
    let observer = json!({ "name": "all", "scopes": ["stream:read", "agents:read"] });
    let observer = key.post("/v1/observer-tokens", observer).await?.success()?;
    let (token, id) =
        (observer["token"].as_str().context("a token")?, observer["id"].as_str().context("an id")?.to_owned());
    let observer = key.with_token(token).at(scene.cut_off.url());
    let mut watching = ObserverSocket::open(scene.cut_off.url(), token).await?;
    let mut stream = EventSource::open(&observer, None).await?;
    let mut socket = scene.broker(&key, "far").await?;
    bob.get("/v1/agent").await?.success()?;

    scene.postgres.cut();
    scene.nats.cut();
    key.post("/v1/agents/bob/rotate-token", json!({})).await?.success()?;
    key.delete(&format!("/v1/observer-tokens/{id}")).await?.success()?;
    key.create_broker_node("node_far", "far").await?;
    let revoked = Instant::now();
    wait::until("the agent's token to be refused", SOON, || async {
        bob.get("/v1/agent").await.is_ok_and(|reply| reply.status == 503 || reply.status == 401)
    })
    .await;
    println!("refused without Postgres after {:?}", revoked.elapsed());
    ensure!(revoked.elapsed() < CACHED_FOR + CONNECTION_WAIT + SLACK, "{:?}", revoked.elapsed());
    ensure!(socket.register_agent("late").await.is_err(), "a request was served without storage");
    let (code, _) = watching.closed(BELIEVED_FOR + CLOSED_WITHIN + SLACK).await?;
    println!("observer closed without Postgres after {:?}", revoked.elapsed());
    ensure!(revoked.elapsed() < BELIEVED_FOR + CLOSED_WITHIN + SLACK, "{:?}", revoked.elapsed());
    assert_eq!(code, 1008);
    while stream.next(CLOSED_WITHIN).await?.event != "close" {}
    ensure!(bob.get("/v1/agent").await?.status == 503, "the revoked token was accepted");
    ensure!(observer.without_retries().get("/v1/agents").await?.status == 503, "the observer token was accepted");

    scene.postgres.restore();
    // The gateway's lease had a break as well, which closes the socket with 1012 if it is noticed first.
    let code = socket.closed(SOON).await?;
    ensure!(matches!(code, Some(1008 | 1012)), "{code:?}");
    key.get("/v1/agents/late").await?.refused(404, "agent_not_found")?;
    wait::until("the revocations to be known", SOON, || async {
        bob.get("/v1/agent").await.is_ok_and(|reply| reply.status == 401)
    })
    .await;
    Ok(())
}
