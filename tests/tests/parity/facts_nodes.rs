//! Facts about nodes and their agents: names, tags, counts, registration, and the end of agents.

use std::time::Duration;

use anyhow::{Result, ensure};
use relay_acceptance::room::{rows, text};
use relay_acceptance::spawning::{self, inventory, register_spawned, send_result, wait_for_outcome};
use relay_testkit::{
    client::{Api, NodeSocket},
    shared, wait,
};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

/// Workspace with a broker node at the first gateway, seen through the second.
struct Scene {
    key: Api,
    node_id: String,
    token: String,
    socket: NodeSocket,
}

impl Scene {
    async fn new(node: &str) -> Result<Self> {
        let gateways = &shared().await.gateways;
        let at_first = Api::create_workspace(&gateways[0], "facts").await?;
        let node_id = format!("node_{node}");
        let token = at_first.create_broker_node(&node_id, node).await?.token;
        let mut socket = NodeSocket::connect(&at_first.ws_base(), &token).await?;
        socket.register_broker(&node_id, node, "run-1").await?;
        Ok(Self { key: at_first.at(&gateways[1]), node_id, token, socket })
    }

    fn register(&self, name: &str, tags: &[&str]) -> Value {
        json!({
            "v": 1, "type": "node.register", "name": name, "node_id": self.node_id, "capabilities": [], "max_agents": 0,
            "provider": { "name": "broker", "instance_id": "run-1" }, "tags": tags, "version": "testkit",
        })
    }

    fn beat(&self, name: &str, active: u32) -> Value {
        json!({
            "v": 1, "type": "node.heartbeat", "node_id": self.node_id, "name": name, "active_agents": active,
            "handlers_live": true,
        })
    }

    async fn node(&self, name: &str) -> Result<Value> {
        self.key.get(&format!("/v1/nodes/{name}")).await?.success()
    }
}

/// Waits until `count` agents have ended, and returns the events of their ends.
async fn wait_for_exits(key: &Api, count: usize) -> Result<Vec<Value>> {
    wait::until_ok("the ends of agents", SOON, || async {
        let log = key.get("/v1/workspace/events?since=0&limit=500").await?.success()?;
        let exits: Vec<Value> =
            rows(&log["events"]).iter().filter(|event| event["type"] == "agent.exited").cloned().collect();
        ensure!(exits.len() >= count, "{exits:?}");
        anyhow::Ok(exits)
    })
    .await
}

/// Returns name and reason of an event of an agent's end.
fn exit(event: &Value) -> (&str, &str) {
    (text(&event["payload"]["agent_name"]), text(&event["payload"]["reason"]))
}

#[tokio::test]
async fn a_node_name_loses_one_hash_and_may_have_no_other() -> Result<()> {
    let mut scene = Scene::new("box").await?;
    let made = scene.key.post("/v1/nodes", json!({ "name": "#mill" })).await?.success()?;
    assert_eq!(made["name"], "mill");
    for name in ["", "#", "##mill", "a#b"] {
        scene.key.post("/v1/nodes", json!({ "name": name })).await?.refused(400, "invalid_node_name")?;
        scene.key.patch("/v1/nodes/mill", json!({ "name": name })).await?.refused(400, "invalid_node_name")?;
        let refused = scene.socket.request(scene.register(name, &[])).await.expect_err("a bad name");
        assert!(refused.to_string().contains("invalid_node_name"), "{name:?}: {refused:#}");
    }
    let renamed = scene.socket.request(scene.register("#barn", &[])).await?;
    assert_eq!(renamed["name"], "barn");
    assert_eq!(scene.node("barn").await?["id"], scene.node_id.as_str());
    Ok(())
}

