//! Views of observer tokens: each scope and each filter, live and replayed; and the end of tokens.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use relay_testkit::{
    client::{Agent, Api, EventSource, ObserverSocket},
    shared,
    stack::Stack,
};
use serde_json::{Value, json};
use sqlx::types::chrono::{DateTime, Utc};

const SOON: Duration = Duration::from_secs(30);
/// A revocation closes sockets within 5 s; the limit allows for a loaded machine.
const CLOSED_WITHIN: Duration = Duration::from_secs(20);
/// Lifetime of the expiring token: both streams are opened and used before it ends.
const LIFE: Duration = Duration::from_secs(15);

const SCOPES: [&str; 12] = [
    "stream:read",
    "messages:read",
    "threads:read",
    "dms:read",
    "channels:read",
    "search:read",
    "agents:read",
    "nodes:read",
    "deliveries:read",
    "activity:read",
    "files:read",
    "reactions:read",
];

/// Scope that an event requires (docs/protocol/rest.md, "Event scopes").
fn scope_of(event: &Value) -> &'static str {
    if event.get("conversation_id").is_some_and(|id| !id.is_null()) {
        return "dms:read";
    }
    match event["type"].as_str().unwrap_or_default() {
        "message.created" | "message.updated" | "message.read" | "webhook.received" => "messages:read",
        "thread.reply" => "threads:read",
        "message.reacted" => "reactions:read",
        "file.uploaded" => "files:read",
        kind if kind.starts_with("dm.") || kind.starts_with("group_dm.") => "dms:read",
        kind if kind.starts_with("agent.status.") => "agents:read",
        kind if kind.starts_with("channel.") || kind.starts_with("member.") => "channels:read",
        kind if kind.starts_with("delivery.") => "deliveries:read",
        kind if kind.starts_with("node.") => "nodes:read",
        _ => "activity:read",
    }
}

