//! Connections that cost nothing to open: slow, silent, unregistered, and too many of them.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, future::try_join_all, stream};
use relay_acceptance::tcp_client::TcpClient;
use relay_testkit::{
    client::{Api, NodeSocket, NodeToken},
    shared,
    stack::Stack,
    wait,
};
use serde_json::json;

/// Default limit of the sockets on one token.
const SOCKETS_PER_TOKEN: usize = 600;
/// Time within which a gateway with a timeout of a second closes a connection, on a loaded machine.
const CLOSED_WITHIN: Duration = Duration::from_secs(30);
const SECOND: Duration = Duration::from_secs(1);
/// Longest time that a request takes.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

async fn node(key: &Api, name: &str) -> Result<NodeToken> {
    key.create_broker_node(&format!("node_{name}"), name).await
}

/// Asks for a node socket; `None` if there are too many connections. Retries, as nodes do, while the gateway is busy.
async fn socket(gateway: &str, token: &str, forwarded_for: Option<&str>) -> Result<Option<TcpClient>> {
    let mut headers = vec![format!("authorization: Bearer {token}")];
    headers.extend(forwarded_for.map(|address| format!("x-forwarded-for: {address}")));
    wait::until_ok("an answer of a gateway that is not busy", CLOSED_WITHIN, || async {
        let (mut client, head) = TcpClient::upgrade(gateway, "/v1/node/ws", &headers).await?;
        if head.status == 101 {
            return Ok(Some(client));
        }
        ensure!(head.status == 503 && head.has("retry-after: 1"), "{head:?}");
        let code = client.error_code(&head).await?;
        ensure!(code == "too_many_connections", "{code}");
        Ok(None)
    })
    .await
}

#[tokio::test]
async fn slow_and_silent_connections_are_closed() -> Result<()> {
    let stack = Stack::builder()
        .gateways(1)
        .env("RELAY_HEAD_TIMEOUT_SECONDS", "1")
        .env("RELAY_IDLE_TIMEOUT_SECONDS", "2")
        .start()
        .await?;
    let gateway = stack.gateway(0).url();
    let silent = async { TcpClient::connect(gateway).await?.closed(CLOSED_WITHIN).await };
    let half = async {
        let mut client = TcpClient::connect(gateway).await?;
        client.send(b"GET /health HTTP/1.1\r\nhost: re").await?;
        client.closed(CLOSED_WITHIN).await
    };
    let dribbled = async {
        let mut client = TcpClient::connect(gateway).await?;
        client.send(b"GET /health HTTP/1.1\r\nhost: ").await?;
        client.dribble(SECOND / 5, CLOSED_WITHIN).await
    };
    let idle = async {
        let mut client = TcpClient::connect(gateway).await?;
        client.send(b"GET /health HTTP/1.1\r\nhost: relay\r\n\r\n").await?;
        ensure!(client.head().await?.status == 200, "healthy");
        client.closed(CLOSED_WITHIN).await?;
        Ok(Vec::new())
    };
    let worker = async { TcpClient::connect(stack.worker().url()).await?.closed(CLOSED_WITHIN).await };
    let (a, b, c, d, e) = tokio::try_join!(silent, half, dribbled, idle, worker)?;
    ensure!([a, b, c, d, e].iter().all(Vec::is_empty), "closed without an answer");
    ensure!(stack.gateway(0).metric("relay_connections_timed_out_total").await? >= 4.0, "counted");
    Ok(())
}

/// Declared length of a body that does not end.
const BODY_BYTES: usize = 100_000;

/// Returns the head of a post with a large body.
fn head_of_post(token: &str) -> String {
    format!(
        "POST /v1/channels/general/messages HTTP/1.1\r\nhost: relay\r\nauthorization: Bearer {token}\r\n\
         content-type: application/json\r\ncontent-length: {BODY_BYTES}\r\n\r\n",
    )
}

/// A change whose body never ends must not be answered: it might be repeated.
async fn dribble_body(key: &Api) -> Result<()> {
    let ann = key.register_agent("ann").await?;
    let mut client = TcpClient::connect(key.base()).await?;
    client.send(head_of_post(&ann.token).as_bytes()).await?;
    let answer = client.dribble(SECOND / 2, REQUEST_TIMEOUT + CLOSED_WITHIN).await?;
    ensure!(answer.is_empty(), "answered {}", String::from_utf8_lossy(&answer));
    Ok(())
}

/// Builds a text frame of a client with an empty mask, of which `sent` begins a text of `length` bytes.
fn text_frame(sent: &str, length: u16) -> Vec<u8> {
    let mut frame = vec![0x81, 0xFE];
    frame.extend(length.to_be_bytes());
    frame.extend([0; 4]);
    frame.extend(sent.as_bytes());
    frame
}

