//! Live copies between gateways: deliveries that one gateway commits reach the sockets of another without a read of
//! Postgres.

use std::{collections::HashSet, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use async_nats::Subscriber;
use futures::StreamExt as _;
use relay_acceptance::calls::register;
use relay_testkit::{
    client::{Api, NodeSocket},
    stack::{Service, Stack},
};
use serde_json::{Value, json};
use sqlx::{Connection as _, PgConnection};

const SOON: Duration = Duration::from_secs(30);
/// A comparison that meets a commit under way reads a frame whose copy arrives a moment later: each new route is
/// compared once, and the silence check runs every few seconds. So only one of these rounds must pass without a read.
const ROUNDS: usize = 5;
/// Direct messages in a round, one after the other.
const MESSAGES: usize = 10;
/// Agents of one socket. Frames of a short post to all of them take several times the 64 KiB of a message with copies,
/// and less than the 256 KiB that may wait for a socket.
const AGENTS: usize = 300;

/// Engine of the test's own, since it counts. The sender posts at the first gateway, the sockets are at the second.
struct Scene {
    stack: Stack,
    key: Api,
    ann: Api,
}

impl Scene {
    async fn start(name: &str) -> Result<Self> {
        let stack = Stack::builder().gateways(2).worker(false).start().await?;
        let key = Api::create_workspace(stack.gateway(0).url(), name).await?;
        let ann = key.as_agent(&key.register_agent("ann").await?);
        Ok(Self { stack, key, ann })
    }

    fn receiving(&self) -> &Service {
        self.stack.gateway(1)
    }

    /// Frames for sockets that the receiving gateway has read from Postgres. Those of messages from before a stream was
    /// opened are among them, because no copy of these is needed.
    async fn frames_read(&self) -> Result<f64> {
        let repaired = self.receiving().metric("relay_deliveries_repaired_total").await?;
        Ok(repaired + self.receiving().metric("relay_deliveries_replayed_total").await?)
    }

    /// Runs rounds, each of which sends messages and receives them, until all of one have arrived as live copies.
    async fn expect_live_copies(&self, mut round: impl AsyncFnMut(usize) -> Result<()>) -> Result<()> {
        let mut reads = Vec::new();
        for nth in 0..ROUNDS {
            let before = self.frames_read().await?;
            round(nth).await?;
            let read = self.frames_read().await? - before;
            if read == 0.0 {
                let dropped = self.receiving().metric("relay_live_copies_dropped_total").await?;
                ensure!(dropped == 0.0, "{dropped} copies were dropped");
                return Ok(());
            }
            reads.push(read);
        }
        bail!("frames read from Postgres in each round: {reads:?}")
    }

    /// Sends direct messages to an agent until they arrive at its socket as live copies.
    async fn expect_live_messages(&self, to: &str, socket: &mut NodeSocket) -> Result<()> {
        let round = async |nth: usize| -> Result<()> {
            for message in 0..MESSAGES {
                let text = format!("{nth}-{message}");
                self.ann.dm(to, &text).await?.success()?;
                let is_it = |frame: &Value| frame["agent"] == to && text_of(frame) == text;
                socket.expect_where("the message", SOON, is_it).await?;
            }
            Ok(())
        };
        self.expect_live_copies(round).await.with_context(|| format!("messages to {to}"))
    }
}

/// Returns the text of a `deliver` frame; empty for others.
fn text_of(frame: &Value) -> &str {
    frame["payload"]["data"]["text"].as_str().unwrap_or_default()
}

/// Returns the subject and the number of copies of each message with live copies of a post, which has this many
/// recipients.
async fn messages_with_copies(copies: &mut Subscriber, text: &str, recipients: usize) -> Result<Vec<(String, usize)>> {
    let mut messages = Vec::new();
    while messages.iter().map(|(_, count)| count).sum::<usize>() < recipients {
        let next = tokio::time::timeout(SOON, copies.next()).await;
        let message = next.with_context(|| format!("no more copies than {messages:?}"))?.context("nats closed")?;
        let body: Value = serde_json::from_slice(&message.payload)?;
        let copies = body["copies"].as_array().context("copies")?;
        let count = copies.iter().filter(|copy| text_of(&copy["frame"]) == text).count();
        if count > 0 {
            messages.push((message.subject.to_string(), count));
        }
    }
    Ok(messages)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_reach_sockets_of_another_gateway_as_live_copies() -> Result<()> {
    let scene = Scene::start("copied").await?;
    let (key, receiving) = (&scene.key, scene.receiving());

    let bob = key.as_agent(&key.register_agent("bob").await?);
    let mut direct = bob.at(receiving.url()).direct_socket().await?;
    scene.expect_live_messages("bob", &mut direct).await?;

    let node = key.create_broker_node("node_box", "box").await?;
    let mut broker = NodeSocket::connect(&receiving.ws_url(), &node.token).await?;
    broker.register_broker(&node.node_id, &node.name, "one").await?;
    broker.register_agent("hosted").await?;
    scene.expect_live_messages("hosted", &mut broker).await?;

    // Bound before its node has a provider, and listed by none.
    let node = key.create_broker_node("node_field", "field").await?;
    key.register_agent("cyd").await?;
    key.bind("field", "cyd").await?;
    let mut field = NodeSocket::connect(&receiving.ws_url(), &node.token).await?;
    field.request(register(&node, "tools", &json!([]), 0)).await?;
    scene.expect_live_messages("cyd", &mut field).await?;
    let mut database = PgConnection::connect(scene.stack.database_url()).await?;
    let providers: Vec<(String, Option<String>)> =
        sqlx::query_as("SELECT name, provider FROM agents WHERE name IN ('bob', 'hosted', 'cyd') ORDER BY agent_id")
            .fetch_all(&mut database)
            .await?;
    let assigned: Vec<_> = providers.iter().map(|(name, provider)| (name.as_str(), provider.as_deref())).collect();
    assert_eq!(assigned, [("bob", None), ("hosted", Some("broker")), ("cyd", None)]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_post_to_many_agents_of_one_socket_takes_a_few_messages_with_live_copies() -> Result<()> {
    let scene = Scene::start("crowded").await?;
    let node = scene.key.create_broker_node("node_crowd", "crowd").await?;
    let mut socket = NodeSocket::connect(&scene.receiving().ws_url(), &node.token).await?;
    socket.drop_presence();
    // Not by the version of a published broker, whose frames wait for its confirmations.
    socket.request(register(&node, "tools", &json!([]), 0)).await?;
    for nth in 0..AGENTS {
        socket.register_agent(&format!("agent-{nth}")).await?;
    }
    let nats = async_nats::connect(scene.stack.nats_url()).await?;
    let mut copies = nats.subscribe("relay.live.*").await?;
    nats.flush().await?;

    let round = async |nth: usize| -> Result<()> {
        let text = format!("to all {nth}");
        scene.ann.post_message("general", &text).await?.success()?;
        let mut received = HashSet::new();
        for _ in 0..AGENTS {
            let frame = socket.expect_where("the post", SOON, |frame| text_of(frame) == text).await?;
            received.insert(frame["agent"].as_str().unwrap_or_default().to_owned());
        }
        ensure!(received.len() == AGENTS, "{} of {AGENTS} agents got the post", received.len());
        let messages = messages_with_copies(&mut copies, &text, AGENTS).await?;
        let subjects: HashSet<_> = messages.iter().map(|(subject, _)| subject).collect();
        ensure!(subjects.len() == 1, "all sockets are at one gateway: {messages:?}");
        ensure!((2..AGENTS / 10).contains(&messages.len()), "{messages:?}");
        Ok(())
    };
    scene.expect_live_copies(round).await
}
