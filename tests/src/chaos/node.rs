//! A node that comes back: a broker with several agents, or an agent's own node.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use relay_testkit::client::{Agent, Api, NodeSocket};
use serde_json::Value;
use tokio::{sync::watch, task::JoinHandle};

use super::{
    below,
    ledger::{Ledger, Line},
};

/// How long a node waits before it dials again.
const DIAL_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// Acks that were left out are made up for this often.
const ACK_EVERY: Duration = Duration::from_millis(200);
const HEARTBEAT_EVERY: Duration = Duration::from_secs(5);

/// How the node behaves, changeable at any time.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    /// Whether it reads its socket.
    pub reads: bool,
    /// Whether it acknowledges.
    pub acks: bool,
    /// Whether it dials again, at the next gateway, after its connection ended.
    pub returns: bool,
}

#[derive(Debug)]
enum Kind {
    Direct,
    Broker(Vec<(String, String)>),
}

#[derive(Debug)]
struct Plan {
    name: String,
    node_id: String,
    token: String,
    kind: Kind,
    /// WebSocket bases; the first is dialled first, the next one after each end.
    gateways: Vec<String>,
}

/// A node at work. It ends when this is dropped.
#[derive(Debug)]
pub struct Node {
    name: String,
    manner: watch::Sender<Manner>,
    task: JoinHandle<()>,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Node {
    /// Brings up a broker node that hosts these agents, created by `agent.register`. `workspace` holds the
    /// workspace key; `gateways` are HTTP bases, home first.
    pub async fn broker(
        workspace: &Api,
        name: &str,
        agents: &[String],
        gateways: &[&str],
        ledger: &Arc<Ledger>,
    ) -> Result<(Self, Vec<Agent>)> {
        let node = workspace.create_broker_node(&format!("node-{name}"), name).await?;
        let gateways = ws_bases(gateways);
        let mut socket = NodeSocket::connect_with_header(&gateways[0], &node.token).await?;
        socket.register_broker(&node.node_id, name, &instance()).await?;
        let mut hosted = Vec::new();
        for agent in agents {
            let data = socket.register_agent(agent).await?;
            let text = |field: &str| data[field].as_str().map(str::to_owned).context("agent.register reply");
            hosted.push(Agent { id: text("agent_id")?, name: agent.clone(), token: text("token")? });
        }
        let kind = Kind::Broker(hosted.iter().map(|agent| (agent.id.clone(), agent.name.clone())).collect());
        let plan = Plan { name: name.to_owned(), node_id: node.node_id, token: node.token, kind, gateways };
        Ok((Self::start(plan, socket, ledger), hosted))
    }

    /// Enrols a broker node, moves these agents to it by REST and brings it up: it lists them as running.
    pub async fn taking(
        workspace: &Api,
        name: &str,
        agents: &[Agent],
        gateways: &[&str],
        ledger: &Arc<Ledger>,
    ) -> Result<Self> {
        let node = workspace.create_broker_node(&format!("node-{name}"), name).await?;
        for agent in agents {
            workspace.bind(name, &agent.name).await?;
        }
        let plan = Plan {
            name: name.to_owned(),
            node_id: node.node_id,
            token: node.token,
            kind: Kind::Broker(agents.iter().map(|agent| (agent.id.clone(), agent.name.clone())).collect()),
            gateways: ws_bases(gateways),
        };
        let socket = open(&plan, 0).await?;
        Ok(Self::start(plan, socket, ledger))
    }

    /// Brings up an agent's own node.
    pub async fn direct(workspace: &Api, agent: &Agent, gateways: &[&str], ledger: &Arc<Ledger>) -> Result<Self> {
        let node = workspace.as_agent(agent).direct_node_token().await?;
        let plan = Plan {
            name: node.name.clone(),
            node_id: node.node_id,
            token: node.token,
            kind: Kind::Direct,
            gateways: ws_bases(gateways),
        };
        let socket = open(&plan, 0).await?;
        Ok(Self::start(plan, socket, ledger))
    }

    fn start(plan: Plan, socket: NodeSocket, ledger: &Arc<Ledger>) -> Self {
        let name = plan.name.clone();
        let (manner, watched) = watch::channel(Manner { reads: true, acks: true, returns: true });
        ledger.registered(&name);
        let task = tokio::spawn(live(plan, socket, Arc::clone(ledger), watched));
        Self { name, manner, task }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Changes its manner.
    pub fn behave(&self, change: impl FnOnce(&mut Manner)) {
        self.manner.send_modify(change);
    }
}

/// A broker names a new instance with each connection.
fn instance() -> String {
    uuid::Uuid::new_v4().to_string()
}

fn ws_bases(gateways: &[&str]) -> Vec<String> {
    gateways.iter().map(|base| base.replacen("http", "ws", 1)).collect()
}

async fn live(plan: Plan, first: NodeSocket, ledger: Arc<Ledger>, mut manner: watch::Receiver<Manner>) {
    let mut socket = first;
    let mut turn = 0;
    loop {
        let code = serve(&plan, &mut socket, &ledger, &mut manner).await;
        drop(socket);
        ledger.ended(&plan.name, code);
        socket = loop {
            if manner.wait_for(|manner| manner.returns).await.is_err() {
                return;
            }
            turn += 1;
            match open(&plan, turn).await {
                Ok(socket) => break socket,
                Err(error) => ledger.refused(&plan.name, &format!("{error:#}")),
            }
            tokio::time::sleep(DIAL_AGAIN_AFTER).await;
        };
        ledger.registered(&plan.name);
    }
}

async fn open(plan: &Plan, turn: usize) -> Result<NodeSocket> {
    let gateway = &plan.gateways[turn % plan.gateways.len()];
    let within = Duration::from_secs(20);
    let opened = tokio::time::timeout(within, async {
        let mut socket = NodeSocket::connect_with_header(gateway, &plan.token).await?;
        match &plan.kind {
            Kind::Direct => {
                socket.register_direct(&plan.node_id, &plan.name).await?;
            }
            Kind::Broker(agents) => {
                socket.register_broker(&plan.node_id, &plan.name, &instance()).await?;
                let agents: Vec<_> = agents.iter().map(|(id, name)| (id.as_str(), name.as_str())).collect();
                socket.inventory(&agents).await?;
            }
        }
        anyhow::Ok(socket)
    });
    match opened.await {
        Ok(opened) => opened,
        Err(_) => bail!("not registered within {within:?}"),
    }
}

/// Serves a connection until it ends; returns the close code.
async fn serve(
    plan: &Plan,
    socket: &mut NodeSocket,
    ledger: &Ledger,
    manner: &mut watch::Receiver<Manner>,
) -> Option<u16> {
    let mut line = Line::default();
    let mut unacked: HashMap<String, u64> = HashMap::new();
    let (mut acked_at, mut beat_at) = (Instant::now(), Instant::now());
    loop {
        let now = *manner.borrow_and_update();
        socket.set_reading(now.reads);
        match socket.next_frame(ACK_EVERY).await {
            Ok(frame) if frame["type"] == "deliver" => {
                if let Some((agent, position)) = take(&frame, socket, ledger, &mut line).await {
                    // Acks are cumulative: a node may leave some out.
                    // Its manner may have changed while it waited for this frame.
                    let acks = manner.borrow().acks;
                    if acks && below(4) > 0 {
                        unacked.remove(&agent);
                        let _ = socket.ack(&agent, position).await;
                    } else {
                        unacked.insert(agent, position);
                    }
                }
            }
            Ok(frame) if frame["type"] == "context.update" => ledger.noticed(frame),
            Ok(_) => {}
            Err(_) => {
                if let Ok(code) = socket.closed(Duration::ZERO).await {
                    return code;
                }
            }
        }
        if manner.borrow().acks && acked_at.elapsed() > ACK_EVERY {
            acked_at = Instant::now();
            for (agent, position) in unacked.drain() {
                let _ = socket.ack(&agent, position).await;
            }
        }
        if now.reads && beat_at.elapsed() > HEARTBEAT_EVERY {
            beat_at = Instant::now();
            let _ = socket.heartbeat(&plan.node_id).await;
        }
    }
}

/// Takes in a delivery; a question for a position (seq 0) is answered at once.
async fn take(frame: &Value, socket: &NodeSocket, ledger: &Ledger, line: &mut Line) -> Option<(String, u64)> {
    let agent = frame["agent"].as_str()?.to_owned();
    if frame["seq"] == 0 {
        let _ = socket.ack(&agent, ledger.position(&agent)).await;
        return None;
    }
    let position = ledger.received(&agent, frame, line);
    Some((agent, position))
}
