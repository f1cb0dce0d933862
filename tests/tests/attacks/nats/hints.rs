//! A process with access to NATS and without the installation's keys floods gateways with wake-ups: they miss hints,
//! and have their connections list their agents again, with a pause between two lists.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use relay_testkit::{
    client::{Api, NodeSocket, Reply},
    stack::{Service, Stack},
    wait,
};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(60);
const RELISTS: &str = "relay_relists_total";
/// Least time between two lists.
const PAUSE: Duration = Duration::from_secs(1);
/// Connections that each wake-up reaches once for each time that it names their node. Handling a wake-up then takes
/// many times as long as receiving it, so that the queue of 4096 hints overflows.
const CONNECTIONS: usize = 32;
const TIMES_NAMED: usize = 100;
/// Wake-ups that are published before the lists are counted again.
const WAKE_UPS: usize = 5000;
/// Lists after the first one, after which the flood ends.
const LISTS: f64 = 3.0;

async fn register(key: &Api, node: &str, providers: usize) -> Result<Vec<NodeSocket>> {
    let token = key.create_broker_node(node, node).await?;
    let mut sockets = Vec::new();
    for nth in 0..providers {
        let provider = format!("provider-{nth}");
        let mut socket = NodeSocket::connect(&key.ws_base(), &token.token).await?;
        let register = json!({
            "v": 1, "type": "node.register", "node_id": token.node_id, "name": token.name, "max_agents": 0, "tags": [],
            "version": "test", "provider": { "name": provider, "instance_id": provider }, "capabilities": [],
        });
        socket.request(register).await?;
        sockets.push(socket);
    }
    Ok(sockets)
}

/// Publishes wake-ups until the gateway has missed some, and then until it has listed everything [`LISTS`] times more.
/// Returns how often it did so after the first time, and the time within which it did.
async fn flood(stack: &Stack, victim: &Service, wake_up: &str) -> Result<(f64, Duration)> {
    let nats = async_nats::connect(stack.nats_url()).await?;
    let (begun, mut first) = (Instant::now(), None);
    while begun.elapsed() < SOON {
        for _ in 0..WAKE_UPS {
            nats.publish("relay.hints", wake_up.to_owned().into()).await?;
        }
        nats.flush().await?;
        let asked_at = Instant::now();
        let counted = victim.metric(RELISTS).await?;
        match first {
            None if counted > 0.0 => first = Some((asked_at, counted)),
            Some((first_at, at_first)) if counted >= at_first + LISTS => {
                return Ok((counted - at_first, first_at.elapsed()));
            }
            _ => {}
        }
    }
    anyhow::bail!("{} lists, the first counted at {first:?}", victim.metric(RELISTS).await?)
}

async fn texts(socket: &mut NodeSocket, count: usize) -> Result<Vec<Value>> {
    let mut texts = Vec::new();
    while texts.len() < count {
        let frame = socket.next_frame(SOON).await?;
        if frame["type"] == "deliver" && frame["seq"] != 0 {
            texts.push(frame["payload"]["data"]["text"].clone());
        }
    }
    Ok(texts)
}

/// Moves an agent to a node; an error if the gateway misses the deadline of its database.
async fn try_bind(key: &Api, node: &str, agent: &str) -> Result<Reply> {
    let reply = key.post(&format!("/v1/nodes/{node}/agents"), json!({ "agent_name": agent })).await?;
    ensure!(reply.status != 503, "{}", reply.body);
    Ok(reply)
}

/// Posts a text that no other message has. The flooded gateway may miss the deadline of its database: then the client
/// repeats the post with the same key.
async fn post_once(sender: &Api, to: &str, text: &str) -> Result<()> {
    let body = json!({ "to": to, "text": text });
    let key = text.replace(' ', "-");
    let post = || async {
        let headers = [("idempotency-key", &*key)];
        let reply = sender.call(reqwest::Method::POST, "/v1/dm", Some(body.clone()), &headers).await?;
        ensure!(reply.status != 503, "{}", reply.body);
        Ok(reply)
    };
    wait::until_ok("the outcome of a post", SOON, post).await?.success().map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missed_hints_cause_one_list_of_all_agents_in_each_pause() -> Result<()> {
    const MESSAGES: usize = 20;
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let victim = stack.gateway(0);
    let key = Api::create_workspace(victim.url(), "flooded").await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    key.register_agent("eve").await?;
    let (ann, mut at_bob) = (key.as_agent(&ann), key.as_agent(&bob).direct_socket().await?);
    let _named = register(&key, "named", CONNECTIONS).await?;
    let mut quiet = register(&key, "quiet", 1).await?.remove(0);
    let workspace = key.get("/v1/workspace").await?.success()?;
    let wake_up = json!({
        "origin": "attacker", "hint": "nodes_changed", "workspace": workspace["id"], "nodes": vec!["named"; TIMES_NAMED],
    });
    ensure!(victim.metric(RELISTS).await? == 0.0, "no hint was missed yet");

    let wake_up = wake_up.to_string();
    let flooded = flood(&stack, victim, &wake_up);
    let posted = async {
        for nth in 0..MESSAGES {
            post_once(&ann, "bob", &format!("message {nth}")).await?;
        }
        // The hint of the move is in the flood.
        wait::until_ok("the outcome of the move", SOON, || try_bind(&key, "quiet", "eve")).await?.success()?;
        post_once(&ann, "eve", "moved").await
    };
    let ((lists, within), _) = tokio::try_join!(flooded, posted)?;
    let most = (within.as_secs_f64() / PAUSE.as_secs_f64()).floor() + 1.0;
    println!("{lists} lists in {within:?}");
    ensure!(lists <= most, "{lists} lists in {within:?}");

    let expected: Vec<Value> = (0..MESSAGES).map(|nth| json!(format!("message {nth}"))).collect();
    ensure!(texts(&mut at_bob, MESSAGES).await? == expected, "bob gets all in order");
    ensure!(texts(&mut quiet, 1).await? == [json!("moved")], "eve gets hers on the other node");
    Ok(())
}
