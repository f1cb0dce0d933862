//! The roster of nodes and providers, its filters, and its events for observers.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use relay_testkit::{
    client::{Api, NodeSocket, NodeToken, ObserverSocket},
    shared, wait,
};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Connects and registers a provider of a node.
async fn provider(
    node: &NodeToken,
    name: &str,
    gateway: usize,
    capabilities: Value,
    max_agents: u32,
) -> Result<NodeSocket> {
    let base = shared().await.gateways[gateway].replacen("http", "ws", 1);
    let mut socket = NodeSocket::connect(&base, &node.token).await?;
    let register = json!({
        "v": 1, "type": "node.register", "name": node.name, "node_id": node.node_id, "capabilities": capabilities,
        "provider": { "name": name, "instance_id": format!("{name}-1") }, "max_agents": max_agents, "tags": [],
        "version": "test/1",
    });
    socket.request(register).await?;
    Ok(socket)
}

fn beat(load: f64, active: u32, handlers_live: bool) -> Value {
    json!({
        "v": 1, "type": "node.heartbeat", "load": load, "load_reported": true, "active_agents": active,
        "handlers_live": handlers_live,
    })
}

/// Returns the names of the nodes that match a query.
async fn find_nodes(key: &Api, query: &str) -> Result<Vec<String>> {
    let nodes = key.get(&format!("/v1/nodes?{query}")).await?.success()?;
    let nodes = nodes.as_array().context("a list")?;
    Ok(nodes.iter().map(|node| text(&node["name"]).to_owned()).filter(|name| !name.starts_with("direct-")).collect())
}

/// Waits until the node fulfils a condition.
async fn wait_for_node(key: &Api, name: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
    wait::until_ok("the roster to show it", SOON, || async {
        let node = key.get(&format!("/v1/nodes/{name}")).await?.success()?;
        ensure!(wanted(&node), "{node}");
        anyhow::Ok(node)
    })
    .await
}

#[tokio::test]
async fn each_provider_of_a_node_is_listed() -> Result<()> {
    let key = Api::create_workspace(&shared().await.gateways[0], "roster").await?;
    let lead = key.as_agent(&key.register_agent("lead").await?);
    let farm = key.create_broker_node("node_farm", "farm").await?;
    let mut one = provider(&farm, "one", 0, json!([{ "name": "spawn:sh" }]), 4).await?;
    let two = provider(&farm, "two", 1, json!([{ "name": "build" }]), 0).await?;
    let other = json!({ "node_id": "node_idle", "name": "idle", "capabilities": ["build"] });
    key.post("/v1/nodes", other).await?.success()?;
    one.send_json(&beat(0.5, 2, true)).await?;
    two.send_json(&beat(0.25, 1, false)).await?;

    let reported = |node: &Value| {
        let providers = node["providers"].as_array().map(Vec::as_slice).unwrap_or_default();
        providers.iter().filter_map(|provider| provider["active_agents"].as_i64()).sum::<i64>()
    };
    let shown = wait_for_node(&key, "farm", |node| reported(node) == 3).await?;
    assert_eq!(shown["active_agents"], 0, "no agent is bound: {shown}");
    let of = |node: &Value, name: &str| {
        let all = node["providers"].as_array().cloned().unwrap_or_default();
        all.into_iter().find(|provider| provider["name"] == name).unwrap_or_default()
    };
    for (name, active, handlers, load, max) in [("one", 2, true, 0.5, 4), ("two", 1, false, 0.25, 0)] {
        let shown = of(&shown, name);
        assert_eq!(
            (&shown["live"], &shown["handlers_live"], &shown["active_agents"]),
            (&json!(true), &json!(handlers), &json!(active)),
            "{shown}"
        );
        assert_eq!(
            (&shown["load"], &shown["max_agents"], &shown["reserved_agents"]),
            (&json!(load), &json!(max), &json!(0))
        );
        ensure!(shown["last_heartbeat_at"].is_string(), "{shown}");
    }
    assert_eq!(
        (text(&shown["status"]), &shown["live"], &shown["handlers_live"]),
        ("online", &json!(true), &json!(true))
    );

    for (query, names) in [
        ("capability=spawn:sh", vec!["farm"]),
        ("capability=build", vec!["farm", "idle"]),
        ("capability=build&status=online", vec!["farm"]),
        ("capability=build&status=offline", vec!["idle"]),
        ("capability=spawn:sh&status=offline", vec![]),
        ("status=online", vec!["farm"]),
        ("name=idle", vec!["idle"]),
        ("name=idle&status=online", vec![]),
    ] {
        assert_eq!(find_nodes(&key, query).await?, names, "{query}");
    }
    for query in ["status=asleep", "cursor=farm", "cursor=king/farm"] {
        key.get(&format!("/v1/nodes?{query}")).await?.refused(400, "invalid_request")?;
    }
    // The pages add up to the same list.
    let listed = key.get("/v1/nodes").await?.success()?;
    let (mut paged, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = key.get(&format!("/v1/nodes?history=true&limit=1&cursor={cursor}")).await?.success()?;
        paged.extend(page["nodes"].as_array().context("nodes")?.iter().map(|node| node["id"].clone()));
        let Some(next) = page["next_cursor"].as_str() else { break };
        cursor = next.to_owned();
    }
    let ids: Vec<Value> = listed.as_array().context("a list")?.iter().map(|node| node["id"].clone()).collect();
    assert_eq!(paged, ids);

    // A reservation lasts until the agent runs, and belongs to its provider.
    let ack = lead.post("/v1/agents/spawn", json!({ "name": "writer", "cli": "sh", "task": "" })).await?.success()?;
    assert_eq!(ack["status"], "dispatched");
    let shown = wait_for_node(&key, "farm", |node| node["reserved_agents"] == 1).await?;
    assert_eq!((&of(&shown, "one")["reserved_agents"], &of(&shown, "two")["reserved_agents"]), (&json!(1), &json!(0)));
    let told = one.expect("action.invoke").await?;
    let born = json!({ "v": 1, "type": "agent.register", "name": "writer", "invocation_id": told["invocation_id"] });
    one.request(born).await?;
    wait_for_node(&key, "farm", |node| node["reserved_agents"] == 0).await?;

    // One provider disconnects; the node stays with the other.
    one.abort();
    let shown = wait_for_node(&key, "farm", |node| of(node, "one")["live"] == false).await?;
    assert_eq!(
        (&of(&shown, "two")["live"], &shown["live"], &shown["handlers_live"]),
        (&json!(true), &json!(true), &json!(false))
    );
    assert_eq!(of(&shown, "one")["handlers_live"], false);
    two.abort();
    wait_for_node(&key, "farm", |node| node["status"] == "offline").await?;
    assert_eq!(find_nodes(&key, "capability=build&status=offline").await?, ["farm", "idle"]);
    Ok(())
}