#[tokio::test]
async fn a_heartbeat_renames_its_node_unless_the_name_is_taken() -> Result<()> {
    let mut scene = Scene::new("old-name").await?;
    scene.key.post("/v1/nodes", json!({ "name": "taken" })).await?.success()?;
    // The node keeps its name, and gets no error frame.
    for (active, name) in [(1, "taken"), (2, "##"), (3, "direct-1"), (4, "old-name")] {
        scene.socket.send_json(&scene.beat(name, active)).await?;
        wait_for_beat(&scene, "old-name", active).await?;
    }
    assert_ne!(scene.node("taken").await?["id"], scene.node_id.as_str());
    scene.socket.send_json(&scene.beat("#new-name", 5)).await?;
    wait_for_beat(&scene, "new-name", 5).await?;
    // A name that an operator gives stays although heartbeats repeat the old one.
    scene.key.patch("/v1/nodes/new-name", json!({ "name": "operators-name" })).await?.success()?;
    scene.socket.send_json(&scene.beat("#new-name", 6)).await?;
    wait_for_beat(&scene, "operators-name", 6).await?;
    scene.socket.send_json(&scene.beat("newest-name", 7)).await?;
    wait_for_beat(&scene, "newest-name", 7).await?;
    scene.socket.send_json(&json!({ "v": 1, "type": "delivery.position" })).await?;
    let first = scene.socket.expect("error").await?;
    assert_eq!(first["code"], "invalid_message", "the first error is that of the unknown frame: {first}");
    Ok(())
}

/// Waits until a node of this name shows the heartbeat with this number of agents.
async fn wait_for_beat(scene: &Scene, name: &str, active: u32) -> Result<()> {
    wait::until_ok("the heartbeat", SOON, || async {
        let node = scene.node(name).await?;
        ensure!(node["providers"][0]["active_agents"] == active, "{node}");
        anyhow::Ok(())
    })
    .await
}

#[tokio::test]
async fn active_agents_are_the_bound_ones_and_stale_without_a_connection() -> Result<()> {
    let mut scene = Scene::new("box").await?;
    scene.key.register_agent("bound").await?;
    scene.key.bind("box", "bound").await?;
    scene.socket.register_agent("hosted").await?;
    let shown = scene.node("box").await?;
    let bindings = scene.key.get("/v1/nodes/box/agents").await?.success()?;
    assert_eq!(shown["active_agents"], rows(&bindings).len(), "{shown}");
    assert_eq!((&shown["active_agents"], &shown["active_agents_stale"]), (&json!(2), &json!(false)), "{shown}");
    scene.socket.close().await?;
    let key = scene.key;
    let stale = wait::until_ok("the end of the connection", SOON, || async {
        let node = key.get("/v1/nodes/box").await?.success()?;
        ensure!(node["active_agents_stale"] == true, "{node}");
        anyhow::Ok(node)
    })
    .await?;
    assert_eq!((&stale["active_agents"], &stale["live"]), (&json!(2), &json!(false)), "{stale}");
    Ok(())
}

#[tokio::test]
async fn settings_of_a_poll_node_are_kept_and_shown_without_secrets() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "facts").await?;
    let delivery = json!({ "url": "https://93.184.215.14/pull", "auth": { "type": "bearer", "token": "s3cret" } });
    let made = key.post("/v1/nodes", json!({ "name": "queue", "kind": "poll", "delivery": delivery })).await?;
    let made = made.success()?;
    let shown = key.at(&gateways[1]).get("/v1/nodes/queue").await?.success()?;
    for node in [&made, &shown] {
        assert_eq!(node["delivery_adapter"], "poll.v1", "{node}");
        assert_eq!(node["delivery"]["auth"], json!({ "type": "bearer", "token": "[redacted]" }), "{node}");
        assert!(!node.to_string().contains("s3cret"), "{node}");
    }
    // What was shown may be sent back.
    let again = json!({ "name": "queue", "kind": "poll", "delivery": shown["delivery"] });
    assert_eq!(key.post("/v1/nodes", again).await?.success()?["delivery"], shown["delivery"]);
    let changed = json!({ "delivery": { "ack_mode": "on_2xx" } });
    let changed = key.patch("/v1/nodes/queue", changed).await?.success()?;
    assert_eq!(
        (&changed["delivery"]["ack_mode"], &changed["delivery"]["auth"]["type"]),
        (&json!("on_2xx"), &json!("bearer"))
    );
    Ok(())
}

