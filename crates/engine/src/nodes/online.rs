//! Providers whose agents come online with their connection: the agents are found and marked in batches. Thousands of
//! direct nodes return at once after the end of a gateway, and each change takes a number of its workspace's events, for
//! which its sends wait too.

use std::{sync::Weak, time::Duration};

use relay_domain::{NodeId, ProviderName, WorkspaceId, WorkspaceScope};
use relay_store::{mailboxes::cursors::MailboxPosition, nodes::fence::Fence};
use relay_tasks::batches::{BatchSender, Batches, Linger, QueueConfig, Request, queue};

use super::Nodes;
use crate::{Engine, EngineError, EngineResult, Inner};

/// Provider whose connection has registered.
pub(crate) type ConnectedProvider = (WorkspaceScope, NodeId, ProviderName);

/// Request that is answered with the positions of the provider's agents, once they are online.
pub(crate) type OnlineRequest = Request<ConnectedProvider, EngineResult<Vec<MailboxPosition>>>;

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
    /// Marks the agents of a provider online after its connection has registered, and returns their positions.
    ///
    /// # Errors
    /// When storage is unavailable.
    pub async fn bring_online(&self, fence: &Fence) -> EngineResult<Vec<MailboxPosition>> {
        let provider = (fence.scope, fence.node_id.clone(), fence.provider.clone());
        self.online.request(provider).await.await.unwrap_or(Err(EngineError::Overloaded))
    }
}

/// Brings agents online in batches until the engine is dropped.
pub(crate) async fn bring_nodes_online(engine: Weak<Inner>, mut requests: Batches<OnlineRequest, WorkspaceId>) {
    while let Some(batch) = requests.next().await {
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        let (providers, replies) = Request::split(batch);
        let is_refused = match bring_online(&engine, &providers).await {
            Ok(positions) => {
                // A send fails when the connection has ended: the change is stored all the same.
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
                bring_online(&engine, std::slice::from_ref(provider)).await.map(|mut one| one.pop().unwrap_or_default())
            } else {
                Err(EngineError::Overloaded)
            };
            let _ = reply.send(outcome);
        }
    }
}

/// Returns the positions of the agents on each provider, all of which are online.
async fn bring_online(engine: &Engine, providers: &[ConnectedProvider]) -> EngineResult<Vec<Vec<MailboxPosition>>> {
    let positions = engine.store().positions_of_providers(providers).await?;
    let agents: Vec<_> = positions.iter().flatten().map(|position| (position.scope, position.agent_id)).collect();
    if !agents.is_empty() {
        for recorded in engine.store().mark_agents_online(&agents, engine.now()).await? {
            engine.core().announce(recorded);
        }
    }
    Ok(positions)
}
