//! A process with access to NATS and without the installation's keys: nothing that it publishes reaches a node, a
//! caller or an observer, and nothing that it has recorded does so twice.

mod hints;

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use async_nats::{Client, HeaderMap, Message, Subscriber};
use futures::StreamExt as _;
use relay_testkit::{
    client::{Api, NodeSocket, ObserverSocket},
    stack::{Service, Stack},
    wait,
};
use serde_json::{Value, json};
use sqlx::{Connection as _, PgConnection};

const SOON: Duration = Duration::from_secs(30);
const UNVERIFIED: &str = "relay_nats_unverified_total";
/// Word in everything that the attacker makes up.
const FORGED: &str = "forged";

/// Attacker: reads everything on NATS and publishes what it likes.
struct Attacker {
    nats: Client,
    wiretap: Subscriber,
}

impl Attacker {
    async fn connect(stack: &Stack) -> Result<Self> {
        let nats = async_nats::connect(stack.nats_url()).await?;
        let wiretap = nats.subscribe(">").await?;
        nats.flush().await?;
        Ok(Self { nats, wiretap })
    }

    /// Records the next message that `wanted` accepts.
    async fn record(&mut self, what: &str, wanted: impl Fn(&Message) -> bool) -> Result<Message> {
        let search = async {
            loop {
                let message = self.wiretap.next().await.context("nats closed")?;
                if wanted(&message) {
                    return Ok(message);
                }
            }
        };
        tokio::time::timeout(SOON, search).await.with_context(|| format!("no {what} was published"))?
    }

    /// Records the live copy of the message with this text.
    async fn record_copy(&mut self, text: &str) -> Result<Message> {
        let is_it = |message: &Message| message.subject.starts_with("relay.live.") && text_of(message).contains(text);
        self.record(&format!("copy of {text}"), is_it).await
    }

    /// Publishes messages and waits until a gateway has refused all of them.
    async fn attack(&self, victim: &Service, messages: Vec<(String, HeaderMap, Vec<u8>)>) -> Result<()> {
        let before = victim.metric(UNVERIFIED).await?;
        let count = u32::try_from(messages.len())?;
        for (subject, headers, body) in messages {
            self.nats.publish_with_headers(subject, headers, body.into()).await?;
        }
        self.nats.flush().await?;
        wait::until_ok("the messages to be refused", SOON, || async {
            let refused = victim.metric(UNVERIFIED).await? - before;
            ensure!(refused >= f64::from(count), "{refused} of {count}");
            anyhow::Ok(())
        })
        .await
    }
}

/// Returns the id of the recipient of a recorded copy.
fn agent_of(message: &Message) -> Result<String> {
    let copies: Value = serde_json::from_slice(&message.payload)?;
    Ok(copies["copies"][0]["agent"].as_str().context("an agent")?.to_owned())
}

fn text_of(message: &Message) -> String {
    String::from_utf8_lossy(&message.payload).into_owned()
}

/// Returns the headers of a recorded message without those that NATS adds, and with other values for some.
fn headers_with(recorded: &Message, changes: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, values) in recorded.headers.iter().flat_map(|headers| headers.iter()) {
        if name.to_string().starts_with("Relay-") || name.to_string() == "Nats-Msg-Id" {
            values.iter().for_each(|value| headers.append(name.clone(), value.clone()));
        }
    }
    changes.iter().for_each(|(name, value)| headers.insert(*name, *value));
    headers
}

fn replaced(recorded: &Message, from: &str, to: &str) -> Vec<u8> {
    text_of(recorded).replace(from, to).into_bytes()
}

/// Returns the next frame of this type after checking those before it.
async fn genuine(socket: &mut NodeSocket, kind: &str) -> Result<Value> {
    loop {
        let frame = socket.next_frame(SOON).await?;
        ensure!(!frame.to_string().contains(FORGED), "a forged frame arrived: {frame}");
        if frame["type"] == kind {
            return Ok(frame);
        }
    }
}

