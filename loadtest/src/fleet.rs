//! Sets of concurrent sockets.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use futures::stream::FuturesUnordered;
use futures::{StreamExt, TryStreamExt, stream};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::api::{Agent, Workspace};
use crate::collector::Collector;
use crate::inbox::{Acks, Received};
use crate::socket::{NodeSocket, NodeSpec};

/// Time from the first connection to the last registration.
const REGISTERED_WITHIN: Duration = Duration::from_secs(60);
/// Number of concurrent connection attempts.
const AT_ONCE: usize = 64;

/// Creates the nodes for `agents`: a direct node each, or brokers with `per_socket` agents.
pub(crate) async fn nodes(
    workspace: &Workspace,
    agents: &[Agent],
    per_socket: usize,
    prefix: &str,
) -> Result<Vec<NodeSpec>> {
    let spec = |access, broker, agents, acks| NodeSpec { access, broker, agents, acks, goal: None, received: None };
    if per_socket == 1 {
        let accesses = workspace.direct_nodes(agents).await?;
        let pairs = accesses.into_iter().zip(agents);
        return Ok(pairs.map(|(access, agent)| spec(access, false, vec![agent.clone()], Acks::Each)).collect());
    }
    let mut specs = Vec::new();
    for (number, hosted) in agents.chunks(per_socket).enumerate() {
        let access = workspace.broker_node(&format!("{prefix}-node-{number}")).await?;
        workspace.bind(&access.name, hosted).await?;
        specs.push(spec(access, true, hosted.to_vec(), Acks::Cumulative));
    }
    Ok(specs)
}

/// Connected sockets, dropped without a close frame.
pub(crate) struct Fleet {
    _receivers: JoinSet<()>,
}

impl Fleet {
    /// Connects every node, spread over the gateways; returns when all are registered.
    pub(crate) async fn connect(workspace: &Workspace, specs: &[NodeSpec], collector: &Arc<Collector>) -> Result<Self> {
        let opened = specs.iter().enumerate().map(|(number, spec)| async move {
            let address = workspace.pool(number).address();
            let socket = NodeSocket::open(address, spec, Arc::clone(collector)).await;
            let socket = socket.with_context(|| format!("connect {} to {address}", spec.access.name))?;
            Ok::<_, anyhow::Error>((spec.access.id.clone(), socket))
        });
        let mut receivers = JoinSet::new();
        let mut opened = stream::iter(opened).buffer_unordered(AT_ONCE);
        while let Some((node_id, socket)) = opened.try_next().await? {
            receivers.spawn(receive(socket, node_id, Arc::clone(collector)));
        }
        Ok(Self { _receivers: receivers })
    }

    /// Connects every node, spread over the gateways, and reconnects it to the next one whenever its connection ends:
    /// at once, or after `pause` if it was refused. Returns when all are registered. Ends are counted and are not
    /// problems.
    pub(crate) async fn returning(
        workspace: &Workspace,
        specs: &[NodeSpec],
        collector: &Arc<Collector>,
        pause: Duration,
        ends: &Arc<AtomicU64>,
    ) -> Result<Self> {
        let mut receivers = JoinSet::new();
        let mut registered = FuturesUnordered::new();
        for (number, spec) in specs.iter().enumerate() {
            let spec = NodeSpec { received: Some(Received::default()), ..spec.clone() };
            let (workspace, collector, ends) = (workspace.clone(), Arc::clone(collector), Arc::clone(ends));
            let (report, reported) = oneshot::channel();
            registered.push(reported);
            receivers.spawn(async move {
                let mut report = Some(report);
                for turn in number.. {
                    match NodeSocket::open(workspace.pool(turn).address(), &spec, Arc::clone(&collector)).await {
                        Ok(socket) => {
                            let _ = report.take().map(|report| report.send(()));
                            socket.run(&spec.access.id).await;
                            ends.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(_) => tokio::time::sleep(pause).await,
                    }
                }
            });
        }
        let all = async {
            while let Some(reported) = registered.next().await {
                reported?
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(REGISTERED_WITHIN, all).await.context("not all nodes were let in")??;
        Ok(Self { _receivers: receivers })
    }

    /// Connects every node to one gateway concurrently, each retrying every `pause` until `deadline`. Returns at once;
    /// errors of refused attempts go to `refusals`.
    pub(crate) fn reconnect(
        address: &str,
        specs: &[NodeSpec],
        collector: &Arc<Collector>,
        pause: Duration,
        deadline: Instant,
        refusals: tokio::sync::mpsc::Sender<String>,
    ) -> Self {
        let mut receivers = JoinSet::new();
        for spec in specs {
            let (address, spec, collector) = (address.to_owned(), spec.clone(), Arc::clone(collector));
            let refusals = refusals.clone();
            receivers.spawn(async move {
                while Instant::now() < deadline {
                    match NodeSocket::open(&address, &spec, Arc::clone(&collector)).await {
                        Ok(socket) => {
                            return receive(socket, spec.access.id.clone(), collector).await;
                        }
                        Err(error) => _ = refusals.try_send(format!("{error:#}")),
                    }
                    tokio::time::sleep(pause).await;
                }
            });
        }
        Self { _receivers: receivers }
    }
}

async fn receive(socket: NodeSocket, node_id: String, collector: Arc<Collector>) {
    let why = socket.run(&node_id).await;
    collector.closed(|| format!("socket of {node_id}: {why:#}"));
}
