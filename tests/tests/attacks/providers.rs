//! Providers that a node token registers one after the other: a node has a bounded number of them, and what they
//! advertise is read within the share of their tenant.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::{
    future::{join_all, try_join_all},
    stream::{self, StreamExt as _, TryStreamExt as _},
};
use relay_acceptance::memory::{peak, reset_peak};
use relay_testkit::{
    client::{Api, NodeSocket, NodeToken},
    shared,
    stack::Stack,
    wait,
};
use reqwest::StatusCode;
use serde_json::{Value, json};
use sqlx::PgPool;

const MIB: u64 = 1024 * 1024;
const GROWTH: u64 = 64 * MIB;
/// Providers of a node, those without a connection included.
const PROVIDERS: usize = 64;
const REGISTERED_AT_A_TIME: usize = 8;
/// Requests for all that the providers advertise: 4 MiB as text, 300 MiB as values.
const READS: usize = 8;
const SOON: Duration = Duration::from_secs(30);
/// Time within which all reads that share the memory of their tenant have been served, on a loaded machine.
const READ_WITHIN: Duration = Duration::from_secs(90);

/// Opens a socket that registers as this provider of a node.
async fn register(key: &Api, node: &NodeToken, provider: &str, capabilities: &Value) -> Result<NodeSocket> {
    let mut socket = NodeSocket::connect(&key.ws_base(), &node.token).await?;
    socket.request(registration(node, provider, capabilities)).await?;
    Ok(socket)
}

fn registration(node: &NodeToken, provider: &str, capabilities: &Value) -> Value {
    json!({
        "v": 1, "type": "node.register", "node_id": node.node_id, "name": node.name, "max_agents": 1, "tags": [provider],
        "version": "test", "provider": { "name": provider, "instance_id": provider }, "capabilities": capabilities,
    })
}

async fn register_all(key: &Api, node: &NodeToken, providers: usize) -> Result<Vec<NodeSocket>> {
    let none = json!([]);
    let names: Vec<String> = (0..providers).map(|nth| format!("provider-{nth}")).collect();
    let register = names.iter().map(|name| register(key, node, name, &none));
    stream::iter(register).buffered(REGISTERED_AT_A_TIME).try_collect().await
}

async fn ensure_full(key: &Api, node: &NodeToken) -> Result<()> {
    match register(key, node, "another", &json!([])).await {
        Ok(_) => anyhow::bail!("one provider more than a node may have"),
        Err(error) => ensure!(error.to_string().contains("invalid_request"), "{error:#}"),
    }
    Ok(())
}

