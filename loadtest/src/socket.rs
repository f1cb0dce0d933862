//! A node's socket as SDK clients (one agent, every frame acked) and brokers (many agents, cumulative acks) use it.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::{FutureExt, SinkExt, StreamExt};
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::net::TcpStream;
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;

use crate::api::{Agent, NodeAccess};
use crate::collector::Collector;
use crate::payload::sent_at;

/// A node must be told apart from a dead one within 45 s.
const HEARTBEAT: Duration = Duration::from_secs(15);
const REPLY_WITHIN: Duration = Duration::from_secs(30);
/// A broker acks at the latest after this many frames; sooner when nothing more is waiting.
const ACK_AFTER: usize = 64;

/// When frames are acked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acks {
    /// One ack for each frame, as SDK clients do.
    Each,
    /// The highest seq of each agent, once no frame is waiting, as a broker may do.
    Cumulative,
    /// Never.
    Withheld,
}

/// What one socket stands for.
#[derive(Clone, Debug)]
pub(crate) struct NodeSpec {
    pub(crate) access: NodeAccess,
    /// Whether it registers as a broker and lists its agents, rather than as the direct node of one agent.
    pub(crate) broker: bool,
    /// The agents it hosts.
    pub(crate) agents: Vec<Agent>,
    pub(crate) acks: Acks,
    /// An agent that has received this seq has caught up.
    pub(crate) goal: Option<u64>,
}

/// A registered socket that receives.
pub(crate) struct NodeSocket {
    stream: WebSocketStream<TcpStream>,
    inbox: Inbox,
    next_heartbeat: Instant,
}

impl NodeSocket {
    /// Connects and registers; returns when frames may come.
    pub(crate) async fn open(
        address: &str,
        spec: &NodeSpec,
        collector: Arc<Collector>,
    ) -> Result<Self> {
        let tcp = TcpStream::connect(address).await?;
        tcp.set_nodelay(true)?;
        let url = format!("ws://{address}/v1/node/ws?token={}", spec.access.token);
        // Small buffers: thousands of these live in one process.
        let config = WebSocketConfig::default()
            .read_buffer_size(8 * 1024)
            .write_buffer_size(4 * 1024);
        let (stream, _) = timeout(
            REPLY_WITHIN,
            tokio_tungstenite::client_async_with_config(url, tcp, Some(config)),
        )
        .await
        .context("no answer to the upgrade")?
        .context("upgrade")?;
        let inbox = Inbox {
            collector,
            seqs: HashMap::new(),
            acks: spec.acks,
            goal: spec.goal,
            unacked: HashMap::new(),
            pending_replies: Vec::new(),
        };
        let mut socket = Self {
            stream,
            inbox,
            next_heartbeat: Instant::now() + HEARTBEAT,
        };
        socket.request("register", register_frame(spec)).await?;
        if spec.broker {
            let agents: Vec<_> = spec
                .agents
                .iter()
                .map(|agent| json!({"agent_id": agent.id, "name": agent.name}))
                .collect();
            let frame =
                json!({"v": 1, "type": "inventory.sync", "id": "inventory", "agents": agents});
            socket.request("inventory", frame.to_string()).await?;
        }
        Ok(socket)
    }

    /// Receives and acks until the other side ends it; then says why.
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

    /// Sends a frame and waits for the reply to it.
    async fn request(&mut self, id: &str, frame: String) -> Result<()> {
        self.stream.send(Message::text(frame)).await?;
        let replied = async {
            while !self.inbox.pending_replies.iter().any(|reply| reply == id) {
                let message = self.stream.next().await;
                self.take(message).await?;
            }
            Ok::<_, anyhow::Error>(())
        };
        timeout(REPLY_WITHIN, replied)
            .await
            .with_context(|| format!("no reply to {id}"))?
    }

    async fn take(
        &mut self,
        message: Option<Result<Message, tokio_tungstenite::tungstenite::Error>>,
    ) -> Result<()> {
        match message.context("the socket ended")?? {
            Message::Text(text) => {
                if let Some(ack) = self.inbox.frame(&text)? {
                    self.stream.feed(Message::text(ack)).await?;
                }
            }
            Message::Close(frame) => bail!("closed by the gateway: {frame:?}"),
            // Pongs are queued by the library and leave with the next flush.
            _ => {}
        }
        Ok(())
    }