async fn token(key: &Api, name: &str, scopes: &[&str], filters: Value) -> Result<Value> {
    key.post("/v1/observer-tokens", json!({ "name": name, "scopes": scopes, "filters": filters })).await?.success()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Workspace in which events of every kind occur.
struct Stage {
    key: Api,
    ann: Agent,
    bob: Agent,
    channel_id: String,
    dm: String,
}

impl Stage {
    async fn set(gateway: &str, name: &str) -> Result<Self> {
        let key = Api::create_workspace(gateway, name).await?;
        let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
        let channel = key.as_agent(&ann).create_channel("room").await?;
        key.as_agent(&ann).create_channel("annex").await?;
        key.as_agent(&bob).join("room").await?;
        let dm = key.as_agent(&ann).dm("bob", "hello").await?.success()?;
        let (channel_id, dm) = (text(&channel["id"]), text(&dm["conversation_id"]));
        Ok(Self { key, ann, bob, channel_id, dm })
    }

    /// Causes one event of every kind.
    async fn play(&self) -> Result<()> {
        let (ann, bob) = (self.key.as_agent(&self.ann), self.key.as_agent(&self.bob));
        let message = ann.post_message("room", "in the room").await?.success()?;
        let id = text(&message["id"]);
        bob.post(&format!("/v1/messages/{id}/replies"), json!({ "text": "a reply" })).await?.success()?;
        bob.post(&format!("/v1/messages/{id}/reactions"), json!({ "emoji": "tada" })).await?.success()?;
        bob.post_empty(&format!("/v1/messages/{id}/read")).await?.success()?;
        ann.post_message("annex", "in the annex").await?.success()?;
        bob.dm("ann", "psst").await?.success()?;
        let group = ann.post("/v1/dm/group", json!({ "participants": ["bob"], "name": "us" })).await?.success()?;
        ann.post(&format!("/v1/dm/{}/messages", text(&group["id"])), json!({ "text": "all of us" }))
            .await?
            .success()?;
        ann.patch("/v1/channels/room/topic", json!({ "topic": "things" })).await?.success()?;
        bob.post_empty("/v1/channels/room/mute").await?.success()?;
        bob.post_empty("/v1/channels/room/unmute").await?.success()?;
        self.key.patch("/v1/agents/bob", json!({ "status": "blocked" })).await?.success()?;
        self.key.patch("/v1/agents/bob", json!({ "status": "active" })).await?.success()?;
        bob.post("/v1/agents/bob/events", json!({ "type": "tool.called", "payload": { "tool": "x" } }))
            .await?
            .success()?;
        self.key.post("/v1/nodes", json!({ "name": "box", "kind": "ws", "role": "broker" })).await?.success()?;
        Ok(())
    }

    /// Every filter (docs/protocol/rest.md, "Observer filters"), each hiding some events and showing others.
    fn filters(&self) -> [Value; 9] {
        [
            json!({}),
            json!({ "include_dms": true }),
            json!({ "include_dms": true, "dm_conversation_ids": [self.dm] }),
            json!({ "include_dms": true, "channel_ids": [self.channel_id] }),
            json!({ "channel_names": ["room"] }),
            json!({ "include_dms": true, "agent_ids": [self.ann.id] }),
            json!({ "event_types": ["message.created", "dm.received", "node.registered"] }),
            json!({ "include_dms": true, "created_after": "2020-01-01T00:00:00Z" }),
            json!({ "include_dms": true, "created_after": "2999-01-01T00:00:00Z" }),
        ]
    }

    /// Returns the last number: every visible event precedes the answer.
    async fn latest(&self) -> Result<i64> {
        let page = self.key.get("/v1/workspace/events?since=0&limit=1").await?.success()?;
        page["latest_seq"].as_i64().context("latest_seq")
    }
}

/// Reads the whole log visible to a token.
async fn log(api: &Api, since: i64) -> Result<Vec<Value>> {
    let (mut events, mut since) = (Vec::new(), since);
    loop {
        let page = api.get(&format!("/v1/workspace/events?since={since}&limit=500")).await?.success()?;
        events.extend(page["events"].as_array().context("events")?.iter().cloned());
        let next = page["next_since"].as_i64().context("next_since")?;
        if next == since {
            return Ok(events);
        }
        since = next;
    }
}

fn numbers(events: &[Value]) -> Vec<i64> {
    events.iter().filter_map(|event| event["seq"].as_i64()).collect()
}

/// Reads the numbers that a socket shows up to a marker event that every token sees.
async fn shown(socket: &mut ObserverSocket, expected: &[i64]) -> Result<Vec<i64>> {
    let mut seen = Vec::new();
    while seen.len() < expected.len() {
        seen.push(socket.next(SOON).await?["seq"].as_i64().context("seq")?);
    }
    Ok(seen)
}

#[tokio::test]
async fn each_scope_shows_its_events_and_no_others() -> Result<()> {
    let gateways = &shared().await.gateways;
    let stage = Stage::set(&gateways[0], "scopes").await?;
    let start = stage.latest().await?;
    let mut sockets = Vec::new();
    for (nth, scope) in SCOPES.iter().enumerate() {
        let made = token(&stage.key, scope, &["stream:read", scope], json!({ "include_dms": true })).await?;
        let gateway = &gateways[nth % gateways.len()];
        let api = Api::new(gateway, &text(&made["token"]));
        sockets.push((*scope, ObserverSocket::open(gateway, api.token()).await?, api));
    }
    stage.play().await?;
    let all = log(&stage.key, start).await?;
    let kinds: BTreeSet<&str> = all.iter().filter_map(|event| event["type"].as_str()).collect();
    for kind in [
        "message.created",
        "thread.reply",
        "message.reacted",
        "message.read",
        "dm.received",
        "group_dm.received",
        "channel.updated",
        "member.channel_muted",
        "agent.status.blocked",
        "delivery.accepted",
        "node.registered",
        "harness.tool.called",
    ] {
        assert!(kinds.contains(kind), "{kind} did not happen: {kinds:?}");
    }
    for (scope, socket, api) in &mut sockets {
        let expected: Vec<Value> = all.iter().filter(|event| scope_of(&event["payload"]) == *scope).cloned().collect();
        assert_eq!(numbers(&log(api, start).await?), numbers(&expected), "{scope} by the log");
        assert_eq!(shown(socket, &numbers(&expected)).await?, numbers(&expected), "{scope} live");
        assert!(socket.drain(SOON).await?.is_empty(), "{scope} shows more");
    }
    let read_but_no_stream = token(&stage.key, "no stream", &["messages:read"], json!({})).await?;
    let api = stage.key.with_token(&text(&read_but_no_stream["token"]));
    api.get("/v1/workspace/events").await?.refused(403, "insufficient_scope")?;
    assert!(ObserverSocket::open(&gateways[0], api.token()).await.is_err());
    Ok(())
}

#[tokio::test]
async fn each_filter_passes_only_matching_events() -> Result<()> {
    let gateways = &shared().await.gateways;
    let stage = Stage::set(&gateways[0], "filters").await?;
    let start = stage.latest().await?;
    let everything: Vec<&str> = SCOPES.to_vec();
    stage.play().await?;
    let all = log(&stage.key, start).await?;
    let payload = |event: &Value| event["payload"].clone();
    let is_dm = |event: &Value| scope_of(&payload(event)) == "dms:read";
    let in_room = |event: &Value| payload(event)["channel"] == "room" || payload(event)["channel"]["name"] == "room";
    let cut = all[all.len() / 2]["created_at"].clone();
    type EventPredicate<'a> = Box<dyn Fn(&Value) -> bool + 'a>;
    let table: Vec<(Value, EventPredicate<'_>)> = vec![
        (json!({}), Box::new(|event| !is_dm(event))),
        (json!({ "include_dms": true }), Box::new(|_| true)),
        (
            json!({ "include_dms": true, "dm_conversation_ids": [stage.dm] }),
            Box::new(|event| !is_dm(event) || payload(event)["conversation_id"] == json!(stage.dm)),
        ),
        (json!({ "event_types": ["message.created", "dm.received"] }), Box::new(|e| e["type"] == "message.created")),
        (json!({ "created_after": cut }), Box::new(|event| !is_dm(event) && text(&event["created_at"]) > text(&cut))),
    ];
    for (nth, (filters, keeps)) in table.iter().enumerate() {
        let made = token(&stage.key, &format!("filter {nth}"), &everything, filters.clone()).await?;
        let api = stage.key.with_token(&text(&made["token"]));
        let expected: Vec<Value> = all.iter().filter(|event| keeps(event)).cloned().collect();
        assert_eq!(numbers(&log(&api, start).await?), numbers(&expected), "{filters}");
    }
    // Channels by id or by name; events without a channel are not affected.
    for filters in [json!({ "channel_ids": [stage.channel_id] }), json!({ "channel_names": ["room"] })] {
        let made = token(&stage.key, &filters.to_string(), &everything, filters.clone()).await?;
        let seen = log(&stage.key.with_token(&text(&made["token"])), start).await?;
        for event in &all {
            let placed = payload(event).get("channel").is_some_and(|channel| !channel.is_null());
            if placed && !is_dm(event) {
                let there = seen.iter().any(|one| one["seq"] == event["seq"]);
                assert_eq!(there, in_room(event), "{filters}: {event}");
            }
        }
    }
    let made = token(&stage.key, "of ann", &everything, json!({ "agent_ids": [stage.ann.id] })).await?;
    let seen = log(&stage.key.with_token(&text(&made["token"])), start).await?;
    let authors: BTreeSet<String> = seen
        .iter()
        .filter(|e| e["type"] == "message.created")
        .map(|e| text(&payload(e)["message"]["agent_name"]))
        .collect();
    assert_eq!(authors, BTreeSet::from(["ann".to_owned()]));
    assert!(!seen.iter().any(|event| event["type"] == "thread.reply"), "bob replied");
    Ok(())
}

/// One scope with one filter, and the events that its stream has shown.
struct Pair {
    name: String,
    scope: &'static str,
    /// Client of a token with this filter and every scope.
    filtered: Api,
    api: Api,
    socket: ObserverSocket,
    seen: Vec<i64>,
}

impl Pair {
    /// Returns the numbers to show after a number.
    async fn expected(&self, start: i64) -> Result<Vec<i64>> {
        let left = log(&self.filtered, start).await?;
        Ok(numbers(&left.into_iter().filter(|event| scope_of(&event["payload"]) == self.scope).collect::<Vec<_>>()))
    }

    /// Reads the remaining events of the socket and asserts that there are no others.
    async fn catch_up(&mut self, start: i64) -> Result<()> {
        let expected = self.expected(start).await?;
        while self.seen.len() < expected.len() {
            let frame = self.socket.next(SOON).await?;
            self.take(&[frame]);
        }
        let more = self.socket.drain(SOON).await?;
        self.take(&more);
        assert_eq!(self.seen, expected, "{}", self.name);
        Ok(())
    }

    /// Records events like a client, which ignores those that the log has shown.
    fn take(&mut self, events: &[Value]) {
        for seq in numbers(events) {
            if self.seen.last().is_none_or(|last| seq > *last) {
                self.seen.push(seq);
            }
        }
    }

    /// Reads the rest from the dead gateway, opens the stream elsewhere, and reads the log up to it.
    async fn resume(&mut self, gateway: &str, start: i64) -> Result<()> {
        while let Ok(frame) = self.socket.next(SOON).await {
            self.take(&[frame]);
        }
        self.api = self.api.at(gateway);
        self.socket = ObserverSocket::open(gateway, self.api.token()).await?;
        let missed = log(&self.api, self.seen.last().copied().unwrap_or(start)).await?;
        self.take(&missed);
        Ok(())
    }
}

/// Every scope with every filter: live at a gateway that crashes, and resumed at another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_scope_with_each_filter_shows_the_same_through_a_dead_gateway() -> Result<()> {
    let stack = Stack::builder().start().await?;
    let (doomed, other) = (stack.gateway(0), stack.gateway(1));
    let stage = Stage::set(other.url(), "pairs").await?;
    let start = stage.latest().await?;
    let mut witness = ObserverSocket::open(doomed.url(), stage.key.token()).await?;
    let mut pairs = Vec::new();
    for filters in stage.filters() {
        let every = token(&stage.key, &filters.to_string(), &SCOPES, filters.clone()).await?;
        for scope in SCOPES {
            let name = format!("{scope} {filters}");
            let made = token(&stage.key, &name, &["stream:read", scope], filters.clone()).await?;
            let api = Api::new(doomed.url(), &text(&made["token"]));
            let socket = ObserverSocket::open(doomed.url(), api.token()).await?;
            let filtered = stage.key.with_token(&text(&every["token"]));
            pairs.push(Pair { name, scope, filtered, api, socket, seen: Vec::new() });
        }
    }
    stage.play().await?;
    let all = numbers(&log(&stage.key, start).await?);
    assert_eq!(shown(&mut witness, &all).await?, all, "the gateway has all of it");
    for pair in &mut pairs {
        pair.catch_up(start).await?;
    }
    let shows = pairs.iter().filter(|pair| !pair.seen.is_empty()).count();
    assert!(shows > pairs.len() / 3, "{shows} of {} pairs show anything", pairs.len());

    let killed = async {
        let first = witness.next(SOON).await;
        doomed.kill9();
        first
    };
    let (played, first) = tokio::join!(stage.play(), killed);
    played?;
    first?;
    let mut witness = ObserverSocket::open(other.url(), stage.key.token()).await?;
    for pair in &mut pairs {
        pair.resume(other.url(), start).await?;
        assert_eq!(pair.seen, pair.expected(start).await?, "{} read on", pair.name);
    }
    let start_of_last = stage.latest().await?;
    stage.play().await?;
    let all = numbers(&log(&stage.key, start_of_last).await?);
    assert_eq!(shown(&mut witness, &all).await?, all, "the other gateway has all of it");
    for pair in &mut pairs {
        pair.catch_up(start).await?;
    }
    Ok(())
}

