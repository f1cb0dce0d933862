//! Addresses of agents: shown, resolved, carried by direct messages; and the exact route to one recipient.

use anyhow::{Context as _, Result};
use relay_acceptance::{
    calls::SOON,
    room::{rows, text},
    spawning::post_with_key,
};
use relay_testkit::{
    client::{Api, NodeSocket},
    shared,
};
use serde_json::{Value, json};

/// Workspace of the key at the first gateway, and its client at the second one.
async fn workspace() -> Result<(Api, Api)> {
    let gateways = &shared().await.gateways;
    let key = Api::create_workspace(&gateways[0], "facts").await?;
    let other = key.at(&gateways[1]);
    Ok((key, other))
}

async fn address_of(key: &Api, agent: &str) -> Result<String> {
    let shown = key.get(&format!("/v1/agents/{agent}")).await?.success()?;
    Ok(text(&shown["address"]).to_owned())
}

#[tokio::test]
async fn agents_show_the_address_that_reaches_them() -> Result<()> {
    let (key, other) = workspace().await?;
    let sender = key.register_agent("sender").await?;
    let plain = key.post("/v1/agents", json!({ "name": "plain" })).await?.success()?;
    assert_eq!(plain["address"], "plain@direct");
    let laptop = json!({ "name": "mobile", "direct_machine_prefix": "laptop" });
    let mobile = key.post("/v1/agents", laptop).await?.success()?;
    let on_laptop = text(&mobile["address"]).to_owned();
    assert!(on_laptop.starts_with("mobile@laptop-") && on_laptop.len() == "mobile@laptop-".len() + 6, "{on_laptop}");

    key.create_broker_node("node_box", "box").await?;
    key.register_agent("hosted").await?;
    key.bind("box", "hosted").await?;
    for (agent, address) in [("plain", "plain@direct"), ("mobile", &on_laptop), ("hosted", "hosted@box")] {
        assert_eq!(address_of(&other, agent).await?, address);
        let sent = other.as_agent(&sender).post(&format!("/v1/to/{address}"), json!({ "text": "hello" })).await?;
        assert_eq!(sent.success()?["to"], agent);
    }
    // The machine of an agent's own node: from its registration, and as changed since.
    let token = other.with_token(text(&mobile["token"])).direct_node_token().await?;
    let node = other.get(&format!("/v1/nodes/{}", token.name)).await?.success()?;
    assert_eq!(on_laptop, format!("mobile@{}", text(&node["machine_id"])));
    key.patch(&format!("/v1/nodes/{}", token.name), json!({ "machine_id": "desk" })).await?.success()?;
    assert_eq!(address_of(&other, "mobile").await?, "mobile@desk");
    let mut socket = NodeSocket::connect(&other.ws_base(), &token.token).await?;
    let register = |machine: &str| {
        json!({
            "v": 1, "type": "node.register", "name": token.name, "node_id": token.node_id, "capabilities": [], "max_agents": 1,
            "tags": [], "version": "testkit", "machine_id": machine,
        })
    };
    assert!(socket.request(register("direct")).await.is_err(), "direct is reserved");
    socket.request(register("train")).await?;
    assert_eq!(address_of(&key, "mobile").await?, "mobile@train");
    let listed = other.get("/v1/agents").await?.success()?;
    let mut addresses: Vec<&str> = rows(&listed).iter().map(|agent| text(&agent["address"])).collect();
    addresses.sort_unstable();
    assert_eq!(addresses, ["hosted@box", "mobile@train", "plain@direct", "sender@direct"]);
    Ok(())
}

#[tokio::test]
async fn direct_stays_reserved() -> Result<()> {
    let (key, other) = workspace().await?;
    for name in ["direct", "#direct"] {
        other.post("/v1/nodes", json!({ "name": name })).await?.refused(400, "invalid_node_name")?;
    }
    other.post("/v1/nodes", json!({ "name": "box", "machine_id": "direct" })).await?.refused(400, "invalid_request")?;
    key.post("/v1/nodes", json!({ "name": "box" })).await?.success()?;
    other.patch("/v1/nodes/box", json!({ "machine_id": "direct" })).await?.refused(400, "invalid_request")?;
    for prefix in ["direct", "", "a@b", "a\nb"] {
        let agent = json!({ "name": "ann", "direct_machine_prefix": prefix });
        key.post("/v1/agents", agent).await?.refused(400, "invalid_request")?;
    }
    Ok(())
}