#[tokio::test]
async fn declared_tags_are_replaced_and_those_of_the_enrolment_stay() -> Result<()> {
    let mut scene = Scene::new("box").await?;
    scene.key.patch("/v1/nodes/box", json!({ "tags": ["cloud:eu", "rack-7"] })).await?.success()?;
    scene.socket.request(scene.register("box", &["gpu", "repo:acme/site", "cloud:forged"])).await?;
    assert_eq!(scene.node("box").await?["tags"], json!(["cloud:eu", "rack-7", "gpu", "repo:acme/site"]));
    scene.socket.request(scene.register("box", &["arm"])).await?;
    assert_eq!(scene.node("box").await?["tags"], json!(["cloud:eu", "rack-7", "arm"]));

    for tag in ["repo:/srv/site", r"repo:C:\site"] {
        let refused = scene.socket.request(scene.register("box", &[tag])).await.expect_err("an absolute path");
        assert!(refused.to_string().contains("invalid_message"), "{tag}: {refused:#}");
        for body in [json!({ "name": "other", "tags": [tag] }), json!({ "name": "box", "tags": ["ok", tag] })] {
            scene.key.post("/v1/nodes", body).await?.refused(400, "invalid_request")?;
        }
        scene.key.patch("/v1/nodes/box", json!({ "tags": [tag] })).await?.refused(400, "invalid_request")?;
    }
    let mut with_keys = scene.register("box", &["repo:acme/site"]);
    with_keys["repo_keys"] = json!(["/srv/site"]);
    let refused = scene.socket.request(with_keys).await.expect_err("an absolute path");
    assert!(refused.to_string().contains("invalid_message"), "{refused:#}");
    assert_eq!(scene.node("box").await?["tags"], json!(["cloud:eu", "rack-7", "arm"]), "nothing was stored");
    Ok(())
}

#[tokio::test]
async fn a_registration_names_its_contract_and_its_node_may_repeat_it() -> Result<()> {
    let mut scene = Scene::new("box").await?;
    let reply = scene.socket.request(scene.register("box", &[])).await?;
    assert_eq!(reply["registration_contract"], "relay:node-registration-v1", "{reply}");
    // The same node rebinds its agent, on another connection and gateway too; another node does not get it.
    let first = scene.socket.register_agent("worker").await?;
    let mut elsewhere = NodeSocket::connect(&scene.key.ws_base(), &scene.token).await?;
    scene.socket.abort();
    let register = json!({
        "v": 1, "type": "node.register", "name": "box", "node_id": scene.node_id, "capabilities": [], "max_agents": 0,
        "provider": { "name": "broker", "instance_id": "run-1" }, "tags": [], "version": "testkit",
    });
    elsewhere.request(register).await?;
    let again = elsewhere.register_agent("worker").await?;
    assert_eq!(again["agent_id"], first["agent_id"]);
    assert_ne!(again["token"], first["token"]);
    let stranger = scene.key.create_broker_node("node_barn", "barn").await?.token;
    let mut stranger = NodeSocket::connect(&scene.key.ws_base(), &stranger).await?;
    stranger.register_broker("node_barn", "barn", "run-1").await?;
    let refused = stranger.register_agent("worker").await.expect_err("an agent of another node");
    assert!(refused.to_string().contains("agent_already_exists"), "{refused:#}");

    let recover = |id: &str| json!({ "v": 1, "type": "agent.recover", "name": "worker", "expected_agent_id": id });
    for id in ["1", "not-an-id"] {
        let refused = elsewhere.request(recover(id)).await.expect_err("another id");
        assert!(refused.to_string().contains("agent_recovery_not_authorized"), "{id}: {refused:#}");
    }
    assert_eq!(elsewhere.request(recover(text(&first["agent_id"]))).await?["agent_id"], first["agent_id"]);
    Ok(())
}

#[tokio::test]
async fn names_of_released_agents_are_reserved() -> Result<()> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "facts").await?;
    let agent = key.register_agent("writer").await?;
    let release = json!({ "name": "writer", "delete_agent": true });
    key.post("/v1/agents/release", release).await?.success()?;
    let pose = json!({ "name": format!("writer__released_{}", agent.id) });
    key.at(&gateways[1]).post("/v1/agents", pose).await?.refused(400, "invalid_request")?;
    key.at(&gateways[1]).post("/v1/agents", json!({ "name": "writer" })).await?.success()?;
    Ok(())
}