/// A frame beyond what is read without memory has the time of a request.
async fn dribble_frame(key: &Api) -> Result<()> {
    let node = node(key, "dribble").await?;
    let header = [format!("authorization: Bearer {}", node.token)];
    let (mut client, head) = TcpClient::upgrade(key.base(), "/v1/node/ws", &header).await?;
    ensure!(head.status == 101, "{head:?}");
    let register = json!({
        "v": 1, "type": "node.register", "id": "1", "node_id": node.node_id, "name": node.name, "capabilities": [],
        "max_agents": 0, "tags": [], "version": "test/1",
    })
    .to_string();
    client.send(&text_frame(&register, u16::try_from(register.len())?)).await?;
    client.send(&text_frame(&"x".repeat(20_000), 60_000)).await?;
    let answer = client.dribble(SECOND / 2, REQUEST_TIMEOUT + CLOSED_WITHIN).await?;
    let close = [&1013_u16.to_be_bytes()[..], b"frame took too long"].concat();
    ensure!(answer.ends_with(&close), "{}", String::from_utf8_lossy(&answer));
    Ok(())
}

#[tokio::test]
async fn a_body_or_a_frame_that_arrives_byte_by_byte_ends_after_the_time_of_a_request() -> Result<()> {
    let key = Api::create_workspace(&shared().await.gateways[0], "dribble").await?;
    tokio::try_join!(dribble_body(&key), dribble_frame(&key)).map(drop)
}

/// Requests in progress that a family of workspaces may have in this test.
const REQUESTS: usize = 4;

#[tokio::test]
async fn a_family_has_a_share_of_the_requests_in_progress() -> Result<()> {
    let stack = Stack::builder()
        .gateways(1)
        .worker(false)
        .env("RELAY_MAX_CONNECTIONS_PER_WORKSPACE", REQUESTS.to_string())
        .start()
        .await?;
    let gateway = stack.gateway(0).url();
    let key = Api::create_workspace(gateway, "greedy").await?.without_retries();
    let child = key.post("/v1/workspaces", json!({ "name": "child" })).await?.success()?;
    let child = key.with_token(child["api_key"].as_str().context("a key")?).without_retries();
    let other = Api::create_workspace(gateway, "other").await?.without_retries();
    // Each of a token of its own, whose body does not come.
    let mut agents = Vec::new();
    for (nth, member) in [&key, &child].into_iter().cycle().take(REQUESTS).enumerate() {
        agents.push(member.register_agent(&format!("agent-{nth}")).await?);
    }
    let mut requests = Vec::new();
    for agent in &agents {
        let mut client = TcpClient::connect(gateway).await?;
        client.send(head_of_post(&agent.token).as_bytes()).await?;
        requests.push(client);
    }
    wait::until("the requests to be in progress", CLOSED_WITHIN, || async {
        let held = stack.gateway(0).metric("relay_body_bytes").await;
        held.is_ok_and(|held| held >= (REQUESTS * BODY_BYTES) as f64)
    })
    .await;
    for member in [&key, &child, &key.as_agent(&agents[0]).without_retries()] {
        let refused = member.get("/v1/agents").await?.refused(503, "too_many_connections")?;
        ensure!(refused.headers.get("retry-after").is_some_and(|after| after == "1"), "{:?}", refused.headers);
    }
    other.get("/v1/agents").await?.success()?;
    ensure!(stack.gateway(0).metric("relay_connections_refused_total").await? >= 1.0, "counted");
    drop(requests.pop());
    wait::until("the place of an aborted request", CLOSED_WITHIN, || async {
        child.get("/v1/agents").await.is_ok_and(|reply| reply.is_success())
    })
    .await;
    Ok(())
}

#[tokio::test]
async fn a_socket_that_never_registers_is_closed() -> Result<()> {
    let stack = Stack::builder().gateways(1).env("RELAY_REGISTRATION_TIMEOUT_SECONDS", "3").start().await?;
    let key = Api::create_workspace(stack.gateway(0).url(), "unregistered").await?;
    let (quiet, broker) = (node(&key, "quiet").await?, node(&key, "broker").await?);
    let mut registered = NodeSocket::connect(&key.ws_base(), &broker.token).await?;
    registered.register_broker(&broker.node_id, "broker", "broker").await?;
    let mut unregistered = NodeSocket::connect(&key.ws_base(), &quiet.token).await?;
    // Frames that are no registration win no time.
    unregistered.send_json(&json!({ "v": 1, "type": "agent.register", "id": "early", "name": "ann" })).await?;
    assert_eq!(unregistered.closed(CLOSED_WITHIN).await?, Some(1013));
    registered.register_agent("ann").await?;
    let mut again = NodeSocket::connect(&key.ws_base(), &quiet.token).await?;
    again.register_broker(&quiet.node_id, "quiet", "quiet").await?;
    Ok(())
}