#[tokio::test]
async fn addresses_with_signs_in_names_resolve_and_ambiguous_ones_are_refused() -> Result<()> {
    let (key, other) = workspace().await?;
    let sender = key.register_agent("sender").await?;
    let sender = other.as_agent(&sender);
    for agent in ["bob@home", "ann", "ann@ws", "eve"] {
        key.register_agent(agent).await?;
    }
    for (node, name) in [("node_1", "box"), ("node_2", "ws@box")] {
        key.create_broker_node(node, name).await?;
    }
    key.bind("box", "bob@home").await?;
    key.bind("ws@box", "ann").await?;
    let to = |address: &str| {
        let (sender, path) = (sender.clone(), format!("/v1/to/{address}"));
        async move { sender.post(&path, json!({ "text": "hello" })).await }
    };
    assert_eq!(to("bob@home@box").await?.success()?["to"], "bob@home");
    assert_eq!(to("@bob@home@box").await?.success()?["to"], "bob@home");
    assert_eq!(to("ann@ws@box").await?.success()?["to"], "ann", "on the node ws@box");
    key.bind("box", "ann@ws").await?;
    to("ann@ws@box").await?.refused(400, "ambiguous_address")?;
    // The name of one node and the machine of another.
    key.post("/v1/nodes", json!({ "name": "far", "machine_id": "box" })).await?.success()?;
    to("bob@home@box").await?.refused(400, "ambiguous_address")?;
    to("eve@direct").await?.success()?;
    for (address, status, code) in [
        ("eve@box2", 404, "address_not_found"),
        ("nobody@direct", 404, "address_not_found"),
        ("ann@direct", 404, "address_not_found"),
        ("eve", 400, "invalid_address"),
        ("eve@", 400, "invalid_address"),
    ] {
        to(address).await?.refused(status, code)?;
    }
    key.post("/v1/to/eve@direct", json!({ "text": "hello" })).await?.refused(403, "agent_token_required")?;
    let doubled = json!({ "text": "hello", "to": "ann" });
    sender.post("/v1/to/eve@direct", doubled).await?.refused(400, "invalid_request")?;
    Ok(())
}

#[tokio::test]
async fn a_keyed_message_to_an_address_is_sent_once_although_its_recipient_moves() -> Result<()> {
    let (key, other) = workspace().await?;
    let sender = key.register_agent("sender").await?;
    key.register_agent("bob").await?;
    key.create_broker_node("node_box", "box").await?;
    let body = json!({ "text": "once" });
    let first = post_with_key(&key.as_agent(&sender), "/v1/to/bob@direct", body.clone(), "k").await?.success()?;
    key.bind("box", "bob").await?;
    let again = post_with_key(&other.as_agent(&sender), "/v1/to/bob@direct", body, "k").await?;
    assert!(again.headers.contains_key("idempotency-replayed"));
    assert_eq!(again.success()?["id"], first["id"]);
    Ok(())
}

