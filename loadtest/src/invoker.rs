//! Nodes that complete invocations at once, and callers that wait for outcomes.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

use crate::api::{NodeAccess, Workspace};
use crate::collector::Collector;
use crate::payload::sent_at;

/// Capacity of every node, the invoked action.
pub(crate) const CAPABILITY: &str = "loadtest.echo";
/// Nodes must send a heartbeat within 45 s.
const HEARTBEAT: Duration = Duration::from_secs(10);
const REPLY_WITHIN: Duration = Duration::from_secs(30);

/// Connected sockets, dropped without a close frame.
pub(crate) struct Sockets {
    _tasks: JoinSet<()>,
}

impl Sockets {
    /// Connects nodes that answer each invocation with its own input. `asked` counts the frames.
    pub(crate) async fn handlers(workspace: &Workspace, count: usize, asked: &Arc<Collector>) -> Result<Self> {
        let mut tasks = JoinSet::new();
        for number in 0..count {
            let access = workspace.broker_node(&format!("handler-{number}")).await?;
            let register = json!({
                "v": 1, "type": "node.register", "id": "register", "name": access.name, "node_id": access.id,
                "provider": { "name": "broker", "instance_id": format!("handler-{number}") },
                "capabilities": [{ "name": CAPABILITY, "kind": "capacity" }], "max_agents": 0, "tags": [],
                "version": "relay-loadtest/1", "resume_cursor": null,
            });
            let stream = open(workspace.pool(number).address(), &access, &register).await?;
            let asked = Arc::clone(asked);
            tasks.spawn(async move {
                let why = run(stream, &access.id, |frame| {
                    let id = frame["invocation_id"].as_str()?;
                    asked.delivered(frame["input"]["text"].as_str().and_then(sent_at));
                    let output = json!({ "text": frame["input"]["text"] });
                    Some(json!({ "v": 1, "type": "action.result", "invocation_id": id, "output": output }).to_string())
                });
                let Err(why) = why.await else { return };
                asked.closed(|| format!("socket of {}: {why:#}", access.name));
            });
        }
        Ok(Self { _tasks: tasks })
    }

    /// Connects the direct nodes of the callers. `reported` counts the outcomes.
    pub(crate) async fn callers(
        workspace: &Workspace,
        nodes: Vec<NodeAccess>,
        reported: &Arc<Collector>,
    ) -> Result<Self> {
        let mut tasks = JoinSet::new();
        for (number, access) in nodes.into_iter().enumerate() {
            let register = json!({
                "v": 1, "type": "node.register", "id": "register", "name": access.name, "node_id": access.id,
                "capabilities": [], "max_agents": 1, "tags": ["implicit", "direct", "sdk"],
                "version": "relay-loadtest/1",
            });
            let stream = open(workspace.pool(number).address(), &access, &register).await?;
            let reported = Arc::clone(reported);
            tasks.spawn(async move {
                let why = run(stream, &access.id, |frame| {
                    match frame["payload"]["type"].as_str() {
                        Some("action.completed") => {
                            reported.delivered(frame["payload"]["data"]["output"]["text"].as_str().and_then(sent_at));
                        }
                        Some("action.failed") => reported.out_of_order(|| format!("{frame}")),
                        _ => {}
                    }
                    None
                });
                let Err(why) = why.await else { return };
                reported.closed(|| format!("socket of {}: {why:#}", access.name));
            });
        }
        Ok(Self { _tasks: tasks })
    }
}

/// Connects and registers a node.
async fn open(address: &str, access: &NodeAccess, register: &Value) -> Result<WebSocketStream<TcpStream>> {
    let tcp = TcpStream::connect(address).await?;
    tcp.set_nodelay(true)?;
    let url = format!("ws://{address}/v1/node/ws?token={}", access.token);
    let upgraded = timeout(REPLY_WITHIN, tokio_tungstenite::client_async(url, tcp)).await;
    let (mut stream, _) = upgraded.context("no answer to the upgrade")?.context("upgrade")?;
    stream.send(Message::text(register.to_string())).await?;
    let replied = async {
        while let Some(message) = stream.next().await {
            if let Message::Text(text) = message? {
                let frame: Value = serde_json::from_str(&text)?;
                ensure!(frame["type"] != "error", "the gateway answered {frame}");
                if frame["id"] == "register" {
                    return Ok(());
                }
            }
        }
        bail!("the socket ended")
    };
    timeout(REPLY_WITHIN, replied).await.context("no reply to register")??;
    Ok(stream)
}

/// Passes each frame to `take` and sends the returned frames until the peer closes.
async fn run(
    mut stream: WebSocketStream<TcpStream>,
    node_id: &str,
    mut take: impl FnMut(&Value) -> Option<String>,
) -> Result<()> {
    let beat = json!({
        "v": 1, "type": "node.heartbeat", "node_id": node_id, "load": 0, "active_agents": 0, "handlers_live": true,
    });
    let mut heartbeat = interval(HEARTBEAT);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            message = stream.next() => match message.context("the socket ended")?? {
                Message::Text(text) => {
                    if let Some(answer) = take(&serde_json::from_str(&text)?) {
                        stream.send(Message::text(answer)).await?;
                    }
                }
                Message::Close(frame) => bail!("closed by the gateway: {frame:?}"),
                Message::Binary(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            },
            _ = heartbeat.tick() => stream.send(Message::text(beat.to_string())).await?,
        }
    }
}