async fn delivered(socket: &mut NodeSocket, text: &str) -> Result<i64> {
    let frame = genuine(socket, "deliver").await?;
    ensure!(frame["payload"]["data"]["text"] == text, "{text} is next, not {frame}");
    frame["seq"].as_i64().context("a seq")
}

/// Sends cat a message at the first gateway, and removes the delivery, as a failover does that loses it. Returns its
/// copy.
async fn record_lost_copy(stack: &Stack, attacker: &mut Attacker, sender: &Api, cat: &Api) -> Result<Message> {
    let mut socket = cat.at(stack.gateway(0).url()).direct_socket().await?;
    sender.dm("cat", "lost").await?.success()?;
    assert_eq!(delivered(&mut socket, "lost").await?, 1);
    let copy = attacker.record_copy("lost").await?;
    socket.close().await?;
    let mut database = PgConnection::connect(stack.database_url()).await?;
    for statement in [
        "DELETE FROM deliveries WHERE agent_id = (SELECT agent_id FROM agents WHERE name = 'cat')",
        "UPDATE mailbox_heads SET next_seq = 1 WHERE agent_id = (SELECT agent_id FROM agents WHERE name = 'cat')",
    ] {
        let removed = sqlx::query(statement).execute(&mut database).await?;
        ensure!(removed.rows_affected() == 1, "{statement}: {removed:?}");
    }
    Ok(copy)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forged_and_replayed_deliveries_reach_no_socket() -> Result<()> {
    let stack = Stack::builder().gateways(2).worker(false).start().await?;
    let key = Api::create_workspace(stack.gateway(0).url(), "wiretapped").await?;
    let (ann, bob, eve) =
        (key.register_agent("ann").await?, key.register_agent("bob").await?, key.register_agent("eve").await?);
    let cat = key.as_agent(&key.register_agent("cat").await?);
    let victim = stack.gateway(1);
    let (as_bob, as_eve) = (key.as_agent(&bob).at(victim.url()), key.as_agent(&eve).at(victim.url()));
    let (mut at_bob, mut at_eve) = (as_bob.direct_socket().await?, as_eve.direct_socket().await?);
    let ann = key.as_agent(&ann);
    let mut attacker = Attacker::connect(&stack).await?;

    // Genuine frames arrive live: none is refused, and none is read from Postgres.
    ann.dm("bob", "first").await?.success()?;
    assert_eq!(delivered(&mut at_bob, "first").await?, 1);
    let to_bob = attacker.record_copy("first").await?;
    ann.dm("eve", "hello").await?.success()?;
    assert_eq!(delivered(&mut at_eve, "hello").await?, 1);
    let to_eve = attacker.record_copy("hello").await?;
    for name in [UNVERIFIED, "relay_deliveries_repaired_total"] {
        assert_eq!(victim.metric(name).await?, 0.0, "{name}");
    }
    let to_cat = record_lost_copy(&stack, &mut attacker, &ann, &cat).await?;
    let mut at_cat = cat.at(victim.url()).direct_socket().await?;

    // Two are for sockets of one gateway, the third is for one of the other.
    let subject = to_bob.subject.to_string();
    assert_eq!(subject, to_eve.subject.to_string());
    assert_ne!(subject, to_cat.subject.to_string());
    let signed = headers_with(&to_bob, &[]);
    let with_code = |code: &str| headers_with(&to_bob, &[("Relay-Mac", code)]);
    // The next delivery of its recipient, to whom it would be sent if it were believed.
    let as_second = text_of(&to_bob).replace(r#""seq":1"#, r#""seq":2"#);
    let forged = as_second.replace("first", FORGED);
    let for_eve = forged.replace(&agent_of(&to_bob)?, &agent_of(&to_eve)?);
    let published = |headers: HeaderMap, body: &str| (subject.clone(), headers, body.as_bytes().to_vec());
    attacker
        .attack(
            victim,
            vec![
                published(HeaderMap::new(), &forged),
                published(with_code(""), &forged),
                // Of the length of a code.
                published(with_code(&"A".repeat(48)), &forged),
                published(headers_with(&to_eve, &[]), &forged),
                // Signed for bob, published with another text, as another seq, for another agent.
                published(signed.clone(), &forged),
                published(signed.clone(), &as_second),
                published(signed.clone(), &for_eve),
                // Signed for the subject of the other gateway.
                published(headers_with(&to_cat, &[]), &text_of(&to_cat)),
                // Would have bob's deliveries wait: from another place, far ahead.
                published(signed.clone(), &text_of(&to_bob).replace(r#""location":""#, r#""location":"elsewhere"#)),
                published(signed.clone(), &text_of(&to_bob).replace(r#""seq":1"#, r#""seq":9007199254740993"#)),
                published(HeaderMap::new(), "{}"),
                published(signed.clone(), "["),
            ],
        )
        .await?;
    // Genuine, and received before.
    attacker.nats.publish_with_headers(subject, signed, to_bob.payload.clone()).await?;
    attacker.nats.flush().await?;

    ann.dm("bob", "second").await?.success()?;
    assert_eq!(delivered(&mut at_bob, "second").await?, 2);
    ann.dm("eve", "there").await?.success()?;
    assert_eq!(delivered(&mut at_eve, "there").await?, 2);
    ann.dm("cat", "instead").await?.success()?;
    assert_eq!(delivered(&mut at_cat, "instead").await?, 1);
    Ok(())
}

async fn register_builder(key: &Api, victim: &Service) -> Result<NodeSocket> {
    let token = key.create_broker_node("node_builder", "builder").await?;
    let mut socket = NodeSocket::connect(&victim.ws_url(), &token.token).await?;
    let register = json!({
        "v": 1, "type": "node.register", "name": "builder", "node_id": token.node_id, "max_agents": 0, "tags": [],
        "capabilities": [{ "name": "build", "kind": "action" }], "version": "test/1",
    });
    socket.request(register).await?;
    Ok(socket)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forged_and_replayed_invocations_reach_no_node() -> Result<()> {
    let stack = Stack::builder().gateways(2).worker(false).start().await?;
    let key = Api::create_workspace(stack.gateway(0).url(), "commanded").await?;
    let ann = key.register_agent("ann").await?;
    let ann = key.as_agent(&ann);
    let victim = stack.gateway(1);
    let mut builder = register_builder(&key, victim).await?;
    let mut attacker = Attacker::connect(&stack).await?;

    let invoke = |word: &'static str| {
        let ann = ann.clone();
        async move { ann.post("/v1/actions/build/invoke", json!({ "input": { "ref": word } })).await?.success() }
    };
    invoke("main").await?;
    let frame = genuine(&mut builder, "action.invoke").await?;
    ensure!(frame.to_string().contains("main"), "{frame}");
    let hint = attacker
        .record("invocation", |m| m.subject.starts_with("relay.hints.") && text_of(m).contains(r#""hint":"invoke""#))
        .await?;
    assert_eq!(victim.metric(UNVERIFIED).await?, 0.0);
    let id = frame["invocation_id"].as_str().context("an invocation")?;
    let result = json!({ "v": 1, "type": "action.result", "invocation_id": id, "output": {} });
    builder.send_json(&result).await?;
    wait::until("the result", SOON, || async {
        let state = key.get(&format!("/v1/actions/build/invocations/{id}")).await;
        state.is_ok_and(|reply| reply.body.to_string().contains("completed"))
    })
    .await;

    // A new connection has not seen the attempt, so that only the code and its number protect it.
    builder.close().await?;
    let mut builder = register_builder(&key, victim).await?;
    let (subject, mac) = (hint.subject.to_string(), headers_with(&hint, &[]));
    let next_attempt = replaced(&hint, r#""attempt":1"#, r#""attempt":2"#);
    let mut renumbered: Value = serde_json::from_slice(&hint.payload)?;
    renumbered["number"] = json!(1_u64 << 40);
    let renumbered = renumbered.to_string().into_bytes();
    attacker
        .attack(
            victim,
            vec![
                (subject.clone(), mac.clone(), hint.payload.to_vec()),
                ("relay.hints".to_owned(), mac.clone(), hint.payload.to_vec()),
                (subject.clone(), mac.clone(), next_attempt.clone()),
                (subject.clone(), mac, replaced(&hint, "main", FORGED)),
                (subject.clone(), HeaderMap::new(), next_attempt),
                (subject.clone(), HeaderMap::new(), renumbered.clone()),
                (subject, headers_with(&hint, &[]), renumbered),
            ],
        )
        .await?;
    invoke("after").await?;
    let frame = genuine(&mut builder, "action.invoke").await?;
    ensure!(frame.to_string().contains("after"), "the attempt was written again: {frame}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forged_notices_and_events_reach_no_agent_or_observer() -> Result<()> {
    let stack = Stack::builder().gateways(2).worker(false).start().await?;
    let key = Api::create_workspace(stack.gateway(0).url(), "told").await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let victim = stack.gateway(1);
    let mut at_bob = key.as_agent(&bob).at(victim.url()).direct_socket().await?;
    let mut observer = ObserverSocket::open(victim.url(), key.token()).await?;
    let ann = key.as_agent(&ann);
    let mut attacker = Attacker::connect(&stack).await?;

    ann.create_channel("room").await?;
    let notice = attacker.record("notice", |m| text_of(m).contains(r#""hint":"notify""#)).await?;
    ann.post_message("general", "one").await?.success()?;
    let record = attacker.record("record", |m| m.subject.starts_with("live.e.") && text_of(m).contains("one")).await?;
    observer.next_of("message.created", SOON).await?;
    assert_eq!(victim.metric(UNVERIFIED).await?, 0.0);
    assert_eq!(victim.metric("relay_events_repaired_total").await?, 0.0);

    let header = |name: &str| {
        let value = record.headers.as_ref().and_then(|headers| headers.get(name));
        value.and_then(|value| value.as_str().parse::<i64>().ok())
    };
    let next = (header("Relay-Last-Seq").context("a number")? + 1).to_string();
    let as_next = [("Relay-First-Seq", next.as_str()), ("Relay-Last-Seq", next.as_str())];
    let mut unsigned = headers_with(&record, &as_next);
    unsigned.insert("Relay-Mac", "");
    let events = record.subject.to_string();
    let to_bob = replaced(&notice, "room", FORGED);
    attacker
        .attack(
            victim,
            vec![
                (notice.subject.to_string(), headers_with(&notice, &[]), to_bob.clone()),
                (notice.subject.to_string(), HeaderMap::new(), to_bob),
                (notice.subject.to_string(), headers_with(&notice, &[]), notice.payload.to_vec()),
                (events.clone(), headers_with(&record, &as_next), record.payload.to_vec()),
                (events.clone(), headers_with(&record, &[]), replaced(&record, "one", FORGED)),
                (events, unsigned, replaced(&record, "one", FORGED)),
            ],
        )
        .await?;
    ann.post_message("general", "two").await?.success()?;
    let event = observer.next_of("message.created", SOON).await?;
    ensure!(event.to_string().contains("two"), "the observer sees {event}");
    ann.dm("bob", "last").await?.success()?;
    loop {
        let frame = at_bob.next_frame(SOON).await?;
        ensure!(!frame.to_string().contains(FORGED), "a forged notice arrived: {frame}");
        if frame["payload"]["data"]["text"] == "last" {
            return Ok(());
        }
    }
}
