//! `message.send`: posts of a node for its agents, over its socket.

use anyhow::{Context as _, Result};
use relay_testkit::client::{Api, NodeSocket};
use relay_testkit::shared;
use serde_json::{Value, json};

const POSTING: [&str; 4] = ["spawn:testkit", "release", "relay:delivery-cursor-v1", "relay:message-send-v1"];

struct Scene {
    workspace: Api,
    bob: Api,
    socket: NodeSocket,
}

/// Scene with a broker that hosts `worker`, and `bob` on a node of its own.
async fn scene(node: &str, capabilities: &[&str]) -> Result<Scene> {
    let workspace = Api::create_workspace(shared().await.any_gateway(), node).await?;
    let bob = workspace.as_agent(&workspace.register_agent("bob").await?);
    let token = workspace.create_broker_node(node, node).await?;
    let mut socket = NodeSocket::connect(&workspace.ws_base(), &token.token).await?;
    socket.register_broker_with(node, node, "run-1", capabilities).await?;
    socket.register_agent("worker").await?;
    Ok(Scene { workspace, bob, socket })
}

async fn send(socket: &mut NodeSocket, messages: &[Value]) -> Result<Vec<Value>> {
    let data = socket.request(json!({ "v": 1, "type": "message.send", "messages": messages })).await?;
    Ok(data["outcomes"].as_array().context("outcomes")?.clone())
}

/// Sends a frame and returns the `error` that answers it.
async fn refusal(socket: &mut NodeSocket, mut frame: Value) -> Result<Value> {
    frame["id"] = json!("refused");
    socket.send_json(&frame).await?;
    let answer = socket.expect("error").await?;
    assert_eq!((&answer["id"], &answer["ok"]), (&json!("refused"), &json!(false)), "{answer}");
    Ok(answer)
}

fn code(outcome: &Value) -> (u64, &str) {
    (outcome["status"].as_u64().unwrap_or_default(), outcome["error"]["code"].as_str().unwrap_or_default())
}

async fn waiting(agent: &Api) -> Result<Vec<String>> {
    let rows = agent.get("/v1/deliveries?limit=200").await?.success()?;
    let text = |row: &Value| row["message"]["text"].as_str().unwrap_or_default().to_owned();
    Ok(rows.as_array().context("a list")?.iter().map(text).collect())
}

#[tokio::test]
async fn a_broker_posts_for_the_agents_that_it_hosts() -> Result<()> {
    let Scene { workspace, bob, mut socket } = scene("posting", &POSTING).await?;
    let sent = send(
        &mut socket,
        &[
            json!({ "from": "worker", "to": "bob", "text": "one", "idempotency_key": "k" }),
            json!({ "from": "worker", "channel": "general", "text": "two" }),
            json!({ "from": "worker", "to": "bob", "text": "one", "idempotency_key": "k" }),
            json!({ "from": "bob", "channel": "general", "text": "for another agent" }),
            json!({ "from": "bob", "to": "worker", "text": "not hosted here" }),
            json!({ "from": "nobody", "to": "bob", "text": "nobody" }),
            json!({ "to": "bob", "text": "without an author" }),
            json!("no post"),
            json!({ "from": "worker", "to": "bob", "text": "three" }),
        ],
    )
    .await?;
    let expected = [
        (201, ""),
        (201, ""),
        (201, ""),
        (201, ""),
        (403, "node_post_denied"),
        (404, "agent_not_found"),
        (400, "from_required"),
        (400, "invalid_request"),
        (201, ""),
    ];
    assert_eq!(sent.iter().map(code).collect::<Vec<_>>(), expected, "{sent:?}");
    assert_eq!(sent[0]["message"]["id"], sent[2]["message"]["id"]);
    assert_eq!((&sent[2]["message"]["replayed"], &sent[0]["message"]["replayed"]), (&json!(true), &json!(false)));
    assert_eq!(waiting(&bob).await?, ["one", "two", "three"]);
    let delivered = socket.expect("deliver").await?;
    assert_eq!(delivered["payload"]["data"]["text"], "for another agent", "{delivered}");
    workspace.patch("/v1/agents/worker", json!({ "rights": { "post_through_node": false } })).await?.success()?;
    let denied = send(&mut socket, &[json!({ "from": "worker", "to": "bob", "text": "denied" })]).await?;
    assert_eq!(code(&denied[0]), (403, "node_post_denied"), "{denied:?}");
    Ok(())
}

