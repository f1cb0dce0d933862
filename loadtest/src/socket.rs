//! Node sockets as used by SDK clients (one agent, every frame acked) and brokers (many agents, cumulative acks).

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::{FutureExt, SinkExt, StreamExt};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;

use crate::api::{Agent, NodeAccess};
use crate::collector::Collector;
use crate::inbox::{Acks, Inbox, Received, ack_frame};

/// Nodes must send a heartbeat within 45 s.
const HEARTBEAT: Duration = Duration::from_secs(15);
const REPLY_WITHIN: Duration = Duration::from_secs(30);
/// A broker acks at the latest after this many frames; sooner when no frame is waiting.
const ACK_AFTER: usize = 64;

/// Specification of one socket.
#[derive(Clone, Debug)]
pub(crate) struct NodeSpec {
    pub(crate) access: NodeAccess,
    /// `true` for a broker with an inventory, `false` for the direct node of one agent.
    pub(crate) broker: bool,
    /// Names of the hosted agents.
    pub(crate) agents: Vec<Agent>,
    pub(crate) acks: Acks,
    /// Seq at which an agent has caught up.
    pub(crate) goal: Option<u64>,
    /// Seqs received on all connections of a reconnecting node.
    pub(crate) received: Option<Received>,
}

/// Registered socket.
pub(crate) struct NodeSocket {
    stream: WebSocketStream<TcpStream>,
    inbox: Inbox,
    next_heartbeat: Instant,
}

impl NodeSocket {
    /// Connects and registers a node.
    pub(crate) async fn open(address: &str, spec: &NodeSpec, collector: Arc<Collector>) -> Result<Self> {
        let tcp = TcpStream::connect(address).await?;
        tcp.set_nodelay(true)?;
        let url = format!("ws://{address}/v1/node/ws?token={}", spec.access.token);
        // Small buffers: thousands of sockets live in one process.
        let config = WebSocketConfig::default().read_buffer_size(8 * 1024).write_buffer_size(4 * 1024);
        let (stream, _) = timeout(REPLY_WITHIN, tokio_tungstenite::client_async_with_config(url, tcp, Some(config)))
            .await
            .context("no answer to the upgrade")?
            .context("upgrade")?;
        let inbox = Inbox::new(collector, spec.acks, spec.goal).remembering(spec.received.clone());
        let mut socket = Self { stream, inbox, next_heartbeat: Instant::now() + HEARTBEAT };
        socket.request("register", register_frame(spec)).await?;
        if spec.broker {
            let agents: Vec<_> =
                spec.agents.iter().map(|agent| json!({"agent_id": agent.id, "name": agent.name})).collect();
            let frame = json!({"v": 1, "type": "inventory.sync", "id": "inventory", "agents": agents});
            socket.request("inventory", frame.to_string()).await?;
        }
        Ok(socket)
    }

