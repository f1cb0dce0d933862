//! Workspaces, agents, channels, read marks, nodes and bindings over REST: the fields that strict clients require, and
//! the roster of a connected node.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use relay_testkit::client::{Api, NodeSocket};
use relay_testkit::{shared, wait};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);

/// Asserts that all of these fields are present, null or not.
fn has(value: &Value, wanted: &str) {
    let missing: Vec<_> = wanted.split_whitespace().filter(|key| value.get(key).is_none()).collect();
    assert!(missing.is_empty(), "{missing:?} missing in {value}");
}

fn is_exactly(value: &Value, wanted: &str) {
    let keys: BTreeSet<_> = value.as_object().into_iter().flatten().map(|(key, _)| key.as_str()).collect();
    assert_eq!(keys, wanted.split_whitespace().collect(), "{value}");
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn is_timestamp(value: &Value) -> bool {
    text(value).len() == 24 && text(value).ends_with('Z')
}

async fn workspace(name: &str) -> Result<Api> {
    Api::create_workspace(shared().await.any_gateway(), name).await
}

#[tokio::test]
async fn a_workspace_is_created_found_updated_and_deleted() -> Result<()> {
    let base = shared().await.any_gateway();
    let name = format!("ws-{}", uuid::Uuid::new_v4().simple());
    let anonymous = Api::anonymous(base);
    let body = json!({ "name": name, "provenance": { "source": "sdk" }, "unknown": 1 });
    let made = anonymous.post("/v1/workspaces", body).await?;
    assert_eq!(made.status, 201);
    let made = made.success()?;
    has(&made, "workspace_id api_key created_at");
    assert!(text(&made["api_key"]).starts_with("rk_live_") && is_timestamp(&made["created_at"]));
    let key = anonymous.with_token(text(&made["api_key"]));
    // The owner gets its own workspace again, with its key; another caller gets a new one of the same name.
    let again = key.post("/v1/workspaces", json!({ "name": name })).await?;
    assert_eq!(
        (again.status, &again.data()["workspace_id"], &again.data()["api_key"]),
        (200, &made["workspace_id"], &made["api_key"])
    );
    let found = anonymous.get(&format!("/v1/workspaces/by-name/{name}")).await?.success()?;
    is_exactly(&found, "id name created_at");
    assert_eq!(found["id"], made["workspace_id"]);
    anonymous.get(&format!("/v1/workspaces/by-name/{name}-no")).await?.refused(404, "workspace_not_found")?;

    let info = key.get("/v1/workspace").await?.success()?;
    has(&info, "id name plan system_prompt created_at metadata api_key_hash");
    assert!(["free", "pro", "enterprise"].contains(&text(&info["plan"])));
    assert!(!info.to_string().contains(text(&made["api_key"])), "the key is shown once");
    key.patch("/v1/workspace", json!({ "metadata": { "a": 1, "b": 2 }, "system_prompt": "be kind" }))
        .await?
        .success()?;
    let changed = key.patch("/v1/workspace", json!({ "metadata": { "a": null, "c": 3 } })).await?.success()?;
    assert_eq!((&changed["metadata"], text(&changed["system_prompt"])), (&json!({ "b": 2, "c": 3 }), "be kind"));
    let cleared = key.patch("/v1/workspace", json!({ "system_prompt": null })).await?.success()?;
    assert_eq!(cleared["system_prompt"], Value::Null);

    let general = key.get("/v1/channels/general").await?.success()?;
    assert_eq!(text(&general["topic"]), "General discussion");
    assert_eq!(key.delete("/v1/workspace").await?.status, 204);
    key.get("/v1/workspace").await?.refused(401, "unauthorized")?;
    anonymous.get(&format!("/v1/workspaces/by-name/{name}")).await?.refused(404, "workspace_not_found")?;
    Ok(())
}

const AGENT: &str =
    "id workspace_id name handle type status persona capabilities metadata created_at last_seen token_hash";

#[tokio::test]
async fn an_agent_is_registered_read_updated_and_deleted() -> Result<()> {
    let key = workspace("agents").await?;
    let body = json!({ "name": "ada", "type": "human", "persona": "first", "metadata": { "identity_key": "00", "fooBar": 1 }, "skills": [{ "name": "sums" }] });
    let made = key.post("/v1/agents", body.clone()).await?;
    assert_eq!(made.status, 201);
    let made = made.success()?;
    has(&made, "id workspace_id name handle token status capabilities created_at");
    assert_eq!((text(&made["handle"]), text(&made["status"])), ("@ada", "online"));
    assert!(text(&made["token"]).starts_with("at_live_") && text(&made["token"]).len() == 40);
    key.post("/v1/agents", body).await?.refused(409, "agent_already_exists")?;
    key.register_agent("Ada").await?;

    let ada = key.with_token(text(&made["token"]));
    for record in [ada.get("/v1/agent").await?.success()?, key.get("/v1/agents/ada").await?.success()?] {
        has(&record, AGENT);
        has(&record, "channels actions_provided actions_available_to pending_deliveries");
        has(&record["channels"][0], "id name role joined_at");
        assert_eq!(record["pending_deliveries"], json!([]), "its mailbox is empty");
        assert_eq!(
            (text(&record["type"]), text(&record["persona"]), text(&record["status"])),
            ("human", "first", "online")
        );
        assert_eq!((&record["metadata"]["fooBar"], text(&record["channels"][0]["name"])), (&json!(1), "general"));
        assert!(is_timestamp(&record["created_at"]) && is_timestamp(&record["last_seen"]));
        assert!(!record.to_string().contains(text(&made["token"])));
    }
    for record in key.get("/v1/agents").await?.success()?.as_array().into_iter().flatten() {
        has(record, AGENT);
    }
    let changed = key
        .patch("/v1/agents/ada", json!({ "metadata": { "b": 2 }, "persona": null, "status": "offline" }))
        .await?
        .success()?;
    assert_eq!(
        (&changed["metadata"]["fooBar"], &changed["metadata"]["b"], &changed["persona"]),
        (&json!(1), &json!(2), &Value::Null)
    );
    assert_eq!(text(&changed["status"]), "offline");
    let names = |reply: Value| {
        reply.as_array().into_iter().flatten().map(|agent| text(&agent["name"]).to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(key.get("/v1/agents?status=offline").await?.success()?), ["ada"]);
    ada.post("/v1/agents/heartbeat", json!({})).await?.success()?;
    let presence = key.get("/v1/agents/presence").await?.success()?;
    for one in presence.as_array().into_iter().flatten() {
        is_exactly(one, "agent_id agent_name status");
        assert!(["online", "offline", "away"].contains(&text(&one["status"])));
    }
    assert_eq!(names(key.get("/v1/agents?status=online").await?.success()?).len(), 2);
    ada.post("/v1/agents/disconnect", json!({})).await?.success()?;

    let rotated = key.post("/v1/agents/ada/rotate-token", json!({})).await?.success()?;
    is_exactly(&rotated, "name token");
    ada.get("/v1/agent").await?.refused(401, "agent_token_invalid")?;
    let ada = key.with_token(text(&rotated["token"]));
    let again = ada.post_empty("/v1/agents/ada/rotate-token").await?.success()?;
    let ada = key.with_token(text(&again["token"]));
    assert_eq!(key.delete("/v1/agents/ada").await?.status, 204);
    ada.get("/v1/agent").await?.refused(401, "agent_token_invalid")?;
    key.get("/v1/agents/ada").await?.refused(404, "agent_not_found")?;
    key.delete("/v1/agents/ada").await?.refused(404, "agent_not_found")?;
    // The name can be reused by a new identity.
    assert_ne!(key.register_agent("ada").await?.id, text(&made["id"]));
    Ok(())
}

const CHANNEL: &str = "id workspace_id name channel_type topic metadata created_by created_at is_archived member_count";

#[tokio::test]
async fn a_channel_is_created_joined_left_and_archived() -> Result<()> {
    let key = workspace("channels").await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let (as_ann, as_bob) = (key.as_agent(&ann), key.as_agent(&bob));
    let made = as_ann.post("/v1/channels", json!({ "name": "dev", "topic": null, "metadata": { "aB": 1 } })).await?;
    assert_eq!(made.status, 201);
    let made = made.success()?;
    has(&made, CHANNEL);
    assert_eq!(
        (text(&made["created_by"]), &made["channel_type"], &made["member_count"], &made["topic"]),
        (&*ann.id, &json!(0), &json!(1), &Value::Null)
    );
    as_bob.post("/v1/channels", json!({ "name": "dev" })).await?.refused(409, "channel_already_exists")?;
    let by_key = key.create_channel("ops").await?;
    assert_eq!((&by_key["created_by"], &by_key["member_count"]), (&Value::Null, &json!(0)));

    as_bob.post("/v1/channels/dev/invite", json!({ "agent_name": "bob" })).await?.refused(403, "not_a_member")?;
    let joined = as_bob.post_empty("/v1/channels/dev/join").await?.success()?;
    assert_eq!(joined, json!({ "channel": "dev", "agent_id": bob.id, "already_member": false }));
    assert_eq!(as_bob.post_empty("/v1/channels/%23dev/join").await?.data()["already_member"], true);
    as_ann.post("/v1/channels/dev/invite", json!({ "agent": "nobody" })).await?.refused(404, "agent_not_found")?;
    let invited = as_ann.post("/v1/channels/dev/invite", json!({ "agent_name": "bob" })).await?.success()?;
    assert_eq!(invited, json!({ "channel": "dev", "agent": "bob" }));
    let members = key.get("/v1/channels/dev/members").await?.success()?;
    is_exactly(&members[0], "agent_id agent_name role joined_at is_muted");
    let roles: BTreeSet<_> =
        members.as_array().into_iter().flatten().map(|one| (text(&one["agent_name"]), text(&one["role"]))).collect();
    assert_eq!(roles, [("ann", "owner"), ("bob", "member")].into());
    let details = as_bob.get("/v1/channels/dev").await?.success()?;
    has(&details, CHANNEL);
    assert_eq!(details["members"], members);

    let topic = as_ann.patch("/v1/channels/dev/topic", json!({ "topic": "rust" })).await?.success()?;
    has(&topic, CHANNEL);
    assert_eq!(text(&topic["topic"]), "rust");
    assert_eq!(as_ann.patch("/v1/channels/dev", json!({ "metadata": { "c": 2 } })).await?.data()["topic"], "rust");
    assert_eq!(as_ann.patch("/v1/channels/dev", json!({ "topic": null })).await?.data()["topic"], Value::Null);
    assert_eq!(as_bob.post_empty("/v1/channels/dev/leave").await?.status, 204);
    // Posting does not require membership.
    assert_eq!(as_bob.post_message("dev", "from outside").await?.status, 201);

    key.delete("/v1/channels/general").await?.refused(400, "cannot_archive_general")?;
    assert_eq!(as_ann.delete("/v1/channels/dev").await?.status, 204);
    for (path, body) in [("/v1/channels/dev/messages", json!({ "text": "x" })), ("/v1/channels/dev/join", json!({}))] {
        as_bob.post(path, body).await?.refused(400, "channel_archived")?;
    }
    let names = |reply: Value| {
        reply.as_array().into_iter().flatten().map(|one| text(&one["name"]).to_owned()).collect::<BTreeSet<_>>()
    };
    let node = key.create_broker_node("node_channels", "box").await?;
    let listed = names(key.with_token(&node.token).get("/v1/channels").await?.success()?);
    assert_eq!(listed, ["general", "ops"].map(str::to_owned).into());
    let all = names(as_bob.get("/v1/channels?include_archived=true").await?.success()?);
    assert!(all.contains("dev") && !all.iter().any(|name| name.starts_with("dm-")));
    Ok(())
}

const NODE: &str = "id name kind role machine_id delivery_adapter delivery capabilities tags version status live \
                    handlers_live load active_agents max_agents last_heartbeat_at created_at";

#[tokio::test]
async fn a_node_is_enrolled_connects_and_shows_on_the_roster() -> Result<()> {
    let key = workspace("roster").await?;
    let body = json!({ "node_id": "node_9f", "name": "#box", "kind": "ws", "role": "broker", "version": "relay-broker/12.4.1", "capabilities": ["spawn:claude"], "tags": ["gpu"], "max_agents": 8 });
    let made = key.post("/v1/nodes", body.clone()).await?;
    assert_eq!(made.status, 201);
    let made = made.success()?;
    has(&made, NODE);
    assert!(text(&made["token"]).starts_with("nt_live_"));
    assert_eq!(
        (text(&made["id"]), text(&made["name"]), text(&made["delivery_adapter"])),
        ("node_9f", "box", "ws.node.v1")
    );
    assert_eq!((text(&made["status"]), &made["live"]), ("offline", &json!(false)));
    // Every call creates a token and revokes the previous one.
    let renewed = key.post("/v1/nodes", body).await?.success()?;
    assert_ne!(renewed["token"], made["token"]);
    assert!(NodeSocket::connect(&key.ws_base(), text(&made["token"])).await.is_err());
    let mut socket = NodeSocket::connect_with_header(&key.ws_base(), text(&renewed["token"])).await?;

    let register = json!({ "v": 1, "type": "node.register", "name": "box", "node_id": "node_9f", "provider": { "name": "broker", "instance_id": "i-1" },
        "capabilities": [{ "name": "spawn:claude", "kind": "spawn" }, { "name": "build" }, { "name": "relay:delivery-cursor-v1", "kind": "capacity" }],
        "max_agents": 4, "tags": ["gpu"], "version": "testkit", "resume_cursor": null, "unknown": {} });
    let reply = socket.request(register).await?;
    has(&reply, NODE);
    assert_eq!(reply["provider"], json!({ "name": "broker", "instance_id": "i-1" }));
    assert_eq!(
        reply["accepted_capabilities"],
        json!([
            { "name": "spawn:claude", "kind": "capacity", "accepted": true },
            { "name": "build", "kind": "action", "accepted": true },
            { "name": "relay:delivery-cursor-v1", "kind": "capacity", "accepted": true },
        ])
    );
    assert!(reply.get("token").is_none());
    socket
        .send_json(
            &json!({ "v": 1, "type": "node.heartbeat", "load": null, "active_agents": 3, "handlers_live": true }),
        )
        .await?;
    let roster = |query: &'static str| {
        let key = key.clone();
        async move { key.get(&format!("/v1/nodes{query}")).await.unwrap().success().unwrap() }
    };
    wait::until("the heartbeat to show", Duration::from_secs(15), || async {
        roster("/box").await["providers"][0]["active_agents"] == 3
    })
    .await;
    let shown = roster("/box").await;
    has(&shown, NODE);
    assert!(
        shown.get("token").is_none() && shown["load"].is_number() && is_timestamp(&shown["last_heartbeat_at"]),
        "{shown}"
    );
    assert_eq!(
        (text(&shown["status"]), &shown["live"], &shown["handlers_live"], &shown["max_agents"]),
        ("online", &json!(true), &json!(true), &json!(4))
    );
    has(&shown["capabilities"][0], "name kind");

    let ids = |list: Value| {
        list.as_array().into_iter().flatten().map(|node| text(&node["id"]).to_owned()).collect::<Vec<_>>()
    };
    for query in ["?name=box", "?capability=spawn:claude", "?status=online", "?capability=build&name=box"] {
        assert_eq!(ids(roster(query).await), ["node_9f"], "{query}");
    }
    assert_eq!(ids(roster("?capability=spawn:other").await), [""; 0]);
    key.post("/v1/nodes", json!({ "name": "pushed", "kind": "smoke" })).await?.refused(400, "invalid_request")?;
    key.post("/v1/nodes", json!({ "name": "d", "role": "direct", "max_agents": 2 }))
        .await?
        .refused(400, "direct_node_capacity_exceeded")?;
    key.get("/v1/nodes/none").await?.refused(404, "node_not_found")?;
    socket.abort();
    wait::until("the node to be offline", SOON, || async { roster("/box").await["status"] == "offline" }).await;
    Ok(())
}

const BINDING: &str = "id agent_id agent_name node_id node_name node_kind node_role status session_ref priority created_at \
                       updated_at delivery_ack_seq";

#[tokio::test]
async fn an_agent_moves_to_a_node_and_back_with_its_mailbox() -> Result<()> {
    let key = workspace("bindings").await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let (as_ann, as_bob) = (key.as_agent(&ann), key.as_agent(&bob));
    let node = key.create_broker_node("node_b", "box").await?;
    let mut direct = as_bob.direct_socket().await?;
    as_ann.dm("bob", "one").await?.success()?;
    assert_eq!(direct.expect("deliver").await?["seq"], 1);
    direct.ack("bob", 1).await?;
    let own = format!("/v1/nodes/direct-{}/agents", bob.id);
    let floor = || async { key.get(&own).await.unwrap().data()[0]["delivery_ack_seq"].clone() };
    wait::until("the ack to be stored", SOON, || async { floor().await == 1 }).await;

    let bound =
        key.post("/v1/nodes/box/agents", json!({ "agent_name": "bob", "session_ref": "s-1", "priority": 2 })).await?;
    assert_eq!(bound.status, 201);
    let bound = bound.success()?;
    has(&bound, BINDING);
    assert!(text(&bound["id"]).starts_with("anb_"));
    assert_eq!(
        (text(&bound["node_id"]), text(&bound["status"]), &bound["delivery_ack_seq"]),
        ("node_b", "active", &json!(1))
    );
    assert_eq!(key.get("/v1/nodes/box/agents").await?.data()[0]["id"], bound["id"]);
    as_bob.post("/v1/agent/node-token", json!({})).await?.refused(409, "agent_bound_to_node")?;
    as_ann.dm("bob", "two").await?.success()?;
    let mut socket = NodeSocket::connect_with_header(&key.ws_base(), &node.token).await?;
    socket.register_broker_with("node_b", "box", "i-1", &["release"]).await?;
    let posted = |text: &str| json!({ "text": text, "from": "bob" });
    // The sequence continues, and the broker may post for the agent that it hosts.
    let two = socket
        .expect_where("the second message", SOON, |frame| frame["type"] == "deliver" && frame["seq"] == 2)
        .await?;
    assert_eq!(text(&two["payload"]["data"]["text"]), "two");
    let as_node = key.with_token(&node.token);
    as_node.post("/v1/channels/general/messages", json!({ "text": "x" })).await?.refused(400, "from_required")?;
    as_node
        .post("/v1/channels/general/messages", json!({ "text": "x", "from": "nobody" }))
        .await?
        .refused(404, "agent_not_found")?;
    as_bob.post("/v1/channels/general/messages", posted("x")).await?.refused(400, "from_not_allowed")?;
    let said = as_node.post("/v1/channels/general/messages", posted("by node")).await?.success()?;
    assert_eq!(text(&said["agent_name"]), "bob");

    // Without `deregister`, an agent that goes offline keeps its place.
    as_bob.post("/v1/agents/disconnect", json!({})).await?.success()?;
    assert_eq!(key.get("/v1/nodes/box/agents").await?.data()[0]["id"], bound["id"]);
    as_bob.post("/v1/agents/disconnect", json!({ "deregister": true })).await?.success()?;
    assert_eq!(key.get("/v1/nodes/box/agents").await?.success()?, json!([]));
    as_bob.post("/v1/agents/disconnect", json!({ "deregister": true })).await?.success()?;
    key.post("/v1/nodes/box/agents", json!({ "agent_name": "bob" })).await?.success()?;

    key.delete("/v1/nodes/box/agents/ann").await?.refused(404, "node_agent_binding_not_found")?;
    assert_eq!(key.delete("/v1/nodes/box/agents/bob").await?.status, 204);
    assert_eq!(key.get("/v1/nodes/box/agents").await?.success()?, json!([]));
    as_ann.dm("bob", "three").await?.success()?;
    let mut direct = as_bob.direct_socket().await?;
    let mut texts = Vec::new();
    while texts.last().is_none_or(|last| last != "three") {
        let frame = direct.expect("deliver").await?;
        texts.push(text(&frame["payload"]["data"]["text"]).to_owned());
    }
    assert_eq!(texts, ["two", "three"], "what the broker never acked comes again, then what is new");
    key.post("/v1/nodes/none/agents", json!({ "agent_name": "bob" })).await?.refused(404, "node_not_found")?;
    key.post("/v1/nodes/box/agents", json!({ "agent_name": "nobody" })).await?.refused(404, "agent_not_found")?;
    assert_eq!(key.delete("/v1/nodes/box/providers/broker").await?.status, 204);
    Ok(())
}

#[tokio::test]
async fn a_workspace_with_an_idempotency_key_is_created_once() -> Result<()> {
    let gateways = &shared().await.gateways;
    let name = format!("keyed-{}", uuid::Uuid::new_v4().simple());
    let body = json!({ "name": name });
    let make = |gateway: usize, key: String, body: Value| {
        let api = Api::anonymous(&gateways[gateway]);
        async move { api.call(reqwest::Method::POST, "/v1/workspaces", Some(body), &[("idempotency-key", &*key)]).await }
    };
    let key = uuid::Uuid::new_v4().simple().to_string();
    let first = make(0, key.clone(), body.clone()).await?;
    assert_eq!(first.status, 201);
    let again = make(1, key.clone(), body.clone()).await?;
    assert_eq!(again.data()["workspace_id"], first.data()["workspace_id"]);
    assert_eq!(again.headers["idempotency-replayed"], "true");
    make(1, key.clone(), json!({ "name": "another" })).await?.refused(409, "workspace_create_idempotency_conflict")?;
    make(0, "short".to_owned(), body.clone()).await?.refused(400, "workspace_create_idempotency_key_too_weak")?;
    let owner = Api::new(&gateways[0], text(&first.data()["api_key"]));
    owner.delete("/v1/workspace").await?.success()?;
    make(1, key, body).await?.refused(409, "workspace_create_idempotency_terminalized")?;
    // A malformed header is never treated as absent.
    Api::new(&gateways[0], "rk_live_0")
        .post("/v1/workspaces", json!({ "name": "x" }))
        .await?
        .refused(401, "unauthorized")?;
    Ok(())
}

#[tokio::test]
async fn reading_a_message_is_recorded_once_and_settles_its_delivery() -> Result<()> {
    let key = workspace("reading").await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let as_bob = key.as_agent(&bob);
    let posted = key.as_agent(&ann).post_message("general", "read me").await?.success()?;
    let path = format!("/v1/messages/{}/read", text(&posted["id"]));
    let first = as_bob.post_empty(&path).await?.success()?;
    is_exactly(&first, "message_id agent_id read_at");
    assert_eq!((&first["message_id"], text(&first["agent_id"])), (&posted["id"], &*bob.id));
    assert_eq!(as_bob.at(&shared().await.gateways[1]).post_empty(&path).await?.success()?, first, "once");
    assert_eq!(as_bob.get("/v1/deliveries").await?.success()?, json!([]));
    // A broker sends it for every frame that it shows.
    for odd in ["inv_17", "1", "tomb_1_1"] {
        as_bob.post_empty(&format!("/v1/messages/{odd}/read")).await?.refused(404, "message_not_found")?;
    }
    Ok(())
}
