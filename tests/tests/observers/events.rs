//! Events of each change: once, with the right fields, and none without a change.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_testkit::client::{Agent, Api, NodeSocket};
use relay_testkit::{shared, wait};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

/// Event log of a workspace with a read position. Reading counts as observing.
struct Log {
    key: Api,
    since: i64,
}

impl Log {
    async fn open(key: &Api) -> Result<Self> {
        let mut log = Self { key: key.clone(), since: 0 };
        log.page().await?;
        Ok(log)
    }

    async fn page(&mut self) -> Result<Vec<Value>> {
        let answer = self.key.get(&format!("/v1/workspace/events?since={}&limit=500", self.since)).await?.success()?;
        let events = answer["events"].as_array().context("events")?.clone();
        self.since = answer["next_since"].as_i64().context("next_since")?;
        Ok(events.into_iter().map(|event| event["payload"].clone()).collect())
    }

    /// Asserts that exactly these kinds of events have occurred since the last read, in this order.
    async fn expect_kinds(&mut self, kinds: &[&str]) -> Result<Vec<Value>> {
        let mut events = Vec::new();
        let waited = wait::until_ok("the events", SOON, async || {
            let (key, since) = (self.key.clone(), self.since);
            let mut log = Self { key, since };
            let found = log.page().await?;
            ensure!(found.len() >= kinds.len(), "{} of {} events: {found:?}", found.len(), kinds.len());
            anyhow::Ok((found, log.since))
        });
        let (found, since) = waited.await?;
        events.extend(found);
        self.since = since;
        let reported: Vec<_> = events.iter().filter_map(|event| event["type"].as_str()).collect();
        ensure!(reported == kinds, "told {reported:?}, wanted {kinds:?}: {events:?}");
        Ok(events)
    }

    async fn expect_nothing(&mut self) -> Result<()> {
        self.expect_kinds(&[]).await.map(|_| ())
    }
}

/// Asserts the values of these fields.
fn assert_fields(event: &Value, fields: Value) {
    for (field, wanted) in fields.as_object().into_iter().flatten() {
        assert_eq!(&event[field], wanted, "{field} of {event}");
    }
    assert!(event["created_at"].as_str().is_some_and(|at| at.ends_with('Z')), "{event}");
}

async fn workspace(name: &str) -> Result<(Api, Log)> {
    let key = Api::create_workspace(shared().await.any_gateway(), name).await?;
    let log = Log::open(&key).await?;
    Ok((key, log))
}

fn status(agent: &Value, word: &str) -> Value {
    json!({ "status": word, "agent": { "name": agent["name"], "id": agent["id"] } })
}

#[tokio::test]
async fn members_and_participants_come_and_go() -> Result<()> {
    let (key, mut log) = workspace("emitted-members").await?;
    let ann = key.register_agent("ann").await?;
    let events = log.expect_kinds(&["member.joined"]).await?;
    assert_fields(&events[0], json!({ "channel": "general", "agent_name": "ann", "agent_id": ann.id }));
    let (_bob, cyd) = (key.register_agent("bob").await?, key.register_agent("cyd").await?);
    log.expect_kinds(&["member.joined", "member.joined"]).await?;

    let ann = key.as_agent(&ann);
    let group = ann.post("/v1/dm/group", json!({ "participants": ["bob"] })).await?.success()?;
    let group = group["id"].as_str().context("id")?;
    log.expect_nothing().await?;
    let participants = format!("/v1/dm/{group}/participants");
    for _ in 0..2 {
        ann.post(&participants, json!({ "agent_name": "cyd" })).await?.success()?;
    }
    let events = log.expect_kinds(&["member.joined"]).await?;
    let who = json!({ "conversation_id": group, "agent_name": "cyd", "agent_id": cyd.id });
    assert_fields(&events[0], who.clone());
    for _ in 0..2 {
        assert_eq!(ann.delete(&format!("{participants}/cyd")).await?.status, 204);
    }
    assert_fields(&log.expect_kinds(&["member.left"]).await?[0], who);

    assert_eq!(key.delete("/v1/agents/cyd").await?.status, 204);
    let events = log.expect_kinds(&["agent.status.offline"]).await?;
    assert_fields(&events[0], status(&json!({ "name": "cyd", "id": cyd.id }), "offline"));
    Ok(())
}

/// Connects the broker of a node.
async fn broker(key: &Api, node: &str, token: &str, run: &str) -> Result<NodeSocket> {
    let mut socket = NodeSocket::connect(&key.ws_base(), token).await?;
    socket.register_broker(node, node, run).await?;
    Ok(socket)
}