    /// Receives and acks until the peer closes; returns the reason.
    pub(crate) async fn run(mut self, node_id: &str) -> anyhow::Error {
        match self.receive(node_id).await {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    async fn receive(&mut self, node_id: &str) -> Result<std::convert::Infallible> {
        let beat = json!({"v": 1, "type": "node.heartbeat", "node_id": node_id, "load": 0, "active_agents": 1, "handlers_live": false});
        let beat = beat.to_string();
        let mut heartbeat = interval_at(self.next_heartbeat, HEARTBEAT);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let message = match self.stream.next().now_or_never() {
                Some(message) => message,
                None => {
                    self.send_acks().await?;
                    self.stream.flush().await?;
                    tokio::select! {
                        message = self.stream.next() => message,
                        _ = heartbeat.tick() => {
                            self.stream.send(Message::text(beat.clone())).await?;
                            continue;
                        }
                    }
                }
            };
            self.take(message).await?;
            if self.inbox.unacked.len() >= ACK_AFTER {
                self.send_acks().await?;
            }
        }
    }

    /// Sends a frame and waits for its reply.
    async fn request(&mut self, id: &str, frame: String) -> Result<()> {
        self.stream.send(Message::text(frame)).await?;
        let replied = async {
            while !self.inbox.has_reply(id) {
                let message = self.stream.next().await;
                self.take(message).await?;
            }
            Ok::<_, anyhow::Error>(())
        };
        timeout(REPLY_WITHIN, replied).await.with_context(|| format!("no reply to {id}"))?
    }

    async fn take(&mut self, message: Option<Result<Message, tokio_tungstenite::tungstenite::Error>>) -> Result<()> {
        match message.context("the socket ended")?? {
            Message::Text(text) => {
                if let Some(ack) = self.inbox.frame(&text)? {
                    self.stream.feed(Message::text(ack)).await?;
                }
            }
            Message::Close(frame) => bail!("closed by the gateway: {frame:?}"),
            // Pongs are queued by the library and leave with the next flush.
            Message::Binary(_) | Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
        }
        Ok(())
    }

    async fn send_acks(&mut self) -> Result<()> {
        for (agent, seq) in self.inbox.unacked.drain() {
            self.stream.feed(Message::text(ack_frame(&agent, seq))).await?;
        }
        Ok(())
    }
}

fn register_frame(spec: &NodeSpec) -> String {
    let mut frame = json!({
        "v": 1, "type": "node.register", "id": "register",
        "name": spec.access.name, "node_id": spec.access.id,
        "version": "relay-loadtest/1", "resume_cursor": null,
    });
    if spec.broker {
        // Brokers use a new instance id for each connection.
        frame["provider"] = json!({"name": "broker", "instance_id": uuid::Uuid::new_v4().to_string()});
        frame["capabilities"] = json!([{"name": "relay:delivery-cursor-v1", "kind": "capacity"}]);
        frame["max_agents"] = json!(0);
        frame["tags"] = json!([]);
    } else {
        frame["capabilities"] = json!([]);
        frame["max_agents"] = json!(1);
        frame["tags"] = json!(["implicit", "direct", "sdk"]);
    }
    frame.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inbox::tests::deliver;

    /// Answers a registration, sends `seqs` to ada, and returns every text frame received until the acks have arrived.
    async fn gateway(listener: tokio::net::TcpListener, seqs: Vec<u64>, acks: usize) -> Vec<serde_json::Value> {
        let (tcp, _) = listener.accept().await.unwrap();
        let mut socket = tokio_tungstenite::accept_async(tcp).await.unwrap();
        let mut frames = Vec::new();
        loop {
            let Message::Text(text) = socket.next().await.unwrap().unwrap() else {
                continue;
            };
            let frame: serde_json::Value = serde_json::from_str(&text).unwrap();
            let kind = frame["type"].as_str().unwrap().to_owned();
            if let Some(id) = frame["id"].as_str() {
                let reply = json!({"v": 1, "id": id, "type": "reply", "ok": true, "data": {}});
                socket.send(Message::text(reply.to_string())).await.unwrap();
            }
            let ready = frames.is_empty() && kind == "node.register";
            frames.push(frame);
            if ready {
                for seq in &seqs {
                    socket.feed(Message::text(deliver("ada", *seq))).await.unwrap();
                }
                socket.flush().await.unwrap();
            }
            if frames.iter().filter(|frame| frame["type"] == "delivery.ack").count() >= acks {
                socket.close(None).await.unwrap();
                return frames;
            }
        }
    }

    async fn serve(broker: bool, acks: Acks, expected_acks: usize) -> (Vec<serde_json::Value>, Arc<Collector>) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let other = tokio::spawn(gateway(listener, vec![1, 2, 3], expected_acks));
        let access = NodeAccess { id: "n1".into(), name: "box".into(), token: "nt_live_x".into() };
        let agents = vec![Agent { id: "a1".into(), name: "ada".into(), token: String::new() }];
        let spec = NodeSpec { access, broker, agents, acks, goal: Some(3), received: None };
        let collector = Arc::new(Collector::default());
        let socket = NodeSocket::open(&address, &spec, Arc::clone(&collector)).await.unwrap();
        let why = socket.run("n1").await;
        assert!(why.to_string().contains("closed by the gateway"), "{why:#}");
        (other.await.unwrap(), collector)
    }

    #[tokio::test]
    async fn a_direct_node_registers_receives_and_acks_each() {
        let (frames, collector) = serve(false, Acks::Each, 3).await;
        assert_eq!(frames[0]["node_id"], "n1");
        assert_eq!(frames[0]["provider"], serde_json::Value::Null);
        let acked: Vec<_> = frames[1..].iter().map(|frame| frame["up_to_seq"].as_u64().unwrap()).collect();
        assert_eq!(acked, [1, 2, 3]);
        assert_eq!((collector.delivered_count(), collector.caught_up_count()), (3, 1));
    }

    #[tokio::test]
    async fn a_broker_lists_its_agents_and_acks_the_last() {
        let (frames, collector) = serve(true, Acks::Cumulative, 1).await;
        assert_eq!(frames[0]["capabilities"][0]["name"], "relay:delivery-cursor-v1");
        assert_eq!(frames[1]["agents"][0], json!({"agent_id": "a1", "name": "ada"}));
        assert_eq!(frames[2]["up_to_seq"], 3);
        assert_eq!(collector.delivered_count(), 3);
    }
}
