//! Every way of posting with every right of the author: routes, batches and frames, with tokens of agents and of nodes.
//! And all other frames of nodes, which depend on no right.

use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::future::try_join_all;
use relay_acceptance::{
    access::{DEFAULT_RIGHTS, FURTHER_RIGHTS, settings_of_rights},
    room::{rows, text},
};
use relay_testkit::{
    client::{Api, NodeSocket},
    shared,
};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(30);
const SOCKET_CAPABILITIES: [&str; 4] =
    ["spawn:testkit", "release", "relay:delivery-cursor-v1", "relay:message-send-v1"];

/// Caller of a post, and the agent in whose name it posts.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Caller {
    /// `ann` itself.
    Agent,
    /// Broker that hosts `worker`.
    Broker,
    /// Node of `ann`.
    OwnNode,
}

const CALLERS: [Caller; 3] = [Caller::Agent, Caller::Broker, Caller::OwnNode];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    /// Route of each kind of target.
    Routes,
    /// `POST /v1/messages/batch`.
    Batch,
    /// `message.send` on a socket.
    Frame,
}

/// Way to set a right of the authors.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Setting {
    Policy,
    Override,
    /// The override gives what the policy denies.
    OpenedByOverride,
}

/// Workspace with callers of every kind, and targets that they share.
struct Scene {
    key: Api,
    ann: Api,
    broker: Api,
    own_node: Api,
    broker_socket: NodeSocket,
    own_socket: NodeSocket,
    /// Field that names the target in a batch, its value, and the path of its own route.
    targets: [(&'static str, String, String); 5],
}

impl Scene {
    async fn new() -> Result<Self> {
        let key = Api::create_workspace(&shared().await.gateways[0], "rights-nodes").await?;
        let ann = key.as_agent(&key.register_agent("ann").await?);
        let bob = key.as_agent(&key.register_agent("bob").await?);
        let node = key.create_broker_node("node_box", "box").await?;
        let mut broker_socket = NodeSocket::connect(&key.ws_base(), &node.token).await?;
        broker_socket.register_broker_with("node_box", "box", "run-1", &SOCKET_CAPABILITIES).await?;
        let worker = broker_socket.register_agent("worker").await?;
        let own = ann.direct_node_token().await?;
        let mut own_socket = NodeSocket::connect(&key.ws_base(), &own.token).await?;
        let capabilities = json!([{ "name": "relay:message-send-v1", "kind": "capacity" }]);
        own_socket
            .request(json!({
                "v": 1, "type": "node.register", "node_id": own.node_id, "name": own.name, "max_agents": 1, "tags": [],
                "capabilities": capabilities, "version": "testkit",
            }))
            .await?;
        for socket in [&mut broker_socket, &mut own_socket] {
            socket.auto_ack(true);
        }
        ann.create_channel("room").await?;
        bob.join("room").await?;
        key.with_token(text(&worker["token"])).join("room").await?;
        let message = text(&bob.post_message("room", "hello").await?.success()?["id"]).to_owned();
        let group = ann.post("/v1/dm/group", json!({ "participants": ["worker", "bob"] })).await?.success()?;
        let group = text(&group["id"]).to_owned();
        let (broker, own_node) = (key.with_token(&node.token), key.with_token(&own.token));
        let targets = [
            ("channel", "room".to_owned(), "/v1/channels/room/messages".to_owned()),
            ("to", "bob".to_owned(), "/v1/dm".to_owned()),
            ("address", "bob@direct".to_owned(), "/v1/to/bob@direct".to_owned()),
            ("reply_to", message.clone(), format!("/v1/messages/{message}/replies")),
            ("conversation_id", group.clone(), format!("/v1/dm/{group}/messages")),
        ];
        Ok(Self { key, ann, broker, own_node, broker_socket, own_socket, targets })
    }

    const fn client(&self, caller: Caller) -> &Api {
        match caller {
            Caller::Agent => &self.ann,
            Caller::Broker => &self.broker,
            Caller::OwnNode => &self.own_node,
        }
    }

    /// Returns a post without a target.
    fn post(caller: Caller) -> Value {
        match caller {
            Caller::Agent => json!({ "text": "hello" }),
            Caller::Broker => json!({ "text": "hello", "from": "worker" }),
            Caller::OwnNode => json!({ "text": "hello", "from": "ann" }),
        }
    }

    /// Returns a post to each target.
    fn posts(&self, caller: Caller) -> Vec<Value> {
        let targets = self.targets.iter().map(|(field, value, _)| {
            let mut post = Self::post(caller);
            post[*field] = json!(value);
            post
        });
        targets.collect()
    }

    /// Posts to each target; returns the outcomes in the order of the targets.
    async fn outcomes(&mut self, way: Way, caller: Caller) -> Result<Vec<(u64, String)>> {
        let posts = json!({ "messages": self.posts(caller) });
        let data = match (way, caller) {
            (Way::Routes, _) => {
                let scene = &*self;
                let calls = scene.targets.iter().map(async |(field, value, path)| {
                    let mut post = Self::post(caller);
                    if *field == "to" {
                        post["to"] = json!(value);
                    }
                    let reply = scene.client(caller).post(path, post).await?;
                    anyhow::Ok((u64::from(reply.status), reply.code().to_owned()))
                });
                return try_join_all(calls).await;
            }
            (Way::Batch, _) => self.client(caller).post("/v1/messages/batch", posts).await?.success()?,
            (Way::Frame, Caller::Agent) => return Ok(Vec::new()),
            (Way::Frame, Caller::Broker | Caller::OwnNode) => {
                let frame = json!({ "v": 1, "type": "message.send", "messages": posts["messages"] });
                let socket = if caller == Caller::Broker { &mut self.broker_socket } else { &mut self.own_socket };
                socket.request(frame).await?
            }
        };
        let outcome = |outcome: &Value| {
            let status = outcome["status"].as_u64().context("a status")?;
            anyhow::Ok((status, text(&outcome["error"]["code"]).to_owned()))
        };
        rows(&data["outcomes"]).iter().map(outcome).collect()
    }

    /// Denies the authors a right.
    async fn close(&self, right: &str, setting: Setting) -> Result<()> {
        let (policy, rights) = match setting {
            Setting::Policy => (json!({ right: false }), Value::Null),
            Setting::Override => (Value::Null, json!({ right: false })),
            Setting::OpenedByOverride => (json!({ right: false }), json!({ right: true })),
        };
        for value in [Value::Null, policy] {
            self.key.patch("/v1/workspace", json!({ "policy": value })).await?.success()?;
        }
        for author in ["ann", "worker"] {
            self.key.patch(&format!("/v1/agents/{author}"), json!({ "rights": rights })).await?.success()?;
        }
        Ok(())
    }
}

/// Returns the outcome of a post of a caller whose author lacks a right.
fn expected(way: Way, caller: Caller, target: &str, right: &str, setting: Setting) -> (u64, &'static str) {
    let is_node = caller != Caller::Agent;
    if is_node && way != Way::Frame && target != "channel" {
        return (401, "node_token_forbidden");
    }
    match right {
        _ if setting == Setting::OpenedByOverride => (201, ""),
        "send" => (403, "send_denied"),
        "post_through_node" if caller == Caller::Broker => (403, "node_post_denied"),
        _ => (201, ""),
    }
}

#[tokio::test]
async fn every_way_of_posting_needs_the_rights_of_the_author() -> Result<()> {
    let mut scene = Scene::new().await?;
    let mut checked = 0;
    for right in DEFAULT_RIGHTS {
        for setting in [Setting::Policy, Setting::Override, Setting::OpenedByOverride] {
            scene.close(right, setting).await?;
            for (way, caller) in
                [Way::Routes, Way::Batch, Way::Frame].into_iter().flat_map(|way| CALLERS.map(|c| (way, c)))
            {
                let outcomes = scene.outcomes(way, caller).await?;
                for ((target, ..), (status, code)) in scene.targets.iter().zip(&outcomes) {
                    let what = format!("{way:?} to {target} by {caller:?} without {right} ({setting:?})");
                    assert_eq!((*status, code.as_str()), expected(way, caller, target, right, setting), "{what}");
                    checked += 1;
                }
            }
        }
    }
    assert_eq!(checked, DEFAULT_RIGHTS.len() * 3 * (3 + 3 + 2) * 5);
    Ok(())
}

/// Frames of a node that are answered, for an agent of this name, other than posts.
fn other_frames(agent: &str, id: &Value) -> Vec<Value> {
    let frame = |kind: &str, body: Value| {
        let mut frame = body;
        frame["v"] = json!(1);
        frame["type"] = json!(kind);
        frame
    };
    vec![
        frame("agent.register", json!({ "name": agent })),
        frame("agent.recover", json!({ "name": agent, "expected_agent_id": id })),
        frame("inventory.sync", json!({ "agents": [{ "agent_id": id, "name": agent }] })),
        frame("node.spawn", json!({ "input": { "name": "inner", "cli": "testkit" } })),
        frame("action.accept", json!({ "invocation_id": "inv_1" })),
        frame("action.result", json!({ "invocation_id": "inv_1", "output": {}, "final": true })),
        frame("agent.deregister", json!({ "agent_id": id })),
    ]
}

/// Sends frames; returns the code of the answer to each, empty for a success.
async fn codes(socket: &mut NodeSocket, frames: Vec<Value>) -> Result<Vec<(String, String)>> {
    let mut codes = Vec::new();
    for mut frame in frames {
        let id = uuid::Uuid::new_v4().to_string();
        frame["id"] = json!(id);
        socket.send_json(&frame).await?;
        let kind = text(&frame["type"]).to_owned();
        let answer = socket.expect_where(&kind, SOON, |answer| answer["id"] == id.as_str()).await?;
        codes.push((kind, text(&answer["code"]).to_owned()));
    }
    Ok(codes)
}

/// A node decides by itself what it does for its agents.
#[tokio::test]
async fn no_other_frame_depends_on_rights() -> Result<()> {
    let mut scene = Scene::new().await?;
    let worker = scene.key.get("/v1/agents/worker").await?.success()?["id"].clone();
    let ann = scene.key.get("/v1/agents/ann").await?.success()?["id"].clone();
    let mut by_default = None;
    for granted in [&DEFAULT_RIGHTS[..], &[], &FURTHER_RIGHTS] {
        scene.key.patch("/v1/workspace", json!({ "policy": settings_of_rights(granted) })).await?.success()?;
        let of_broker = codes(&mut scene.broker_socket, other_frames("worker", &worker)).await?;
        let of_own = codes(&mut scene.own_socket, other_frames("ann", &ann)).await?;
        let answers = (of_broker, of_own);
        let successes = answers.0.iter().filter(|(_, code)| code.is_empty()).count();
        assert!(successes >= 5, "{answers:?}");
        assert_eq!(by_default.get_or_insert_with(|| answers.clone()), &answers, "with {granted:?}");
    }
    Ok(())
}