#[tokio::test]
async fn the_end_of_every_agent_of_a_node_is_logged_once() -> Result<()> {
    let mut scene = Scene::new("box").await?;
    let mut ids = Vec::new();
    for name in ["left-out", "left", "deleted", "lost"] {
        ids.push((scene.socket.register_agent(name).await?["agent_id"].clone(), json!(name)));
    }
    let list = |indices: &[usize]| indices.iter().map(|at| (&ids[*at].0, &ids[*at].1)).collect::<Vec<_>>();
    // An agent that was only bound over REST has never run there.
    scene.key.register_agent("bound").await?;
    scene.key.bind("box", "bound").await?;
    inventory(&mut scene.socket, &list(&[1, 2, 3])).await?;
    inventory(&mut scene.socket, &list(&[1, 2, 3])).await?;
    let left = json!({ "v": 1, "type": "agent.deregister", "agent_id": ids[1].0 });
    scene.socket.request(left).await?;
    scene.key.delete("/v1/agents/deleted").await?.success().ok();
    // The connection ends, and the node returns without its last agent.
    let mut again = NodeSocket::connect(&scene.key.ws_base(), &scene.token).await?;
    scene.socket.close().await?;
    wait::until("the end of the connection", SOON, || async {
        scene.key.get("/v1/agents/lost").await.is_ok_and(|agent| agent.data()["status"] == "offline")
    })
    .await;
    again.register_broker(&scene.node_id, "box", "run-2").await?;
    inventory(&mut again, &[]).await?;
    inventory(&mut again, &[]).await?;

    let exits = wait_for_exits(&scene.key, 4).await?;
    let mut seen: Vec<_> = exits.iter().map(exit).collect();
    seen.sort_unstable();
    let missing = "missing_from_inventory";
    assert_eq!(seen, [("deleted", "deleted"), ("left", "deregistered"), ("left-out", missing), ("lost", missing)]);
    for event in &exits {
        let payload = &event["payload"];
        assert_eq!((text(&payload["node_id"]), &payload["invocation_id"]), (scene.node_id.as_str(), &json!(null)));
    }
    Ok(())
}

#[tokio::test]
async fn a_released_agent_has_ended_once() -> Result<()> {
    let mut scene = spawning::scene("facts").await?;
    let spawn = json!({ "name": "worker", "cli": "sh", "task": "work" });
    let spawned = scene.lead.post("/v1/agents/spawn", spawn).await?.success()?;
    assert_eq!(spawned["handler_node_id"], scene.node.as_str(), "{spawned}");
    assert_eq!(spawned["dispatched_node_id"], spawned["handler_node_id"], "{spawned}");
    let (frame, born) = register_spawned(&mut scene.socket).await?;
    send_result(&scene.socket, &frame, json!({ "spawned": true })).await?;
    wait_for_outcome(&scene.lead, "spawn", &spawned["invocation_id"]).await?;

    let release = json!({ "name": "worker", "delete_agent": true });
    let released = scene.lead.post("/v1/agents/release", release).await?.success()?;
    let frame = scene.socket.expect("action.invoke").await?;
    let left = json!({ "v": 1, "type": "agent.deregister", "agent_id": born["agent_id"] });
    scene.socket.request(left).await?;
    send_result(&scene.socket, &frame, json!({ "released": true, "name": "worker" })).await?;
    wait_for_outcome(&scene.lead, "release", &released["invocation_id"]).await?;
    wait::until("the agent to be deleted", SOON, || async {
        scene.workspace.get("/v1/agents/worker").await.is_ok_and(|reply| reply.status == 404)
    })
    .await;
    let exits = wait_for_exits(&scene.workspace, 1).await?;
    assert_eq!(exits.iter().map(exit).collect::<Vec<_>>(), [("worker", "released")]);
    assert_eq!(exits[0]["payload"]["invocation_id"], spawned["invocation_id"], "{exits:?}");
    Ok(())
}

/// The node reports the result and nothing else, or the agent is taken from it over REST.
#[tokio::test]
async fn an_agent_ends_when_it_leaves_its_node_in_another_way() -> Result<()> {
    let mut scene = spawning::scene("facts").await?;
    let there = scene.workspace.at(&shared().await.gateways[1]);
    let mut tokens = Vec::new();
    let mut listed = Vec::new();
    for name in ["released", "left", "unbound", "stays"] {
        let born = scene.socket.register_agent(name).await?;
        tokens.push(there.with_token(text(&born["token"])));
        listed.push((born["agent_id"].clone(), json!(name)));
    }
    let list: Vec<_> = listed.iter().map(|(id, name)| (id, name)).collect();
    inventory(&mut scene.socket, &list).await?;
    let released = scene.workspace.post("/v1/agents/release", json!({ "name": "released" })).await?.success()?;
    let frame = scene.socket.expect("action.invoke").await?;
    send_result(&scene.socket, &frame, json!({ "released": true })).await?;
    wait_for_outcome(&scene.workspace, "release", &released["invocation_id"]).await?;
    assert_eq!(there.get("/v1/agents/released").await?.success()?["status"], "offline");
    tokens[1].post("/v1/agents/disconnect", json!({ "deregister": true })).await?.success()?;
    assert_eq!(there.delete("/v1/nodes/box/agents/unbound").await?.status, 204);
    // Later reports of the same ends.
    let gone = json!({ "v": 1, "type": "agent.deregister", "agent_id": listed[0].0 });
    scene.socket.request(gone).await?;
    inventory(&mut scene.socket, &list[3..]).await?;
    assert_eq!(there.delete("/v1/nodes/box").await?.status, 204);
    // It never runs there again, so it does not end again.
    let exits = wait_for_exits(&there, 4).await?;
    let mut seen: Vec<_> = exits.iter().map(exit).collect();
    seen.sort_unstable();
    assert_eq!(
        seen,
        [("left", "deregistered"), ("released", "released"), ("stays", "node_deleted"), ("unbound", "deregistered")]
    );
    Ok(())
}

