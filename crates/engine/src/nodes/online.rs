//! Agents of direct nodes that come online, written in batches: thousands of them return at once after the end of a
//! gateway, and each change takes a number of its workspace's events, for which its sends wait too.

use std::sync::Weak;

use relay_domain::{AgentId, WorkspaceId, WorkspaceScope};
use relay_tasks::batches::{BatchSender, Batches, Linger, QueueConfig, Request, queue};

use super::Nodes;
use crate::{Engine, EngineError, EngineResult, Inner};

/// Agents that came online with one connection.
pub(crate) struct OnlineAgents {
    scope: WorkspaceScope,
    agents: Vec<AgentId>,
}

/// Request that is answered once the agents are online.
pub(crate) type OnlineRequest = Request<OnlineAgents, EngineResult<()>>;

/// Workspaces take turns, so that one with thousands of agents does not delay others.
const QUEUE: QueueConfig<OnlineRequest, WorkspaceId> = QueueConfig {
    name: "agents_online",
    max_items: 16_384,
    key_share: 1,
    max_bytes: u32::MAX,
    batch_items: 512,
    batch_bytes: usize::MAX,
    batch_weight: u64::MAX,
    interval: std::time::Duration::ZERO,
    linger: Linger::NONE,
    key: |request| request.item.scope.workspace_id(),
    bytes: |request| size_of::<OnlineRequest>() + request.item.agents.len() * size_of::<AgentId>(),
    weight: |_| 1,
};

/// Creates both ends of the queue.
pub(crate) fn online_queue() -> (BatchSender<OnlineRequest, WorkspaceId>, Batches<OnlineRequest, WorkspaceId>) {
    queue(QUEUE)
}

impl Nodes {
    /// Marks the agents of a direct node online after its own connection has registered.
    ///
    /// # Errors
    /// When storage is unavailable.
    pub async fn mark_agents_online(&self, scope: WorkspaceScope, agents: &[AgentId]) -> EngineResult<()> {
        if agents.is_empty() {
            return Ok(());
        }
        let answer = self.online.request(OnlineAgents { scope, agents: agents.to_vec() }).await;
        answer.await.unwrap_or(Err(EngineError::Overloaded))
    }
}

/// Marks agents online in batches until the engine is dropped.
pub(crate) async fn write_online_agents(engine: Weak<Inner>, mut requests: Batches<OnlineRequest, WorkspaceId>) {
    while let Some(batch) = requests.next().await {
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        let (items, replies) = Request::split(batch);
        let is_refused = match write(&engine, &items).await {
            Ok(()) => {
                // A send fails when the connection has ended: the change is stored all the same.
                replies.into_iter().for_each(|reply| _ = reply.send(Ok(())));
                continue;
            }
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "agents not marked online");
                error.is_permanent()
            }
        };
        for (item, reply) in items.iter().zip(replies) {
            // One of them is at fault: written alone, it delays no other.
            let outcome = if is_refused {
                write(&engine, std::slice::from_ref(item)).await
            } else {
                Err(EngineError::Overloaded)
            };
            let _ = reply.send(outcome);
        }
    }
}

async fn write(engine: &Engine, items: &[OnlineAgents]) -> EngineResult<()> {
    let agents = items.iter().flat_map(|item| item.agents.iter().map(|agent| (item.scope, *agent)));
    let agents: Vec<_> = agents.collect();
    for recorded in engine.store().mark_agents_online(&agents, engine.now()).await? {
        engine.core().announce(recorded);
    }
    Ok(())
}
