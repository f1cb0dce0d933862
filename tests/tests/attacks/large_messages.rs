//! Messages as large as the limits admit, to many recipients: the memory of gateways and workers stays within its
//! bound, and everything is delivered in order.

use std::{
    collections::{HashMap, HashSet},
    ops::RangeInclusive,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use futures::{SinkExt as _, StreamExt as _, stream};
use relay_acceptance::{
    chaos::by_run_size,
    memory::{peak, reset_peak},
};
use relay_testkit::{
    client::{Api, NodeSocket, NodeToken},
    limit_memory,
    receiver::{Received, Receiver, Reply},
    stack::Stack,
    wait,
};
use serde_json::{Value, json};
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream,
    tungstenite::{Message, protocol::WebSocketConfig},
};

const MIB: u64 = 1024 * 1024;
const GATEWAY_GROWTH: u64 = 64 * MIB;
const WORKER_GROWTH: u64 = 64 * MIB;
/// Memory of the chart's workers.
const WORKER_LIMIT: u64 = 512 * MIB;
const AGENTS: usize = 100;
/// Nodes with endpoints, and subscriptions.
const NODES: usize = 4;
/// Posts in flight.
const AT_A_TIME: usize = 4;
const SOON: Duration = Duration::from_secs(120);

/// Body of a post of almost 900 KiB, which takes 80 times as much once it is parsed.
fn large_post(nth: usize) -> String {
    let blocks = [r#"{"":0}"#; 125_000].join(",");
    format!(r#"{{"text":"post {nth}","blocks":[{blocks}]}}"#)
}

async fn post(api: &Api, body: String) -> Result<()> {
    let url = format!("{}/v1/channels/general/messages", api.base());
    let request = reqwest::Client::new().post(url).bearer_auth(api.token());
    let response = request.header("content-type", "application/json").body(body).send().await?;
    ensure!(response.status() == 201, "{} {}", response.status(), response.text().await?);
    Ok(())
}

async fn post_all(api: &Api, posts: usize) -> Result<()> {
    let mut done = stream::iter(0..posts).map(|nth| post(api, large_post(nth))).buffer_unordered(AT_A_TIME);
    while let Some(posted) = done.next().await {
        posted?;
    }
    Ok(())
}

/// Socket that reads only the fields before a frame's payload.
struct Broker(WebSocketStream<MaybeTlsStream<tokio::net::TcpStream>>);

impl Broker {
    /// Connects and registers, once an earlier connection has ended.
    async fn connect(ws_base: &str, node: &NodeToken) -> Result<Self> {
        wait::until_ok("a registration", SOON, || Self::register(ws_base, node)).await
    }

    async fn register(ws_base: &str, node: &NodeToken) -> Result<Self> {
        let config = WebSocketConfig::default().max_message_size(Some(1 << 20)).max_frame_size(Some(1 << 20));
        let url = format!("{ws_base}/v1/node/ws?token={}", node.token);
        let (socket, _) = tokio_tungstenite::connect_async_with_config(url, Some(config), true).await?;
        let mut broker = Self(socket);
        broker
            .send(json!({
                "v": 1, "type": "node.register", "id": "r", "node_id": node.node_id, "name": node.name,
                "provider": { "name": "broker", "instance_id": "one" }, "capabilities": [], "max_agents": 0, "tags": [],
                "version": "testkit",
            }))
            .await?;
        let reply = broker.0.next().await.context("closed")??.into_text()?;
        ensure!(reply.contains(r#""ok":true"#), "{reply}");
        Ok(broker)
    }

    async fn send(&mut self, frame: Value) -> Result<()> {
        Ok(self.0.send(Message::text(frame.to_string())).await?)
    }

    /// Reads and acknowledges deliveries until each agent has got all of these, in order.
    async fn receive(&mut self, seqs: RangeInclusive<i64>) -> Result<()> {
        let mut reached: HashMap<String, i64> = HashMap::new();
        while reached.len() < AGENTS || reached.values().any(|seq| seq < seqs.end()) {
            let message = tokio::time::timeout(SOON, self.0.next()).await.context("no frame")?.context("closed")??;
            let Message::Text(text) = message else { continue };
            let Some((head, _)) = text.split_once(r#","payload":"#) else { continue };
            let head: Value = serde_json::from_str(&format!("{head}}}"))?;
            let (agent, seq) = (head["agent"].as_str().context("an agent")?, head["seq"].as_i64().unwrap_or_default());
            if seq == 0 {
                continue;
            }
            let last = reached.entry(agent.to_owned()).or_insert(seqs.start() - 1);
            ensure!(seq == *last + 1, "{agent} got {seq} after {last}");
            ensure!(head["delivery_id"].as_str().is_some_and(|id| id.starts_with("del_")), "{head}");
            *last = seq;
            self.send(json!({ "v": 1, "type": "delivery.ack", "agent": agent, "up_to_seq": seq })).await?;
        }
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_returns_to_large_mailboxes_takes_a_bounded_part_of_its_gateway() -> Result<()> {
    let posts = by_run_size(8, 50);
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let gateway = stack.gateway(0);
    let key = Api::create_workspace(gateway.url(), "large").await?;
    let node = key.create_broker_node("node_large", "large").await?;
    let mut socket = NodeSocket::connect(&gateway.ws_url(), &node.token).await?;
    socket.register_broker(&node.node_id, &node.name, "one").await?;
    for nth in 0..AGENTS {
        socket.register_agent(&format!("agent-{nth}")).await?;
    }
    let ann = key.as_agent(&key.register_agent("ann").await?);
    post(&ann, json!({ "text": "small" }).to_string()).await?;
    drop(socket);
    let mut broker = Broker::connect(&gateway.ws_url(), &node).await?;
    broker.receive(1..=1).await?;
    drop(broker);

    let before = reset_peak(gateway.pid())?;
    post_all(&ann, posts).await?;
    let posted = peak(gateway.pid())?;
    let mut broker = Broker::connect(&gateway.ws_url(), &node).await?;
    let posts = i64::try_from(posts)?;
    let received = broker.receive(2..=1 + posts).await;
    let (grown, replayed) = (peak(gateway.pid())? - before, peak(gateway.pid())?);
    println!("{} MiB, {} after the posts, {} in the end", before / MIB, posted / MIB, replayed / MIB);
    received?;
    ensure!(grown < GATEWAY_GROWTH, "the gateway grew by {} MiB", grown / MIB);
    Ok(())
}

/// Calls with a large message: their paths and ids. Their bodies are not kept: at full size they are gigabytes.
#[derive(Clone, Default)]
struct LargeCalls(Arc<Mutex<HashSet<(String, String)>>>);

impl LargeCalls {
    fn add(&self, call: &Received) {
        if call.body.len() > 500_000 {
            self.lock().insert((call.path.clone(), call.header("webhook-id").to_owned()));
        }
    }

    fn count(&self, path: &str) -> usize {
        self.lock().iter().filter(|(called, _)| called == path).count()
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<(String, String)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Few agents are as hard for a worker's memory as many: of one family of workspaces it holds 8 MiB of bodies for calls
/// in flight, which are 9 of these, and the endpoints of 4 agents could have 64 calls. At full size there are as many
/// agents as on the broker above, which takes minutes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_and_subscriptions_of_large_messages_take_a_bounded_part_of_a_worker() -> Result<()> {
    let (posts, agents_of_node) = (by_run_size(6, 50), by_run_size(1, AGENTS / NODES));
    // A small reserve, so that memory is mapped when it is used. At full size, the default rate of bytes
    // to one host would take five minutes.
    let stack = Stack::builder()
        .gateways(1)
        .env("MIMALLOC_ARENA_RESERVE", "32MiB")
        .env("RELAY_DESTINATION_BYTE_RATE", by_run_size(16 << 20, 1 << 30).to_string())
        .start()
        .await?;
    let key = Api::create_workspace(stack.gateway(0).url(), "large").await?;
    // Slow, so that many calls are in flight.
    let large = LargeCalls::default();
    let counted = large.clone();
    let receiver = Receiver::start(move |_, call| {
        counted.add(call);
        Reply::After(Duration::from_millis(200), Box::new(Reply::Status(204)))
    })
    .await?;
    for nth in 0..NODES {
        let delivery =
            json!({ "url": receiver.url(&format!("/push-{nth}")), "ack_mode": "on_2xx", "ordering": "none" });
        let node = json!({
            "name": format!("node-{nth}"), "kind": "http_push", "delivery": delivery, "max_agents": agents_of_node,
        });
        key.post("/v1/nodes", node).await?.success()?;
        for agent in 0..agents_of_node {
            let name = format!("bob-{nth}-{agent}");
            key.register_agent(&name).await?;
            key.bind(&format!("node-{nth}"), &name).await?;
        }
        let url = receiver.url(&format!("/events-{nth}"));
        key.post("/v1/subscriptions", json!({ "events": ["message.created"], "url": url })).await?.success()?;
    }
    let ann = key.as_agent(&key.register_agent("ann").await?);
    let expected = (0..NODES)
        .flat_map(|nth| [(format!("/push-{nth}"), posts * agents_of_node), (format!("/events-{nth}"), posts)])
        .collect::<Vec<_>>();
    // Calls of subscriptions are no deliveries to a node.
    let is_called = |path: &str| !receiver.calls(path).is_empty() || !receiver.events(path).is_empty();
    // A new subscription begins with the events after its first turn.
    wait::until("small messages", SOON, || async {
        let _ = post(&ann, json!({ "text": "small" }).to_string()).await;
        expected.iter().all(|(path, _)| is_called(path))
    })
    .await;

    let worker = stack.worker().pid();
    limit_memory(worker, WORKER_LIMIT)?;
    let before = reset_peak(worker)?;
    post_all(&ann, posts).await?;
    wait::until("all messages", by_run_size(SOON, 5 * SOON), || async {
        receiver.forget();
        expected.iter().all(|(path, calls)| large.count(path) == *calls)
    })
    .await;
    let grown = peak(worker)?.saturating_sub(before);
    println!("{} MiB, grown by {}", before / MIB, grown / MIB);
    ensure!(grown < WORKER_GROWTH, "the worker grew by {} MiB", grown / MIB);
    Ok(())
}