/// The provider that hosted it was removed, so no provider reports its end.
#[tokio::test]
async fn an_agent_of_a_removed_provider_has_ended_once_the_node_leaves_it_out() -> Result<()> {
    let mut scene = Scene::new("box").await?;
    let worker = scene.socket.register_agent("worker").await?["agent_id"].clone();
    inventory(&mut scene.socket, &[(&worker, &json!("worker"))]).await?;
    assert_eq!(scene.key.delete("/v1/nodes/box/providers/broker").await?.status, 204);
    let mut again = NodeSocket::connect(&scene.key.ws_base(), &scene.token).await?;
    again.register_broker(&scene.node_id, "box", "run-2").await?;
    inventory(&mut again, &[]).await?;
    inventory(&mut again, &[]).await?;
    let exits = wait_for_exits(&scene.key, 1).await?;
    assert_eq!(exits.iter().map(exit).collect::<Vec<_>>(), [("worker", "missing_from_inventory")]);
    Ok(())
}

/// An agent ends on the node that it leaves: bound elsewhere over REST, registered by another node, or named in another
/// node's inventory.
#[tokio::test]
async fn an_agent_that_moves_has_ended_on_its_former_node() -> Result<()> {
    let mut scene = Scene::new("box").await?;
    let mut listed = Vec::new();
    for name in ["bound", "registered", "named", "deleted"] {
        listed.push((scene.socket.register_agent(name).await?["agent_id"].clone(), json!(name)));
    }
    let list: Vec<_> = listed.iter().map(|(id, name)| (id, name)).collect();
    inventory(&mut scene.socket, &list).await?;
    let token = scene.key.create_broker_node("node_barn", "barn").await?.token;
    let mut barn = NodeSocket::connect(&scene.key.ws_base(), &token).await?;
    barn.register_broker("node_barn", "barn", "run-1").await?;
    scene.key.bind("barn", "bound").await?;
    // It has never run on the second node.
    scene.key.bind("barn", "deleted").await?;
    scene.key.delete("/v1/agents/deleted").await?.success().ok();
    // The first node ends its other agents' sessions without a word about them, and they come up on the second one.
    for name in ["registered", "named"] {
        scene.key.patch(&format!("/v1/agents/{name}"), json!({ "status": "offline" })).await?.success()?;
    }
    barn.register_agent("registered").await?;
    inventory(&mut barn, &[list[1], list[2]]).await?;
    inventory(&mut barn, &[list[1], list[2]]).await?;
    inventory(&mut scene.socket, &[]).await?;

    let exits = wait_for_exits(&scene.key, 4).await?;
    let mut seen: Vec<_> = exits.iter().map(exit).collect();
    seen.sort_unstable();
    assert_eq!(seen, [("bound", "moved"), ("deleted", "moved"), ("named", "moved"), ("registered", "moved")]);
    for event in &exits {
        assert_eq!(text(&event["payload"]["node_id"]), scene.node_id.as_str(), "{event}");
    }
    // They run on the second node now, and end there once more.
    inventory(&mut barn, &[]).await?;
    let exits = wait_for_exits(&scene.key, 6).await?;
    let mut later: Vec<_> = exits[4..].iter().map(exit).collect();
    later.sort_unstable();
    assert_eq!(later, [("named", "missing_from_inventory"), ("registered", "missing_from_inventory")]);
    Ok(())
}