#[tokio::test]
async fn a_heartbeat_replaces_capabilities() -> Result<()> {
    let key = Api::create_workspace(&shared().await.gateways[0], "roster-refresh").await?;
    let lead = key.as_agent(&key.register_agent("lead").await?);
    let farm = key.create_broker_node("node_farm", "farm").await?;
    let mut socket = provider(&farm, "one", 1, json!([{ "name": "spawn:sh" }, { "name": "build" }]), 0).await?;
    let spawn = |name: &str, cli: &str| {
        let body = json!({ "name": name, "cli": cli, "task": "" });
        let lead = lead.clone();
        async move { lead.post("/v1/agents/spawn", body).await }
    };
    spawn("a", "zsh").await?.refused(503, "handler_unavailable")?;
    let mut changed = beat(0.0, 0, true);
    changed["capabilities"] = json!([{ "name": "spawn:zsh" }, { "name": "test" }]);
    changed["max_agents"] = json!(7);
    changed["version"] = json!("test/2");
    socket.send_json(&changed).await?;
    wait::until("the roster to find it", SOON, || async {
        find_nodes(&key, "capability=spawn:zsh").await.is_ok_and(|names| names == ["farm"])
    })
    .await;
    assert_eq!(find_nodes(&key, "capability=spawn:sh").await?, [""; 0]);
    let shown = wait_for_node(&key, "farm", |node| node["max_agents"] == 7).await?;
    assert_eq!(text(&shown["version"]), "test/2");
    // Placement and actions follow the roster.
    let ack = wait::until_ok("the spawn to be placed", SOON, || async { spawn("a", "zsh").await?.success() }).await?;
    assert_eq!(socket.expect("action.invoke").await?["invocation_id"], ack["invocation_id"]);
    spawn("b", "sh").await?.refused(503, "handler_unavailable")?;
    let invoked = lead.post("/v1/actions/test/invoke", json!({})).await?;
    ensure!([201, 404].contains(&invoked.status), "{}", invoked.body);
    lead.post("/v1/nodes/farm/actions/test/invoke", json!({})).await?.success()?;
    lead.post("/v1/nodes/farm/actions/build/invoke", json!({})).await?.refused(404, "action_not_found")?;
    Ok(())
}

#[tokio::test]
async fn observers_of_nodes_receive_node_events_only() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "roster-events").await?;
    let observer = async |name: &str, scopes: Value| {
        let made = key.post("/v1/observer-tokens", json!({ "name": name, "scopes": scopes })).await?.success()?;
        ObserverSocket::open(&gateways[1], text(&made["token"])).await
    };
    let mut of_nodes = observer("nodes", json!(["stream:read", "nodes:read"])).await?;
    let mut of_agents = observer("agents", json!(["stream:read", "agents:read", "channels:read"])).await?;
    let farm = key.create_broker_node("node_farm", "farm").await?;
    let mut socket = provider(&farm, "one", 0, json!([{ "name": "spawn:sh" }]), 0).await?;
    let mut kinds = Vec::new();
    loop {
        let frame = of_nodes.next(SOON).await?;
        assert_eq!(text(&frame["node_id"]), "node_farm", "{frame}");
        kinds.push(text(&frame["type"]).to_owned());
        if frame["type"] == "node.status.online" {
            break;
        }
    }
    assert_eq!(kinds, ["node.registered", "node.status.online"]);
    let worker = socket.register_agent("worker").await?;
    socket.inventory(&[(text(&worker["agent_id"]), "worker")]).await?;
    let joined = of_agents.next(SOON).await?;
    assert_eq!(joined["type"], "member.joined", "nothing of the node before it");
    socket.abort();
    let gone = of_nodes.next(SOON).await?;
    assert_eq!((text(&gone["type"]), text(&gone["node_id"])), ("node.status.offline", "node_farm"));
    Ok(())
}