#[tokio::test]
async fn nodes_and_their_agents_come_and_go() -> Result<()> {
    let (key, mut log) = workspace("emitted-nodes").await?;
    let mut token = String::new();
    for _ in 0..2 {
        token = key.create_broker_node("n1", "box").await?.token;
    }
    let node = json!({ "node_id": "n1", "node_name": "box" });
    let events = log.expect_kinds(&["node.registered", "token.rotated"]).await?;
    assert_fields(&events[0], node.clone());
    assert_fields(&events[1], json!({ "token": "node", "node_id": "n1", "by": "workspace_key" }));
    assert_fields(&events[0], json!({ "kind": "ws", "role": "broker" }));
    let mut socket = NodeSocket::connect(&key.ws_base(), &token).await?;
    socket.register_broker("n1", "box", "run-1").await?;
    assert_fields(&log.expect_kinds(&["node.status.online"]).await?[0], node.clone());

    let worker = socket.register_agent("worker").await?;
    let worker = json!({ "name": "worker", "id": worker["agent_id"] });
    let id = worker["id"].as_str().context("id")?.to_owned();
    log.expect_kinds(&["member.joined"]).await?;
    for _ in 0..2 {
        socket.inventory(&[]).await?;
    }
    let events = log.expect_kinds(&["agent.status.offline", "agent.exited"]).await?;
    assert_fields(&events[0], status(&worker, "offline"));
    assert_fields(&events[1], json!({ "agent_name": "worker", "node_id": "n1", "reason": "missing_from_inventory" }));
    for _ in 0..2 {
        socket.inventory(&[(&id, "worker")]).await?;
    }
    assert_fields(&log.expect_kinds(&["agent.status.active"]).await?[0], status(&worker, "active"));
    socket.request(json!({ "v": 1, "type": "agent.deregister", "agent_id": id })).await?;
    let events = log.expect_kinds(&["agent.status.offline", "agent.exited"]).await?;
    assert_fields(&events[0], status(&worker, "offline"));
    assert_fields(&events[1], json!({ "agent_name": "worker", "reason": "deregistered" }));
    for _ in 0..2 {
        socket.register_agent("worker").await?;
    }
    assert_fields(&log.expect_kinds(&["agent.status.active"]).await?[0], status(&worker, "active"));

    socket.send_json(&json!({ "v": 1, "type": "node.deregister" })).await?;
    let events = log.expect_kinds(&["agent.status.offline", "node.status.offline"]).await?;
    assert_fields(&events[0], status(&worker, "offline"));
    assert_fields(&events[1], node.clone());
    assert_fields(&events[1], json!({ "reason": "deregistered" }));
    drop(socket);

    let mut socket = broker(&key, "n1", &token, "run-2").await?;
    log.expect_kinds(&["node.status.online"]).await?;
    socket.inventory(&[(&id, "worker")]).await?;
    log.expect_kinds(&["agent.status.active"]).await?;
    socket.abort();
    let events = log.expect_kinds(&["agent.status.offline", "node.status.offline"]).await?;
    assert_fields(&events[1], json!({ "node_id": "n1", "reason": "disconnected" }));

    // A direct node is visible as its agent's status only.
    let ada = key.as_agent(&key.register_agent("ada").await?);
    log.expect_kinds(&["member.joined"]).await?;
    let socket = ada.direct_socket().await?;
    log.expect_nothing().await?;
    socket.close().await?;
    log.expect_kinds(&["agent.status.offline"]).await?;
    let _socket = ada.direct_socket().await?;
    log.expect_kinds(&["agent.status.active"]).await?;
    log.expect_nothing().await
}

struct Mailbox {
    ann: Api,
    bob: Agent,
    as_bob: Api,
    log: Log,
}

impl Mailbox {
    async fn new(name: &str) -> Result<Self> {
        let (key, mut log) = workspace(name).await?;
        let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
        log.page().await?;
        Ok(Self { ann: key.as_agent(&ann), as_bob: key.as_agent(&bob), bob, log })
    }

