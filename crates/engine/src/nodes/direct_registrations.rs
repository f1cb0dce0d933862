//! Registrations of direct nodes, in batches: thousands of them return at once after the end of a gateway.
//!
//! A caller registers alone when its batch left the node out: another transaction had locked the node, an earlier
//! request of the batch was for the same node, or Postgres refused the batch.

use std::{collections::HashSet, sync::Weak, time::Duration};

use relay_domain::{ProviderName, WorkspaceId, encoded_length, nodes::RosterNode};
use relay_store::{
    StoreError, StoreResult,
    nodes::{direct::DirectClaim, fence::Fence, providers::RegisterOutcome},
};
use relay_tasks::{
    batches::{BatchSender, Batches, Linger, QueueConfig, Request, queue},
    spawn_isolated,
};

use super::{
    Nodes,
    providers::{RegisteredProvider, Registrant},
    roster::HeldNode,
};
use crate::{Engine, EngineError, EngineResult, Inner};

/// Outcome of a registration in a batch.
pub(crate) struct BatchedOutcome {
    outcome: RegisterOutcome,
    /// The registered node and the size of its providers, if it is small.
    node: Option<(RosterNode, usize)>,
}

/// Request whose reply is the outcome; `None` if the caller has to register alone.
pub(crate) type RegisterRequest = Request<Registrant, StoreResult<Option<BatchedOutcome>>>;

/// Workspaces take turns, so that one with thousands of agents does not delay others, and each has at most half of the
/// queue. A batch is half as large as one of token lookups, because it writes.
const QUEUE: QueueConfig<RegisterRequest, WorkspaceId> = QueueConfig {
    name: "direct_registrations",
    max_items: 16_384,
    key_share: 2,
    // Small items: their number is the bound.
    max_bytes: u32::MAX,
    batch_items: 256,
    batch_bytes: usize::MAX,
    batch_weight: u64::MAX,
    interval: Duration::ZERO,
    linger: Linger::NONE,
    key: |request| request.item.scope.workspace_id(),
    bytes: |_| size_of::<RegisterRequest>(),
    weight: |_| 1,
};
/// Larger registrations are not queued, in bytes of their capabilities and tags. Those of published clients have none.
const MAX_QUEUED_BYTES: usize = 1024;
/// Larger nodes are read by their callers, in bytes of the node and its providers.
const MAX_READ_BYTES: i64 = 16 * 1024;
/// Time to read the nodes of a batch, for which the replies and the next batch wait.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

/// Creates both ends of the queue.
pub(crate) fn registration_queue() -> (BatchSender<RegisterRequest, WorkspaceId>, Batches<RegisterRequest, WorkspaceId>)
{
    queue(QUEUE)
}

impl Registrant {
    fn as_claim(&self) -> DirectClaim<'_> {
        let Self { scope, node_id, gateway_id, requested_at, registration, .. } = self;
        DirectClaim { scope: *scope, node: node_id, gateway: *gateway_id, requested_at: *requested_at, registration }
    }

    /// Returns whether the registration may be one of a batch.
    fn fits_into_batch(&self) -> bool {
        let registration = &self.registration;
        let bytes =
            || encoded_length(&registration.capabilities) + registration.tags.iter().map(String::len).sum::<usize>();
        // The number of other providers has a bound, which is counted.
        registration.provider == ProviderName::default_provider() && bytes() <= MAX_QUEUED_BYTES
    }
}

impl Nodes {
    /// Registers the connection of a direct node; the newest one wins.
    pub(super) async fn register_direct(&self, registrant: &Registrant) -> EngineResult<RegisteredProvider> {
        let Some(BatchedOutcome { outcome, node }) = self.register_in_batch(registrant).await? else {
            let outcome = self.core.store.register_direct(registrant.as_claim(), self.core.now()).await?;
            return self.complete_registration(registrant, outcome);
        };
        let registered = self.complete_registration(registrant, outcome)?;
        let node = match node {
            Some((node, bytes)) => {
                let memory = self.try_reserve_answer(registrant.scope, bytes).await;
                memory.map(|memory| HeldNode { node, memory })
            }
            None => None,
        };
        Ok(RegisteredProvider { node, ..registered })
    }

