//! Node that reconnects: a broker with several agents, or an agent's direct node.

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
    ledger::{ConnectionLedger, Ledger},
    random_below,
};

/// Delay before a reconnect.
const RECONNECT_DELAY: Duration = Duration::from_millis(100);
/// Interval at which withheld acks are sent.
const ACK_INTERVAL: Duration = Duration::from_millis(200);
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);

/// Behaviour of a node, changeable at any time.
#[derive(Clone, Copy, Debug)]
pub struct NodeBehaviour {
    /// `true` if it reads its socket.
    pub reads: bool,
    /// `true` if it acknowledges frames.
    pub acks: bool,
    /// `true` if it reconnects to the next gateway after its connection ends.
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
    /// WebSocket base URLs, in the order of connection attempts.
    gateways: Vec<String>,
}

/// Running node, stopped when dropped.
#[derive(Debug)]
pub struct Node {
    name: String,
    manner: watch::Sender<NodeBehaviour>,
    task: JoinHandle<()>,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Node {
    /// Starts a broker node that creates these agents with `agent.register`. `workspace` holds the workspace key;
    /// `gateways` are HTTP base URLs, home gateway first.
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

    /// Enrols a broker node, binds these agents to it over REST and starts it: it lists them as running.
    pub async fn broker_for_existing(
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

    /// Starts the direct node of an agent.
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
        let (manner, watched) = watch::channel(NodeBehaviour { reads: true, acks: true, returns: true });
        ledger.record_registration(&name);
        let task = tokio::spawn(run(plan, socket, Arc::clone(ledger), watched));
        Self { name, manner, task }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Changes the behaviour.
    pub fn change_behaviour(&self, change: impl FnOnce(&mut NodeBehaviour)) {
        self.manner.send_modify(change);
    }
}

/// Brokers use a new instance id for each connection.
fn instance() -> String {
    uuid::Uuid::new_v4().to_string()
}

fn ws_bases(gateways: &[&str]) -> Vec<String> {
    gateways.iter().map(|base| base.replacen("http", "ws", 1)).collect()
}

async fn run(plan: Plan, first: NodeSocket, ledger: Arc<Ledger>, mut manner: watch::Receiver<NodeBehaviour>) {
    let mut socket = first;
    let mut turn = 0;
    loop {
        let code = serve(&plan, &mut socket, &ledger, &mut manner).await;
        drop(socket);
        ledger.record_end(&plan.name, code);
        socket = loop {
            if manner.wait_for(|manner| manner.returns).await.is_err() {
                return;
            }
            turn += 1;
            match open(&plan, turn).await {
                Ok(socket) => break socket,
                Err(error) => ledger.record_refusal(&plan.name, &format!("{error:#}")),
            }
            tokio::time::sleep(RECONNECT_DELAY).await;
        };
        ledger.record_registration(&plan.name);
    }
}

async fn open(plan: &Plan, turn: usize) -> Result<NodeSocket> {
    let gateway = &plan.gateways[turn % plan.gateways.len()];
    let within = Duration::from_secs(20);
    let opened = tokio::time::timeout(within, async {
        let mut socket = NodeSocket::connect_with_header(gateway, &plan.token).await?;
        socket.drop_presence();
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
    manner: &mut watch::Receiver<NodeBehaviour>,
) -> Option<u16> {
    let mut line = ConnectionLedger::default();
    let mut unacked: HashMap<String, u64> = HashMap::new();
    let (mut acked_at, mut beat_at) = (Instant::now(), Instant::now());
    loop {
        let now = *manner.borrow_and_update();
        socket.set_reading(now.reads);
        // Tests run thousands of nodes, most of which have nothing to ack.
        let wait = if unacked.is_empty() { HEARTBEAT_INTERVAL } else { ACK_INTERVAL };
        let next = tokio::select! {
            next = socket.next_frame(wait) => next,
            Ok(()) = manner.changed() => continue,
        };
        match next {
            Ok(frame) if frame["type"] == "deliver" => {
                if let Some((agent, position)) = handle_delivery(&frame, socket, ledger, &mut line).await {
                    // Acks are cumulative, so a node may skip some. The behaviour may have changed while it waited for
                    // this frame.
                    let acks = manner.borrow().acks;
                    if acks && random_below(4) > 0 {
                        unacked.remove(&agent);
                        ledger.history().record_ack(&agent, position);
                        let _ = socket.ack(&agent, position).await;
                    } else {
                        unacked.insert(agent, position);
                    }
                }
            }
            Ok(frame) if frame["type"] == "context.update" => ledger.record_notice(frame),
            Ok(_) => {}
            Err(_) => {
                if let Ok(code) = socket.closed(Duration::ZERO).await {
                    return code;
                }
            }
        }
        if manner.borrow().acks && acked_at.elapsed() > ACK_INTERVAL {
            acked_at = Instant::now();
            for (agent, position) in unacked.drain() {
                ledger.history().record_ack(&agent, position);
                let _ = socket.ack(&agent, position).await;
            }
        }
        if now.reads && beat_at.elapsed() > HEARTBEAT_INTERVAL {
            beat_at = Instant::now();
            let _ = socket.heartbeat(&plan.node_id).await;
        }
    }
}

/// Records a delivery; answers a position request (seq 0) at once.
async fn handle_delivery(
    frame: &Value,
    socket: &NodeSocket,
    ledger: &Ledger,
    line: &mut ConnectionLedger,
) -> Option<(String, u64)> {
    let agent = frame["agent"].as_str()?.to_owned();
    if frame["seq"] == 0 {
        let _ = socket.ack(&agent, ledger.position(&agent)).await;
        return None;
    }
    let position = ledger.record_delivery(&agent, frame, line);
    Some((agent, position))
}