async fn names_of_providers(key: &Api, node: &NodeToken) -> Result<Vec<String>> {
    let shown = key.get(&format!("/v1/nodes/{}", node.name)).await?.success()?;
    let providers = shown["providers"].as_array().context("providers")?;
    Ok(providers.iter().filter_map(|provider| provider["name"].as_str()).map(str::to_owned).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_has_a_bounded_number_of_providers() -> Result<()> {
    let shared = shared().await;
    let key = Api::create_workspace(shared.any_gateway(), "providers").await?;
    let node = key.create_broker_node("node_attacker", "attacker").await?;
    let mut sockets = register_all(&key, &node, PROVIDERS).await?;
    ensure_full(&key, &node).await?;
    let other = key.create_broker_node("node_other", "other").await?;
    let _other = register(&key, &other, "another", &json!([])).await?;

    // Its place stays taken without a connection, and it may return.
    sockets.pop().context("a socket")?.close().await?;
    ensure_full(&key, &node).await?;
    let last = format!("provider-{}", PROVIDERS - 1);
    register(&key, &node, &last, &json!([])).await?.close().await?;
    ensure!(names_of_providers(&key, &node).await?.len() == PROVIDERS, "all providers are shown");

    key.delete(&format!("/v1/nodes/attacker/providers/{last}")).await?.success()?;
    let another = register(&key, &node, "another", &json!([])).await?;
    another.close().await?;

    // One that has been away for a day makes room.
    let database = PgPool::connect(&shared.database_url).await?;
    wait::until_ok("the end of the connection", SOON, || async {
        let aged = sqlx::query(
            "UPDATE providers p SET disconnected_at = now() - interval '25 hours' FROM workspaces w
              WHERE p.workspace_id = w.workspace_id AND w.name LIKE 'providers-%' AND p.node_id = 'node_attacker'
                AND p.provider = 'another' AND p.gateway_id IS NULL",
        )
        .execute(&database)
        .await?;
        ensure!(aged.rows_affected() > 0);
        Ok(())
    })
    .await?;
    let _newest = register(&key, &node, "newest", &json!([])).await?;
    let names = names_of_providers(&key, &node).await?;
    ensure!(names.len() == PROVIDERS && !names.iter().any(|name| name == "another"), "{names:?}");
    ensure_full(&key, &node).await
}

/// Published clients name no provider on the node of an agent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_own_node_of_an_agent_has_a_bounded_number_of_providers() -> Result<()> {
    let key = Api::create_workspace(shared().await.any_gateway(), "own-node").await?;
    let ann = key.as_agent(&key.register_agent("ann").await?);
    let node = ann.direct_node_token().await?;
    let _sockets = register_all(&key, &node, PROVIDERS).await?;
    ensure_full(&key, &node).await
}

/// Each advertises almost 64 KiB, which takes 80 times as much once it is parsed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_with_many_capabilities_take_a_bounded_part_of_a_gateway() -> Result<()> {
    let stack = Stack::builder().gateways(1).worker(false).start().await?;
    let gateway = stack.gateway(0);
    let key = Api::create_workspace(gateway.url(), "attacker").await?;
    let node = key.create_broker_node("node_attacker", "attacker").await?;
    register_all(&key, &node, PROVIDERS).await?;
    let own = json!([{ "name": "relay:provider-0" }]);
    register(&key, &node, "provider-0", &own).await?;
    let database = PgPool::connect(stack.database_url()).await?;
    // What as many heartbeats would leave, with names of their own, so that the node shows all of them.
    let metadata = json!({ "a": vec![json!({ "": 0 }); 8_000] });
    sqlx::query(
        "UPDATE providers
            SET capabilities = jsonb_build_array(jsonb_build_object('name', 'relay:' || provider, 'metadata', $1))
          WHERE provider <> 'provider-0'",
    )
    .bind(&metadata)
    .execute(&database)
    .await?;

    let before = reset_peak(gateway.pid())?;
    let client = reqwest::Client::new();
    let all = (PROVIDERS - 1) * metadata.to_string().len();
    let read = |path: &'static str| {
        let request = client.get(format!("{}{path}", key.base())).bearer_auth(key.token());
        async move {
            // A read that waits too long for memory is refused, and tried again.
            let reply = wait::until_ok("memory for the reply", READ_WITHIN, || async {
                let again = request.try_clone().context("a request without a body")?;
                let reply = again.send().await?;
                ensure!(reply.status() != StatusCode::SERVICE_UNAVAILABLE, "refused");
                Ok(reply)
            })
            .await?;
            let shown = reply.error_for_status()?.text().await?;
            let capabilities = shown.matches(r#""relay:provider-"#).count();
            ensure!(capabilities == PROVIDERS && shown.len() > all, "{path} shows {capabilities} capabilities");
            anyhow::Ok(())
        }
    };
    let paths = ["/v1/nodes", "/v1/nodes/attacker"].into_iter().cycle().take(READS);
    let reads = join_all(paths.map(read));
    // The reply is made from all that the node shows. Each takes the provider of the one before, which may lose its
    // connection before the reply.
    let registrations = join_all((0..READS).map(|_| register(&key, &node, "provider-0", &own)));
    let (read, _) = tokio::join!(reads, registrations);
    let grown = peak(gateway.pid())?.saturating_sub(before);
    read.into_iter().collect::<Result<Vec<_>>>()?;
    println!("grown by {} MiB", grown / MIB);
    ensure!(grown < GROWTH, "the gateway grew by {} MiB", grown / MIB);
    let other = Api::create_workspace(gateway.url(), "other").await?;
    try_join_all(["ann", "bob"].map(|name| other.register_agent(name))).await?;
    Ok(())
}

/// Clients accept frames of 1 MiB. All providers together advertise more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_of_a_large_node_is_answered_within_the_limit_of_clients() -> Result<()> {
    const LARGE_PROVIDERS: usize = 18;
    /// Number of providers whose capabilities are shown together in 900 KiB.
    const SHOWN_TOGETHER: usize = 14;
    let key = Api::create_workspace(shared().await.any_gateway(), "large-node").await?;
    let node = key.create_broker_node("node_large", "large").await?;
    let metadata = json!({ "text": "x".repeat(60 * 1024) });
    let names: Vec<String> = (0..LARGE_PROVIDERS).map(|nth| format!("relay:{nth:02}")).collect();
    let shown_in = |reply: &Value| -> Result<Vec<String>> {
        let shown = reply["capabilities"].as_array().context("capabilities")?;
        Ok(shown.iter().filter_map(|capability| capability["name"].as_str()).map(str::to_owned).collect())
    };
    let mut sockets = Vec::new();
    for (nth, name) in names.iter().enumerate() {
        let mut socket = NodeSocket::connect(&key.ws_base(), &node.token).await?;
        let capabilities = json!([{ "name": name, "kind": "capacity", "metadata": metadata }]);
        let reply = socket.request(registration(&node, name, &capabilities)).await?;
        let shown = if nth < SHOWN_TOGETHER { &names[..=nth] } else { &names[nth..=nth] };
        ensure!(shown_in(&reply)? == shown, "the reply to {name} shows {:?}", shown_in(&reply)?);
        ensure!(reply["tags"] == json!(shown), "the reply to {name} has the tags {}", reply["tags"]);
        ensure!(reply["accepted_capabilities"] == json!([{ "name": name, "kind": "capacity", "accepted": true }]));
        sockets.push(socket);
    }
    let shown = key.get("/v1/nodes/large").await?.success()?;
    ensure!(shown_in(&shown)? == names && shown["tags"] == json!(names), "the node shows {:?}", shown_in(&shown)?);
    Ok(())
}