    /// Registers with others. `None` if the caller has to register alone, also because too many wait.
    async fn register_in_batch(&self, registrant: &Registrant) -> EngineResult<Option<BatchedOutcome>> {
        if !registrant.fits_into_batch() {
            return Ok(None);
        }
        let Ok(answer) = self.registrations.try_request(registrant.clone()) else { return Ok(None) };
        // The reply is missing only when the task has ended, at the end of the process.
        Ok(answer.await.map_err(|_| EngineError::Overloaded)??)
    }
}

/// Registers direct nodes in batches until the engine is dropped.
pub(crate) async fn register_direct_nodes(engine: Weak<Inner>, mut requests: Batches<RegisterRequest, WorkspaceId>) {
    while let Some(batch) = requests.next().await {
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        let mut nodes = HashSet::new();
        let mut is_first = |registrant: &Registrant| nodes.insert((registrant.scope, registrant.node_id.clone()));
        // A caller that has given up looks itself whether its registration was committed.
        let waiting = batch.into_iter().filter(|request| !request.reply.is_closed());
        // A statement cannot write a row twice.
        let (together, repeated): (Vec<_>, Vec<_>) = waiting.partition(|request| is_first(&request.item));
        let (registrants, replies) = Request::split(together);
        let claims: Vec<DirectClaim<'_>> = registrants.iter().map(Registrant::as_claim).collect();
        let registered = register_and_read(&engine, &claims).await;
        let mut is_unavailable = false;
        let not_registered = |is_unavailable: bool| {
            if is_unavailable { Err(StoreError::unavailable("registering direct nodes")) } else { Ok(None) }
        };
        match registered {
            Ok(outcomes) => {
                for ((registrant, reply), outcome) in registrants.iter().zip(replies).zip(outcomes) {
                    if let Err(unread) = reply.send(Ok(outcome)) {
                        release_unread(&engine, registrant, unread);
                    }
                }
            }
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "direct nodes not registered together");
                is_unavailable = error.is_unavailable();
                replies.into_iter().for_each(|reply| _ = reply.send(not_registered(is_unavailable)));
            }
        }
        repeated.into_iter().for_each(|request| _ = request.reply.send(not_registered(is_unavailable)));
    }
}

/// Registers connections, and reads what the replies to them show.
async fn register_and_read(engine: &Engine, claims: &[DirectClaim<'_>]) -> StoreResult<Vec<Option<BatchedOutcome>>> {
    if claims.is_empty() {
        return Ok(Vec::new());
    }
    let store = engine.store();
    let outcomes = store.register_direct_nodes(claims, engine.now()).await?;
    let nodes: Vec<_> = claims.iter().map(|claim| (claim.scope, claim.node.clone())).collect();
    // The registrations are committed by now: callers read by themselves what could not be read here.
    let read = tokio::time::timeout(READ_TIMEOUT, store.small_nodes(&nodes, MAX_READ_BYTES)).await;
    let read = read.unwrap_or_else(|_| Err(StoreError::unavailable("reading direct nodes")));
    if let Err(error) = &read {
        tracing::debug!(error = error as &dyn std::error::Error, "registered nodes not read together");
    }
    let read = read.unwrap_or_default().into_iter().chain(std::iter::repeat_with(|| None));
    let outcome = |(outcome, node): (Option<_>, _)| outcome.map(|outcome| BatchedOutcome { outcome, node });
    Ok(outcomes.into_iter().zip(read).map(outcome).collect())
}

/// Frees the provider of a connection that ended before it could read that it has it.
fn release_unread(engine: &Engine, registrant: &Registrant, unread: StoreResult<Option<BatchedOutcome>>) {
    let Ok(Some(BatchedOutcome { outcome: RegisterOutcome::Registered { epoch, .. }, .. })) = unread else { return };
    let Registrant { scope, node_id, registration, .. } = registrant;
    let provider = registration.provider.clone();
    let fence = Fence { scope: *scope, node_id: node_id.clone(), provider, epoch };
    let engine = engine.clone();
    spawn_isolated("connection", async move {
        // Otherwise it seems connected until its heartbeats are missed.
        if let Err(error) = engine.nodes().disconnect_provider(&fence).await {
            tracing::debug!(error = &error as &dyn std::error::Error, "provider of an ended connection not freed");
        }
    });
}
