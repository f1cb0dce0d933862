//! Agents that come online with the connection of their node. Those of direct nodes are found and marked in batches:
//! thousands return at once after the end of a gateway, and each change takes a number of its workspace's events, for
//! which its sends wait too.

use std::{sync::Weak, time::Duration};

use relay_domain::{NodeId, ProviderName, WorkspaceId, WorkspaceScope};
use relay_store::{mailboxes::cursors::MailboxPosition, nodes::fence::Fence};
use relay_tasks::batches::{BatchSender, Batches, Linger, QueueConfig, Request, queue};

use super::Nodes;
use crate::{EngineError, EngineResult, Inner, core::Core};

/// Provider of a direct node whose connection has registered.
type DirectProvider = (WorkspaceScope, NodeId, ProviderName);

/// Request that is answered with the positions of the provider's agents, once they are online.
pub(crate) type OnlineRequest = Request<DirectProvider, EngineResult<Vec<MailboxPosition>>>;

/// Workspaces take turns, so that one with thousands of agents does not delay others.
const QUEUE: QueueConfig<OnlineRequest, WorkspaceId> = QueueConfig {
    name: "agents_online",
    max_items: 16_384,
    key_share: 1,
    max_bytes: u32::MAX,
    batch_items: 512,
    batch_bytes: usize::MAX,
    batch_weight: u64::MAX,
    interval: Duration::ZERO,
    linger: Linger::NONE,
    key: |request| request.item.0.workspace_id(),
    bytes: |_| size_of::<OnlineRequest>(),
    weight: |_| 1,
};

/// Creates both ends of the queue.
pub(crate) fn online_queue() -> (BatchSender<OnlineRequest, WorkspaceId>, Batches<OnlineRequest, WorkspaceId>) {
    queue(QUEUE)
}

impl Nodes {
    /// Marks the agents of a direct node online after its own connection has registered, and returns their positions.
    ///
    /// # Errors
    /// When storage is unavailable.
    pub async fn bring_direct_online(&self, fence: &Fence) -> EngineResult<Vec<MailboxPosition>> {
        let provider = (fence.scope, fence.node_id.clone(), fence.provider.clone());
        self.online.request(provider).await.await.unwrap_or(Err(EngineError::Overloaded))
    }

    /// The same for a broker, which may have thousands of agents.
    ///
    /// # Errors
    /// When storage is unavailable.
    pub async fn bring_broker_online(&self, fence: &Fence) -> EngineResult<Vec<MailboxPosition>> {
        let provider = (fence.scope, fence.node_id.clone(), fence.provider.clone());
        let mut positions = bring_agents_online(&self.core, &[provider]).await?;
        Ok(positions.pop().unwrap_or_default())
    }
}

/// Brings agents of direct nodes online in batches until the engine is dropped.
pub(crate) async fn bring_nodes_online(engine: Weak<Inner>, mut requests: Batches<OnlineRequest, WorkspaceId>) {
    while let Some(batch) = requests.next().await {
        let Some(inner) = engine.upgrade() else { return };
        // An agent whose connection has ended would seem online.
        let waiting = batch.into_iter().filter(|request| !request.reply.is_closed()).collect();
        let (providers, replies) = Request::split(waiting);
        let mut is_refused = match bring_agents_online(&inner.core, &providers).await {
            Ok(positions) => {
                // A send fails when the connection has ended: its end marks the agents offline.
                replies.into_iter().zip(positions).for_each(|(reply, found)| _ = reply.send(Ok(found)));
                continue;
            }
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "agents not marked online");
                error.is_permanent()
            }
        };
        for (provider, reply) in providers.iter().zip(replies) {
            // One of them is at fault: brought online alone, it delays no other.
            let outcome = if is_refused {
                let alone = bring_agents_online(&inner.core, std::slice::from_ref(provider)).await;
                is_refused = alone.as_ref().map_or_else(EngineError::is_permanent, |_| true);
                alone.map(|mut positions| positions.pop().unwrap_or_default())
            } else {
                Err(EngineError::Overloaded)
            };
            let _ = reply.send(outcome);
        }
    }
}

/// Returns the positions of the agents on each provider, all of which are online.
async fn bring_agents_online(core: &Core, providers: &[DirectProvider]) -> EngineResult<Vec<Vec<MailboxPosition>>> {
    let positions = core.store.positions_of_providers(providers).await?;
    let agents: Vec<_> = positions.iter().flatten().map(|position| (position.scope, position.agent_id)).collect();
    if !agents.is_empty() {
        for recorded in core.store.mark_agents_online(&agents, core.now()).await? {
            core.announce(recorded);
        }
    }
    Ok(positions)
}