#[tokio::test]
async fn one_token_has_a_share_of_the_sockets() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let gateway = stack.gateway(0).url();
    let greedy = Api::create_workspace(gateway, "greedy").await?;
    let token = node(&greedy, "greedy").await?.token;
    let open = || async { socket(gateway, &token, None).await?.context("too many connections") };
    let mut sockets: Vec<TcpClient> =
        stream::iter(0..SOCKETS_PER_TOKEN).map(|_| open()).buffer_unordered(32).try_collect().await?;
    ensure!(socket(gateway, &token, None).await?.is_none(), "one more than the limit");

    let other = Api::create_workspace(gateway, "other").await?;
    let broker = node(&other, "broker").await?;
    let mut connected = NodeSocket::connect(&other.ws_base(), &broker.token).await?;
    connected.register_broker(&broker.node_id, "broker", "broker").await?;
    ensure!(stack.gateway(0).metric("relay_connections_refused_total").await? >= 1.0, "counted");

    drop(sockets.pop());
    wait::until_ok("the place of a closed socket", CLOSED_WITHIN, || async { open().await.map(drop) }).await
}

#[tokio::test]
async fn an_address_has_a_share_of_the_connections_behind_a_proxy() -> Result<()> {
    let stack = Stack::builder()
        .gateways(1)
        .worker(false)
        .env("RELAY_TRUSTED_PROXIES", "127.0.0.1,10.0.0.0/8")
        .env("RELAY_MAX_CONNECTIONS_PER_ADDRESS", "4")
        .start()
        .await?;
    let gateway = stack.gateway(0).url();
    let key = Api::create_workspace(gateway, "proxied").await?;
    let token = node(&key, "broker").await?.token;
    let from = |address| socket(gateway, &token, Some(address));
    let greedy: Vec<_> = try_join_all((0..4).map(|_| from("198.51.100.7"))).await?;
    ensure!(greedy.iter().all(Option::is_some), "within the limit");
    ensure!(from("198.51.100.7").await?.is_none(), "one more than the limit");
    ensure!(from("203.0.113.1, 198.51.100.7, 10.0.0.9").await?.is_none(), "what the client claims is ignored");
    let ask = |address: &'static str| async move {
        let headers = [("x-forwarded-for", address)];
        Api::anonymous(gateway).call(reqwest::Method::GET, "/health", None, &headers).await
    };
    ask("198.51.100.7").await?.refused(503, "too_many_connections")?;
    ask("198.51.100.8").await?.success()?;
    ensure!(from("198.51.100.8").await?.is_some(), "another address");
    ensure!(socket(gateway, &token, None).await?.is_some(), "this machine is not limited");
    drop(greedy);
    wait::until("the places of closed sockets", CLOSED_WITHIN, || async {
        ask("198.51.100.7").await.is_ok_and(|reply| reply.is_success())
    })
    .await;
    Ok(())
}

#[tokio::test]
async fn a_full_gateway_refuses_and_recovers() -> Result<()> {
    let stack = Stack::builder()
        .gateways(1)
        .worker(false)
        .env("RELAY_MAX_CONNECTIONS", "8")
        // Longer than it takes to ask while the silent connections are open, also on a busy machine.
        .env("RELAY_HEAD_TIMEOUT_SECONDS", "10")
        .start()
        .await?;
    let gateway = stack.gateway(0).url();
    // The connections of the readiness checks end first.
    wait::until_ok("no other connections", CLOSED_WITHIN, || async {
        let open = stack.gateway(0).metric("relay_connections").await?;
        ensure!(open == 0.0, "{open}");
        Ok(())
    })
    .await?;
    let _silent: Vec<TcpClient> = try_join_all((0..8).map(|_| TcpClient::connect(gateway))).await?;
    let ask = || async {
        let mut client = TcpClient::connect(gateway).await?;
        client.send(b"GET /health HTTP/1.1\r\nhost: relay\r\n\r\n").await?;
        client.head().await
    };
    let refused = ask().await?;
    ensure!(refused.status == 503 && refused.has("retry-after: 1") && refused.has("connection: close"), "{refused:?}");
    wait::until("the silent connections to end", CLOSED_WITHIN, || async {
        ask().await.is_ok_and(|head| head.status == 200)
    })
    .await;
    Ok(())
}