#[tokio::test]
async fn an_expiring_or_revoked_token_closes_its_sockets() -> Result<()> {
    let gateways = &shared().await.gateways;
    let stage = Stage::set(&gateways[0], "endings").await?;
    for (way, word) in [("revoke", "revoked"), ("rotate", "rotated"), ("expire", "expired")] {
        let expires = chrono_in(if way == "expire" { LIFE } else { Duration::from_secs(3600) });
        let body = json!({ "name": way, "scopes": ["stream:read", "messages:read"], "expires_at": expires });
        let made = stage.key.post("/v1/observer-tokens", body).await?.success()?;
        let value = text(&made["token"]);
        // Both sockets are at the gateway that learns of the change second.
        let mut socket = ObserverSocket::open(&gateways[1], &value).await?;
        let mut stream = EventSource::open(&Api::new(&gateways[1], &value), None).await?;
        stage.key.as_agent(&stage.ann).post_message("room", way).await?.success()?;
        assert_eq!(socket.next(SOON).await?["message"]["text"], json!(way));
        assert_eq!(stream.next(SOON).await?.data["message"]["text"], json!(way));
        let id = text(&made["id"]);
        match way {
            "revoke" => drop(stage.key.delete(&format!("/v1/observer-tokens/{id}")).await?.success()?),
            "rotate" => drop(stage.key.post(&format!("/v1/observer-tokens/{id}/rotate"), json!({})).await?.success()?),
            _ => {}
        }
        let asked = Instant::now();
        let limit = CLOSED_WITHIN + if way == "expire" { LIFE } else { Duration::ZERO };
        let (code, reason) = socket.closed(limit).await?;
        assert_eq!(code, 1008, "{way}");
        assert!(reason.contains(word), "{way}: {reason}");
        let close = stream.next(limit).await?;
        assert_eq!(close.event, "close", "{way}");
        assert!(text(&close.data["reason"]).contains(word), "{way}: {close:?}");
        println!("{way} took {:?}", asked.elapsed());
        assert!(ObserverSocket::open(&gateways[0], &value).await.is_err());
    }
    Ok(())
}

