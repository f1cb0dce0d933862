//! Observers: the log of events, the socket and the stream of server-sent events.

use std::time::Duration;

use anyhow::Result;
use relay_testkit::client::{Api, EventSource, ObserverSocket};
use relay_testkit::wait;
use serde_json::{Value, json};

use crate::walk::{Walk, ask, ask_all, text};

const SOON: Duration = Duration::from_secs(40);
/// The last event of a chapter.
const LAST: &str = "the last one";

/// Something of each kind that observers hear of.
async fn everything(walk: &Walk, ada: &Api, bob: &Api) -> Result<()> {
    let key = &walk.key;
    let posted =
        ask(ada, r#"POST /v1/channels/general/messages {"text":"to all @bob","data":{"b":1,"a":2},"mode":"steer"}"#)
            .await?;
    let posted = text(&posted, "/id")?;
    let upload = r#"POST /v1/files/upload {"filename":"a","content_type":"text/plain","size_bytes":1}"#;
    let declared = ask(ada, upload).await?;
    relay_acceptance::raw::Raw::new("PUT", text(&declared, "/upload_url")?).body("a").send().await?;
    ask_all(
        ada,
        &[
            &format!(r#"POST /v1/messages/{posted}/replies {{"text":"in a thread"}}"#),
            &format!(r#"POST /v1/messages/{posted}/reactions {{"emoji":"tada"}}"#),
            &format!("DELETE /v1/messages/{posted}/reactions/tada"),
            &format!(r#"PATCH /v1/messages/{posted} {{"text":"corrected"}}"#),
            &format!("POST /v1/files/{}/complete", text(&declared, "/id")?),
            r#"POST /v1/dm {"to":"bob","text":"between us"}"#,
            r#"POST /v1/dm/group {"participants":["bob"],"name":"us","text":"in a group"}"#,
            r#"POST /v1/channels {"name":"plans","topic":"first"}"#,
            r#"PATCH /v1/channels/plans {"topic":"second"}"#,
            r#"POST /v1/channels/plans/invite {"agent_name":"bob"}"#,
            "POST /v1/channels/plans/mute",
            "POST /v1/channels/plans/unmute",
            "POST /v1/agents/heartbeat {}",
        ],
    )
    .await?;
    for kind in
        ["status.idle", "status.blocked", "status.waiting", "status.active", "tool.called", "terminal.output", "log"]
    {
        ask(ada, &format!(r#"POST /v1/agents/ada/events {{"type":"{kind}","payload":{{"b":1,"a":2}}}}"#)).await?;
    }
    let changed = r#"POST /v1/agents/ada/events {"type":"status.changed","payload":{"status":"idle"}}"#;
    ask(ada, changed).await?;
    let rows = ask(bob, "GET /v1/deliveries").await?;
    let id = |index: usize| rows["data"][index]["id"].as_str().unwrap_or_default();
    ask_all(
        bob,
        &[
            &format!("POST /v1/messages/{posted}/read"),
            &format!("POST /v1/deliveries/{}/ack", id(1)),
            &format!(r#"POST /v1/deliveries/{}/fail {{"error":"broken","retryable":false}}"#, id(2)),
            &format!(
                r#"POST /v1/deliveries/{}/defer {{"available_at":"2099-01-01T00:00:00Z","reason":"later"}}"#,
                id(3)
            ),
            "POST /v1/channels/plans/leave",
            r#"POST /v1/actions {"name":"count","description":"","handler_agent":"bob"}"#,
            r#"POST /v1/actions {"name":"secret","description":"","handler_agent":"bob","available_to":["bob"]}"#,
        ],
    )
    .await?;
    for body in [r#"{"output":{"b":1,"a":2}}"#, r#"{"error":"broken"}"#] {
        let asked = ask(ada, r#"POST /v1/actions/count/invoke {"input":{"n":1}}"#).await?;
        ask(bob, &format!("POST /v1/actions/count/invocations/{}/complete {body}", text(&asked, "/invocation_id")?))
            .await?;
    }
    ask(ada, "POST /v1/actions/secret/invoke {}").await?;
    let hook = ask(key, r#"POST /v1/webhooks {"name":"ci","channel":"general"}"#).await?;
    ask(&key.with_token(&text(&hook, "/token")?), &format!(r#"POST {} {{"text":"hooked"}}"#, text(&hook, "/url")?))
        .await?;
    ask_all(
        key,
        &[
            r#"POST /v1/agents {"name":"cyd"}"#,
            "DELETE /v1/channels/plans",
            r#"PATCH /v1/agents/ada {"persona":"x","status":"offline"}"#,
            "DELETE /v1/agents/cyd",
            r#"PATCH /v1/workspace {"metadata":{"a":1}}"#,
        ],
    )
    .await
}

/// The socket of a broker comes and goes.
async fn a_node(walk: &Walk) -> Result<()> {
    let node = walk.key.create_broker_node("node_box", "box").await?;
    let mut socket = relay_testkit::client::NodeSocket::connect(&walk.key.ws_base(), &node.token).await?;
    socket.register_broker("node_box", "box", "run-1").await?;
    let worker = socket.register_agent("worker").await?;
    socket.inventory(&[]).await?;
    socket
        .request(json!({ "v": 1, "type": "agent.deregister", "agent_id": worker["agent_id"], "name": "worker" }))
        .await?;
    socket.close().await?;
    let aside = walk.aside(&walk.key);
    wait::until("the node to be offline", SOON, || async {
        aside.get("/v1/nodes/box").await.is_ok_and(|node| node.data()["status"] == "offline")
    })
    .await;
    Ok(())
}

fn is_last(event: &Value) -> bool {
    event.to_string().contains(LAST)
}

#[tokio::test]
async fn observers() -> Result<()> {
    let walk = Walk::new("observers").await?;
    let (_, ada) = walk.agent("ada").await?;
    let (_, bob) = walk.agent("bob").await?;
    let scopes = [
        "stream",
        "messages",
        "threads",
        "dms",
        "channels",
        "agents",
        "nodes",
        "deliveries",
        "activity",
        "files",
        "reactions",
    ]
    .map(|noun| format!("{noun}:read"));
    let all = json!({ "name": "all", "scopes": scopes, "filters": { "include_dms": true } });
    let some = json!({ "name": "some", "scopes": ["stream:read", "messages:read"], "filters": { "channel_names": ["general"] } });
    let all = text(&ask(&walk.key, &format!("POST /v1/observer-tokens {all}")).await?, "/token")?;
    let some_made = ask(&walk.key, &format!("POST /v1/observer-tokens {some}")).await?;
    let some = text(&some_made, "/token")?;
    let there = walk.there(&walk.key);
    let mut by_key = ObserverSocket::open(walk.key.base(), walk.key.token()).await?;
    let mut by_token = ObserverSocket::open(there.base(), &all).await?;
    let mut filtered = ObserverSocket::open(there.base(), &some).await?;
    let mut stream = EventSource::open(&there, None).await?;
    by_key.send(json!({ "type": "ping" })).await?;
    by_key.next_of("pong", SOON).await?;
    by_key.send(json!({ "type": "subscribe", "channels": ["general"] })).await?;
    by_key.send(json!({ "type": "nonsense" })).await?;
    everything(&walk, &ada, &bob).await?;
    a_node(&walk).await?;
    ask(&bob, &format!(r#"POST /v1/channels/general/messages {{"text":"{LAST}"}}"#)).await?;
    for socket in [&mut by_key, &mut by_token, &mut filtered] {
        while !is_last(&socket.next(SOON).await?) {}
    }
    while !is_last(&stream.next(SOON).await?.data) {}
    by_key.send(json!({ "type": "resync", "last_seen_seq": 3 })).await?;
    by_key.next_of("resync_ack", SOON).await?;
    let mut again = EventSource::open(&walk.key, Some(2)).await?;
    while !is_last(&again.next(SOON).await?.data) {}
    ask_all(
        &walk.key,
        &[
            "GET /v1/workspace/events",
            "GET /v1/workspace/events?since=0&limit=2",
            "GET /v1/workspace/events?since=2&limit=500",
            "GET /v1/workspace/events?since=-1",
            "GET /v1/workspace/events?limit=0",
            "GET /v1/activity",
            "GET /v1/ws",
        ],
    )
    .await?;
    let observer = walk.key.with_token(&some);
    ask_all(&observer, &["GET /v1/workspace/events?since=0&limit=500", "GET /v1/channels"]).await?;
    ask_all(&ada, &["GET /v1/workspace/events", "GET /v1/workspace/events/stream"]).await?;
    let id = text(&some_made, "/id")?;
    ask(&walk.key, &format!("DELETE /v1/observer-tokens/{id}")).await?;
    filtered.closed(SOON).await?;
    for socket in [&mut by_key, &mut by_token] {
        socket.next_of("token.revoked", SOON).await?;
    }
    for stream in [&mut stream, &mut again] {
        while stream.next(SOON).await?.data["type"] != "token.revoked" {}
    }
    walk.end()
}