#[tokio::test]
async fn frames_that_are_sent_without_waiting_keep_their_order() -> Result<()> {
    let Scene { bob, mut socket, .. } = scene("pipelined", &POSTING).await?;
    let mut expected = Vec::new();
    for frame in 0..10 {
        let texts: Vec<String> = (0..10).map(|post| format!("{frame}-{post}")).collect();
        let post = |text: &String| json!({ "from": "worker", "to": "bob", "text": text });
        let messages: Vec<Value> = texts.iter().map(post).collect();
        let frame = json!({ "v": 1, "id": frame.to_string(), "type": "message.send", "messages": messages });
        socket.send_json(&frame).await?;
        expected.extend(texts);
    }
    for frame in 0..10 {
        let reply = socket.expect("reply").await?;
        assert_eq!((&reply["id"], &reply["ok"]), (&json!(frame.to_string()), &json!(true)), "{reply}");
    }
    assert_eq!(waiting(&bob).await?, expected);
    Ok(())
}

#[tokio::test]
async fn only_a_connection_that_asked_for_it_may_send_messages() -> Result<()> {
    let batch = json!({ "v": 1, "type": "message.send", "messages": [{ "from": "worker", "to": "bob", "text": "t" }] });
    let Scene { bob, mut socket, .. } = scene("unasked", &POSTING[..3]).await?;
    let refused = refusal(&mut socket, batch.clone()).await?;
    assert_eq!(refused["code"], "invalid_request", "{refused}");
    assert_eq!(waiting(&bob).await?, Vec::<String>::new());

    let Scene { bob, mut socket, .. } = scene("bounded", &POSTING).await?;
    let post = json!({ "from": "worker", "to": "bob", "text": "t" });
    for messages in [json!([]), json!(vec![post; 101])] {
        let refused = refusal(&mut socket, json!({ "v": 1, "type": "message.send", "messages": messages })).await?;
        assert_eq!(refused["code"], "invalid_request", "{refused}");
    }
    let refused = refusal(&mut socket, json!({ "v": 1, "type": "message.send" })).await?;
    assert_eq!(refused["code"], "invalid_message", "{refused}");
    assert_eq!(waiting(&bob).await?, Vec::<String>::new());
    send(&mut socket, &[json!({ "from": "worker", "to": "bob", "text": "still open" })]).await?;
    assert_eq!(waiting(&bob).await?, ["still open"]);
    Ok(())
}

#[tokio::test]
async fn a_direct_node_posts_for_its_own_agent() -> Result<()> {
    let workspace = Api::create_workspace(shared().await.any_gateway(), "direct-posts").await?;
    let bob = workspace.as_agent(&workspace.register_agent("bob").await?);
    let ann = workspace.as_agent(&workspace.register_agent("ann").await?);
    let node = ann.direct_node_token().await?;
    let mut socket = NodeSocket::connect(&workspace.ws_base(), &node.token).await?;
    let capabilities = json!([{ "name": "relay:message-send-v1", "kind": "capacity" }]);
    let register = json!({
        "v": 1, "type": "node.register", "name": node.name, "node_id": node.node_id, "capabilities": capabilities,
        "max_agents": 1, "tags": [], "version": "test",
    });
    let data = socket.request(register).await?;
    assert_eq!(data["accepted_capabilities"][0]["accepted"], true, "{data}");
    let sent = send(
        &mut socket,
        &[
            json!({ "from": "ann", "to": "bob", "text": "mine" }),
            json!({ "from": "bob", "to": "ann", "text": "not mine" }),
            json!({ "from": "bob", "channel": "general", "text": "not mine" }),
        ],
    )
    .await?;
    let expected = [(201, ""), (403, "node_post_denied"), (403, "node_post_denied")];
    assert_eq!(sent.iter().map(code).collect::<Vec<_>>(), expected, "{sent:?}");
    assert_eq!(waiting(&bob).await?, ["mine"]);
    Ok(())
}