#[tokio::test]
async fn narrowed_filters_apply_to_open_sockets() -> Result<()> {
    let gateways = &shared().await.gateways;
    let stage = Stage::set(&gateways[0], "narrowed").await?;
    let made = token(&stage.key, "narrowed", &["stream:read", "messages:read"], json!({})).await?;
    let mut socket = ObserverSocket::open(&gateways[1], &text(&made["token"])).await?;
    let ann = stage.key.as_agent(&stage.ann);
    ann.post_message("annex", "before").await?.success()?;
    assert_eq!(socket.next(SOON).await?["channel"], "annex");
    let path = format!("/v1/observer-tokens/{}", text(&made["id"]));
    stage.key.patch(&path, json!({ "filters": { "channel_names": ["room"] } })).await?.success()?;
    // Within the same time as for a revocation.
    let until = Instant::now() + CLOSED_WITHIN;
    loop {
        ann.post_message("annex", "hidden").await?.success()?;
        ann.post_message("room", "shown").await?.success()?;
        let mut annex = false;
        loop {
            let frame = socket.next(SOON).await?;
            annex |= frame["channel"] == "annex";
            if frame["channel"] == "room" {
                break;
            }
        }
        if !annex {
            return Ok(());
        }
        assert!(Instant::now() < until, "the old filters still count");
    }
}

/// Returns a later instant, as clients format it.
fn chrono_in(ahead: Duration) -> String {
    let at: DateTime<Utc> = (std::time::SystemTime::now() + ahead).into();
    at.format("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}