    /// Sends bob a message; returns its id and that of its delivery.
    async fn send(&mut self, text: &str) -> Result<(String, String)> {
        let sent = self.ann.dm("bob", text).await?.success()?;
        let message = sent["message"]["id"].as_str().context("id")?.to_owned();
        let events = self.log.expect_kinds(&["dm.received", "delivery.accepted"]).await?;
        let shown = self.as_bob.get(&format!("/v1/messages/{message}")).await?.success()?;
        assert!(shown["channel_id"].as_str().is_some_and(|id| id.starts_with("dmch_")), "{shown}");
        assert_fields(&events[1], json!({ "message_id": message, "channel_id": shown["channel_id"] }));
        Ok((format!("del_{message}_{}", self.bob.id), message))
    }
}

#[tokio::test]
async fn deliveries_are_settled() -> Result<()> {
    let mut mailbox = Mailbox::new("emitted-deliveries").await?;
    let mut sent = Vec::new();
    for text in ["one", "two", "three", "four"] {
        sent.push(mailbox.send(text).await?);
    }
    let facts = |nth: usize| {
        let (delivery, message) = &sent[nth];
        json!({ "delivery_id": delivery, "message_id": message, "agent_id": mailbox.bob.id })
    };
    let (bob, log) = (&mailbox.as_bob, &mut mailbox.log);
    let settle = |nth: usize, how: &str| format!("/v1/deliveries/{}/{how}", sent[nth].0);

    for _ in 0..2 {
        bob.post(&settle(0, "fail"), json!({ "error": "no", "retryable": true })).await?.success()?;
    }
    let events = log.expect_kinds(&["delivery.failed", "delivery.accepted"]).await?;
    assert_fields(&events[0], facts(0));
    let again = format!("{}_r1", sent[0].0);
    assert_fields(&events[0], json!({ "error": "no", "retryable": true, "redriven_as": again }));
    assert_fields(&events[1], json!({ "delivery_id": again, "redrive_of": sent[0].0, "delivery_seq": 5 }));
    assert!(events[0]["conversation_id"].is_string(), "filtered like its message: {}", events[0]);

    let later = "2099-01-01T00:00:00.000Z";
    for _ in 0..2 {
        bob.post(&settle(1, "defer"), json!({ "available_at": later, "reason": "busy" })).await?.success()?;
    }
    let events = log.expect_kinds(&["delivery.deferred"]).await?;
    assert_fields(&events[0], facts(1));
    assert_fields(&events[0], json!({ "available_at": later, "reason": "busy" }));

    for _ in 0..2 {
        bob.post(&settle(2, "ack"), json!({})).await?.success()?;
    }
    let events = log.expect_kinds(&["delivery.delivered", "message.read"]).await?;
    assert_fields(&events[0], facts(2));
    assert_fields(&events[1], json!({ "message_id": sent[2].1, "agent_name": "bob", "agent_id": mailbox.bob.id }));
    assert!(events[1]["read_at"].is_string(), "{}", events[1]);

    // One ack over the socket covers them all: the third had its event already.
    let mut socket = bob.direct_socket().await?;
    socket.expect_where("the last delivery", SOON, |frame| frame["type"] == "deliver" && frame["seq"] == 4).await?;
    for _ in 0..2 {
        socket.ack("bob", 4).await?;
    }
    let events = log.expect_kinds(&["delivery.delivered"; 3]).await?;
    for (event, nth) in events.iter().zip([0, 1, 3]) {
        assert_fields(event, facts(nth));
    }
    log.expect_nothing().await
}

#[tokio::test]
async fn an_expired_delivery_is_announced_to_observers_and_its_sender() -> Result<()> {
    let mut mailbox = Mailbox::new("emitted-expiry").await?;
    let (delivery, message) = mailbox.send("too late").await?;
    let mut ann = mailbox.ann.direct_socket().await?;
    let pool = sqlx::PgPool::connect(&shared().await.database_url).await?;
    sqlx::query("UPDATE deliveries SET expires_at = now() - interval '1 second' WHERE source_id = $1")
        .bind(message.parse::<i64>()?)
        .execute(&pool)
        .await?;
    // The recipient reconnects and receives it.
    let _bob = mailbox.as_bob.direct_socket().await?;
    let events = mailbox.log.expect_kinds(&["delivery.failed"]).await?;
    let reported = json!({
        "delivery_id": delivery, "message_id": message, "reason": "ttl_expired", "retryable": false,
        "target_agent_id": mailbox.bob.id, "target_agent_name": "bob",
    });
    assert_fields(&events[0], reported.clone());
    let notice = ann.expect_where("the notice", SOON, |frame| frame["event"] == "delivery.failed").await?;
    assert_eq!((&notice["topic"], &notice["data"]["reason"]), (&json!("agent"), &reported["reason"]));
    Ok(())
}
