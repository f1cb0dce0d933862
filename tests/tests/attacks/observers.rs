//! Observers that cost a gateway much: too many of one token, and those that do not read.

mod tokens;

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_acceptance::tcp_client::TcpClient;
use relay_testkit::{
    client::{Api, ObserverSocket},
    stack::Stack,
    wait,
};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);
const SOCKET: &str = "/v1/ws";
const STREAM: &str = "/v1/workspace/events/stream";
/// Observers that a token may have in this test.
const OBSERVERS: usize = 4;

async fn observer_token(key: &Api, name: &str) -> Result<String> {
    let token = json!({ "name": name, "scopes": ["stream:read", "messages:read"] });
    let token = key.post("/v1/observer-tokens", token).await?.success()?;
    Ok(token["token"].as_str().context("a token")?.to_owned())
}

/// Opens a socket or a stream; `None` if there are too many.
async fn observe(gateway: &str, path: &str, token: &str) -> Result<Option<TcpClient>> {
    let header = [format!("authorization: Bearer {token}")];
    let (mut client, head) = TcpClient::upgrade(gateway, path, &header).await?;
    if head.status == if path == SOCKET { 101 } else { 200 } {
        return Ok(Some(client));
    }
    ensure!(head.status == 503 && head.has("retry-after: 1"), "{head:?}");
    let code = client.error_code(&head).await?;
    ensure!(code == "too_many_connections", "{code}");
    Ok(None)
}

#[tokio::test]
async fn sockets_and_streams_of_a_token_have_one_share() -> Result<()> {
    let stack = Stack::builder()
        .gateways(1)
        .worker(false)
        .env("RELAY_MAX_CONNECTIONS_PER_TOKEN", OBSERVERS.to_string())
        .start()
        .await?;
    let gateway = stack.gateway(0).url();
    let key = Api::create_workspace(gateway, "observed").await?;
    let (greedy, other) = (observer_token(&key, "greedy").await?, observer_token(&key, "other").await?);
    let mut observers = Vec::new();
    for path in [SOCKET, STREAM].into_iter().cycle().take(OBSERVERS) {
        observers.push(observe(gateway, path, &greedy).await?.context("within the share")?);
    }
    for path in [SOCKET, STREAM] {
        ensure!(observe(gateway, path, &greedy).await?.is_none(), "one more than the share at {path}");
        ensure!(observe(gateway, path, &other).await?.is_some(), "another token at {path}");
    }
    ensure!(stack.gateway(0).metric("relay_connections_refused_total").await? >= 2.0, "counted");
    // The last one is a stream, the one before it a socket.
    for path in [STREAM, SOCKET] {
        drop(observers.pop());
        let reopened = wait::until_ok("the place of a closed observer", SOON, || async {
            observe(gateway, path, &greedy).await?.context("too many observers")
        });
        observers.insert(0, reopened.await?);
    }
    Ok(())
}

/// Bytes of a large post. Together they are more than the buffers of a connection hold.
const LARGE: usize = 12_000;
const LARGE_POSTS: usize = 800;
/// More than a gateway keeps for an observer that is behind.
const SMALL_POSTS: usize = 1600;

/// Posts messages of this size in batches.
async fn post_many(agent: &Api, posts: usize, size: usize, posts_in_batch: usize) -> Result<()> {
    let post = json!({ "channel": "general", "text": "x".repeat(size) });
    let body = json!({ "messages": vec![post; posts_in_batch] });
    for _ in 0..posts / posts_in_batch {
        let sent = agent.post("/v1/messages/batch", body.clone()).await?.success()?;
        let outcomes = sent["outcomes"].as_array().context("outcomes")?;
        ensure!(outcomes.iter().all(|outcome| outcome["status"] == 201), "{:?}", outcomes.first());
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_observer_that_does_not_read_is_closed_with_1013() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let gateway = stack.gateway(0);
    let key = Api::create_workspace(gateway.url(), "unread").await?;
    let ann = key.as_agent(&key.register_agent("ann").await?);
    let other = Api::create_workspace(gateway.url(), "other").await?;
    let bob = other.as_agent(&other.register_agent("bob").await?);
    let mut stuck = ObserverSocket::open(gateway.url(), &observer_token(&key, "stuck").await?).await?;
    let mut reader = ObserverSocket::open(gateway.url(), &observer_token(&other, "reader").await?).await?;
    post_many(&ann, LARGE_POSTS, LARGE, 50).await?;
    post_many(&ann, SMALL_POSTS, 1, 100).await?;
    bob.post_message("general", "hello").await?.success()?;
    reader.next_of("message.created", SOON).await.context("an observer of another tenant")?;

    let seq = |frame: &Value| frame["seq"].as_i64().context("a seq");
    let mut last = seq(&stuck.next(SOON).await?)?;
    let closed = loop {
        match stuck.next(SOON).await {
            Ok(frame) => {
                ensure!(seq(&frame)? > last, "in order");
                last = seq(&frame)?;
            }
            Err(error) => break error.to_string(),
        }
    };
    ensure!(closed.starts_with("closed 1013 observer too slow"), "{closed}");
    let latest = key.get("/v1/workspace/events?since=0&limit=1").await?.success()?;
    ensure!(latest["latest_seq"].as_i64().is_some_and(|latest| latest > last), "it had read everything");
    ensure!(gateway.metric("relay_observers_cut_total").await? >= 1.0, "counted");
    Ok(())
}