    async fn send_acks(&mut self) -> Result<()> {
        for (agent, seq) in self.inbox.unacked.drain() {
            self.stream
                .feed(Message::text(ack_frame(&agent, seq)))
                .await?;
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct Frame<'a> {
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
    #[serde(borrow)]
    id: Option<Cow<'a, str>>,
    #[serde(borrow)]
    agent: Option<Cow<'a, str>>,
    seq: Option<u64>,
    #[serde(borrow)]
    payload: Option<&'a RawValue>,
}

/// What one connection has received.
struct Inbox {
    collector: Arc<Collector>,
    /// Highest seq by agent name, on this connection.
    seqs: HashMap<String, u64>,
    acks: Acks,
    goal: Option<u64>,
    unacked: HashMap<String, u64>,
    pending_replies: Vec<String>,
}

impl Inbox {
    /// Takes a frame; the answer is an ack to send at once.
    fn frame(&mut self, text: &str) -> Result<Option<String>> {
        let frame: Frame<'_> =
            serde_json::from_str(text).with_context(|| format!("unreadable frame {text}"))?;
        match &*frame.kind {
            "deliver" => {
                let agent = frame.agent.as_deref().context("deliver without an agent")?;
                let seq = frame.seq.context("deliver without a seq")?;
                let payload = frame.payload.context("deliver without a payload")?.get();
                Ok(self.deliver(agent, seq, payload))
            }
            "reply" => {
                self.pending_replies.extend(frame.id.map(Cow::into_owned));
                Ok(None)
            }
            "error" => bail!("the gateway answered {text}"),
            _ => Ok(None),
        }
    }

    fn deliver(&mut self, agent: &str, seq: u64, payload: &str) -> Option<String> {
        if seq == 0 {
            return None;
        }
        let last = match self.seqs.get_mut(agent) {
            Some(last) => last,
            None => self.seqs.entry(agent.to_owned()).or_insert(seq - 1),
        };
        let before = *last;
        if seq <= before {
            self.collector.duplicate();
            return None;
        }
        *last = seq;
        if seq != before + 1 {
            self.collector
                .out_of_order(|| format!("{agent} got seq {seq} after {before}"));
        }
        self.collector.delivered(sent_at(payload));
        if self.goal.is_some_and(|goal| before < goal && goal <= seq) {
            self.collector.caught_up();
        }
        match self.acks {
            Acks::Each => Some(ack_frame(agent, seq)),
            Acks::Withheld => None,
            Acks::Cumulative => {
                match self.unacked.get_mut(agent) {
                    Some(up_to) => *up_to = seq,
                    None => _ = self.unacked.insert(agent.to_owned(), seq),
                }
                None
            }
        }
    }
}

fn ack_frame(agent: &str, seq: u64) -> String {
    // Our agents' names need no escaping.
    format!(r#"{{"v":1,"type":"delivery.ack","agent":"{agent}","up_to_seq":{seq}}}"#)
}

fn register_frame(spec: &NodeSpec) -> String {
    let mut frame = json!({
        "v": 1, "type": "node.register", "id": "register",
        "name": spec.access.name, "node_id": spec.access.id,
        "version": "relay-loadtest/1", "resume_cursor": null,
    });
    if spec.broker {
        // Brokers name a fresh instance at each connection.
        frame["provider"] =
            json!({"name": "broker", "instance_id": uuid::Uuid::new_v4().to_string()});
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

    fn inbox(acks: Acks, goal: Option<u64>) -> Inbox {
        Inbox {
            collector: Arc::default(),
            seqs: HashMap::new(),
            acks,
            goal,
            unacked: HashMap::new(),
            pending_replies: Vec::new(),
        }
    }

    fn deliver(agent: &str, seq: u64) -> String {
        json!({"v": 1, "type": "deliver", "delivery_id": "del_1_2", "agent_id": "2", "agent": agent, "msg_id": "1", "seq": seq,
            "mode": "wait", "payload": {"type": "dm.received", "data": {"text": "lt1:1 \"quoted\""}}})
        .to_string()
    }

    #[test]
    fn a_direct_node_acks_each_frame_once() {
        let mut inbox = inbox(Acks::Each, Some(5));
        let ack = inbox.frame(&deliver("ada", 4)).unwrap();
        assert_eq!(
            ack.as_deref(),
            Some(r#"{"v":1,"type":"delivery.ack","agent":"ada","up_to_seq":4}"#)
        );
        assert_eq!(inbox.frame(&deliver("ada", 4)).unwrap(), None);
        assert_eq!(inbox.collector.caught_up_count(), 0);
        assert!(inbox.frame(&deliver("ada", 5)).unwrap().is_some());
        assert_eq!(inbox.collector.caught_up_count(), 1);
        assert_eq!(inbox.collector.delivered_count(), 2);
        assert_eq!(inbox.collector.problems(), ["1 duplicate frames"]);
        assert_eq!(inbox.collector.take_samples().len(), 2);
    }

    #[test]
    fn a_broker_acks_the_highest_of_each_agent() {
        let mut inbox = inbox(Acks::Cumulative, None);
        for (agent, seq) in [("ada", 1), ("bob", 1), ("ada", 2), ("bob", 3)] {
            assert_eq!(inbox.frame(&deliver(agent, seq)).unwrap(), None);
        }
        assert_eq!(
            inbox.unacked,
            HashMap::from([("ada".into(), 2), ("bob".into(), 3)])
        );
        assert_eq!(
            inbox.collector.problems(),
            ["1 frames out of order", "first: bob got seq 3 after 1"]
        );
    }

    #[test]
    fn replies_are_kept_errors_end_it_and_the_rest_is_ignored() {
        let mut inbox = inbox(Acks::Each, None);
        inbox
            .frame(r#"{"v":1,"id":"register","type":"reply","ok":true,"data":null}"#)
            .unwrap();
        assert_eq!(inbox.pending_replies, ["register"]);
        let update = r#"{"v":1,"type":"context.update","topic":"agent","event":"delivery.accepted","data":{}}"#;
        assert_eq!(inbox.frame(update).unwrap(), None);
        assert!(
            inbox
                .frame(r#"{"v":1,"id":"x","type":"error","ok":false,"code":"c","message":"m"}"#)
                .is_err()
        );
        assert!(inbox.frame("{").is_err());
    }
}