#[tokio::test]
async fn direct_messages_carry_the_address_of_their_sender() -> Result<()> {
    let (key, other) = workspace().await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    key.create_broker_node("node_box", "box").await?;
    key.bind("box", "ann").await?;
    let forged = json!({ "to": "bob", "text": "hello", "data": { "a": 1, "__relaycast_from_address": "eve@box" } });
    let sent = key.as_agent(&ann).post("/v1/dm", forged).await?.success()?;
    // Live and replayed frames are equal.
    let mut frames = Vec::new();
    for _ in 0..2 {
        let mut socket = other.as_agent(&bob).direct_socket().await?;
        socket.auto_ack(false);
        frames.push(socket.expect("deliver").await?["payload"].clone());
        socket.close().await?;
    }
    let data = &frames[0]["data"];
    assert_eq!((&data["from_address"], &data["from_name"]), (&json!("ann@box"), &json!("ann")), "{data}");
    assert_eq!(data["metadata"], json!({ "a": 1 }), "{data}");
    assert_eq!(frames[0], frames[1]);
    let path = format!("/v1/dm/{}/messages", text(&data["conversation_id"]));
    let listed = other.as_agent(&bob).get(&path).await?.success()?;
    assert_eq!(text(&listed[0]["from_address"]), "ann@box", "{listed}");

    // A reply in its thread carries the address as well; a message in a channel has none.
    let path = format!("/v1/messages/{}/replies", text(&sent["id"]));
    key.as_agent(&ann).post(&path, json!({ "text": "a reply" })).await?.success()?;
    key.as_agent(&ann).post_message("general", "to all").await?.success()?;
    let delivered = other.as_agent(&bob).get("/v1/deliveries").await?.success()?;
    let addresses: Vec<_> = rows(&delivered).iter().map(|row| row["message"].get("from_address")).collect();
    assert_eq!(addresses, [Some(&json!("ann@box")), Some(&json!("ann@box")), None], "{delivered}");
    let mut socket = other.as_agent(&bob).direct_socket().await?;
    let reply = socket.expect_where("the reply", SOON, |frame| frame["payload"]["type"] == "thread.reply").await?;
    assert_eq!(reply["payload"]["data"]["from_address"], "ann@box", "{reply}");
    let post = socket.expect_where("the post", SOON, |frame| frame["payload"]["type"] == "message.created").await?;
    assert_eq!(post["payload"]["data"].get("from_address"), None, "{post}");
    Ok(())
}

#[tokio::test]
async fn a_subscription_channel_reaches_one_recipient_and_no_other() -> Result<()> {
    let (key, other) = workspace().await?;
    let (ann, bob) = (key.register_agent("ann").await?, key.register_agent("bob").await?);
    let path = "/v1/agents/ann/subscription-channel";
    let (made, again) = tokio::join!(key.post(path, json!({})), other.post_empty(path));
    let (made, again) = (made?, again?);
    assert_eq!(made.status.min(again.status), 200, "{} {}", made.body, again.body);
    assert_eq!(made.status.max(again.status), 201, "created once");
    let (made, again) = (made.success()?, again.success()?);
    assert_eq!((&made["id"], &made["name"]), (&again["id"], &again["name"]));
    let third = other.as_agent(&ann).post_empty(path).await?.success()?;
    assert_eq!(third, made, "an agent gets its own one");
    assert_eq!(
        (&made["agent_id"], &made["agent_name"], &made["address"]),
        (&json!(ann.id), &json!("ann"), &json!("ann@direct"))
    );
    assert_eq!(made["member_count"], 1, "{made}");

    // No other agent becomes a member, and no channel takes the name.
    let name = text(&made["name"]);
    other.as_agent(&bob).post_empty(path).await?.refused(403, "forbidden")?;
    let joined = other.as_agent(&bob).post_empty(&format!("/v1/channels/{name}/join")).await?;
    joined.refused(403, "forbidden")?;
    let invited = json!({ "agent_name": "bob" });
    key.as_agent(&ann).post(&format!("/v1/channels/{name}/invite"), invited).await?.refused(403, "forbidden")?;
    let pose = format!("subscription-{}", bob.id);
    key.as_agent(&ann).post("/v1/channels", json!({ "name": pose })).await?.refused(400, "invalid_channel_name")?;
    key.post_empty("/v1/agents/nobody/subscription-channel").await?.refused(404, "agent_not_found")?;

    // A webhook that posts there reaches exactly that agent.
    let hook = key.post("/v1/webhooks", json!({ "name": "ci", "channel": name })).await?.success()?;
    let hook_url = text(&hook["url"]).to_owned();
    let call = other.with_token(text(&hook["token"])).post(&hook_url, json!({ "text": "green" })).await?;
    call.success()?;
    let deliveries = async |agent| -> Result<Vec<Value>> {
        let listed = other.as_agent(agent).get("/v1/deliveries").await?.success()?;
        Ok(rows(&listed).to_vec())
    };
    let of_ann = deliveries(&ann).await?;
    assert_eq!(text(&of_ann.first().context("a delivery")?["message"]["text"]), "green");
    assert_eq!((of_ann.len(), deliveries(&bob).await?.len()), (1, 0));
    Ok(())
}
