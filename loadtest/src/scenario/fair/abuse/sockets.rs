//! Sockets: opened and left, and with frames that never end.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures::{SinkExt, StreamExt, TryStreamExt, stream};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

use super::{Attack, CONCURRENT_SETUP, Counts, Scene};
use crate::api::{NodeAccess, Workspace};

/// Sockets that one task holds before it closes them all. With those of the other tasks, more than a token may have.
const HELD: usize = 40;
/// Nodes whose sockets send frames.
const FRAME_NODES: usize = 64;
/// Entries of an inventory, of agents that do not exist.
const INVENTORY: usize = 2000;
/// Capabilities of a heartbeat, and the text of each in bytes: with their names somewhat less than the 64 KiB that a
/// node may have.
const CAPABILITIES: usize = 200;
const CAPABILITY_BYTES: usize = 220;
const REPLY_WITHIN: Duration = Duration::from_secs(30);

pub(super) async fn sockets(scene: &Scene) -> Result<Attack> {
    let node = scene.workspace.broker_node("sockets").await?;
    let mut attack = Attack::new();
    hold(&mut attack, scene, "/v1/node/ws", &node.token);
    Ok(attack)
}

/// Opens sockets with one token, more than it may have.
pub(super) fn hold(attack: &mut Attack, scene: &Scene, path: &'static str, token: &str) {
    attack.spawn(32, scene, |task, workspace, counts| {
        let token = token.to_owned();
        async move {
            let mut held = Vec::new();
            for turn in task.. {
                let opened = open(workspace.pool(turn).address(), path, &token).await;
                counts.count(opened.is_ok()).await;
                held.extend(opened);
                if held.len() >= HELD {
                    held.clear();
                }
            }
        }
    });
}

async fn open(address: &str, path: &str, token: &str) -> Result<WebSocketStream<TcpStream>> {
    let tcp = TcpStream::connect(address).await?;
    let url = format!("ws://{address}{path}?token={token}");
    Ok(tokio_tungstenite::client_async(url, tcp).await?.0)
}

/// Frames of nodes. Answers to control frames are counted, and refused heartbeats: others have no answer.
pub(super) async fn frames(scene: &Scene) -> Result<Attack> {
    let created = (0..FRAME_NODES).map(|number| async move {
        let name = format!("frames-{number}");
        scene.workspace.broker_node(&name).await
    });
    let nodes: Vec<NodeAccess> = stream::iter(created).buffered(CONCURRENT_SETUP).try_collect().await?;
    let mut attack = Attack::new();
    attack.spawn(nodes.len(), scene, |number, workspace, counts| {
        send_without_end(number, workspace, nodes[number].clone(), counts)
    });
    Ok(attack)
}

async fn send_without_end(number: usize, workspace: Workspace, node: NodeAccess, counts: Arc<Counts>) {
    for turn in number.. {
        let address = workspace.pool(turn).address();
        let ended = async { ControlSocket::open(address, &node, Arc::clone(&counts)).await?.send_all(&node).await };
        if ended.await.is_err() {
            counts.count(false).await;
        }
    }
}

/// Registered socket of a broker.
struct ControlSocket {
    stream: WebSocketStream<TcpStream>,
    counts: Arc<Counts>,
}

impl ControlSocket {
    async fn open(address: &str, node: &NodeAccess, counts: Arc<Counts>) -> Result<Self> {
        let stream = timeout(REPLY_WITHIN, open(address, "/v1/node/ws", &node.token)).await??;
        let mut socket = Self { stream, counts };
        let register = json!({
            "v": 1, "type": "node.register", "id": "request", "name": node.name, "node_id": node.id,
            "provider": { "name": "broker", "instance_id": node.name }, "capabilities": [], "max_agents": 0, "tags": [],
            "version": "relay-loadtest/1",
        });
        let registered = socket.request(register.to_string()).await?;
        ensure!(registered.is_some(), "the registration was refused");
        Ok(socket)
    }

    /// Sends frames until the gateway closes the socket.
    async fn send_all(&mut self, node: &NodeAccess) -> Result<()> {
        let agent = &node.name;
        let register = json!({ "v": 1, "type": "agent.register", "id": "request", "name": agent }).to_string();
        let registered = self.request(register.clone()).await?.context("the agent was refused")?;
        let id = &registered["agent_id"];
        let unknown = (1..INVENTORY).map(|number| json!({ "agent_id": number.to_string(), "name": "unknown" }));
        let agents: Vec<Value> = unknown.chain([json!({ "agent_id": id, "name": agent })]).collect();
        let inventory = json!({ "v": 1, "type": "inventory.sync", "id": "request", "agents": agents });
        let deregister = json!({ "v": 1, "type": "agent.deregister", "id": "request", "agent_id": id });
        let heartbeats = ["one", "two"].map(|variant| heartbeat(node, variant));
        // Built once: the generator shares its cores with the engine.
        let requests = [inventory.to_string(), deregister.to_string(), register];
        for request in requests.iter().cycle() {
            for heartbeat in &heartbeats {
                self.stream.feed(Message::text(heartbeat.clone())).await?;
            }
            self.request(request.clone()).await?;
        }
        Ok(())
    }

    /// Sends a request and returns the data of its reply; `None` if it was refused.
    async fn request(&mut self, frame: String) -> Result<Option<Value>> {
        timeout(REPLY_WITHIN, self.exchange(frame)).await.context("no reply")?
    }

    async fn exchange(&mut self, frame: String) -> Result<Option<Value>> {
        self.stream.send(Message::text(frame)).await?;
        loop {
            match self.stream.next().await.context("the socket ended")?? {
                Message::Text(text) => {
                    let mut frame: Value = serde_json::from_str(&text)?;
                    let is_accepted = frame["type"] == "reply";
                    if !is_accepted && frame["type"] != "error" {
                        continue;
                    }
                    self.counts.count(is_accepted).await;
                    if frame["id"] == "request" {
                        return Ok(is_accepted.then(|| frame["data"].take()));
                    }
                }
                Message::Close(frame) => bail!("closed by the gateway: {frame:?}"),
                Message::Binary(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            }
        }
    }
}

/// Returns a heartbeat that renames the node and replaces its actions by those of a variant.
fn heartbeat(node: &NodeAccess, variant: &str) -> String {
    let text = "x".repeat(CAPABILITY_BYTES);
    let capability = |number| {
        let name = format!("{}.{variant}.{number}", node.name);
        json!({ "name": name, "kind": "action", "metadata": { "text": text } })
    };
    let capabilities: Vec<Value> = (0..CAPABILITIES).map(capability).collect();
    let name = format!("{}-{variant}", node.name);
    json!({
        "v": 1, "type": "node.heartbeat", "id": "heartbeat", "load": 0, "active_agents": 1, "handlers_live": false,
        "name": name, "capabilities": capabilities,
    })
    .to_string()
}
