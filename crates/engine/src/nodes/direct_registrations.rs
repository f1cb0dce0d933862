//! Registrations of direct nodes, in batches: thousands of them return at once after the end of a gateway.
//!
//! Whatever a batch leaves open is registered by its own caller: a node that another transaction has locked, a second
//! connection of a node in the same batch, and the batch of one that Postgres refuses.

use std::{collections::HashSet, sync::Weak, time::Duration};

use relay_domain::{ProviderName, WorkspaceId, encoded_length, nodes::RosterNode};
use relay_store::{
    StoreError, StoreResult,
    nodes::{direct::DirectClaim, providers::RegisterOutcome},
};
use relay_tasks::batches::{BatchSender, Batches, Linger, QueueConfig, Request, queue};

use super::{
    Nodes,
    providers::{RegisteredProvider, Registrant},
    roster::HeldNode,
};
use crate::{Engine, EngineError, EngineResult, Inner};

/// Registration that waits, and the bytes of its contents.
pub(crate) struct QueuedRegistration {
    registrant: Registrant,
    bytes: usize,
}

/// Outcome of a registration in a batch.
pub(crate) struct BatchedOutcome {
    outcome: RegisterOutcome,
    /// The registered node and the size of its providers, unless they are large.
    node: Option<(RosterNode, usize)>,
}

/// Request whose reply is the outcome; `None` if the caller has to register the node alone.
pub(crate) type RegisterRequest = Request<QueuedRegistration, StoreResult<Option<BatchedOutcome>>>;

/// Bound of the contents of providers that are read for one batch. Larger ones are read by the callers.
const DESCRIBED_BYTES: usize = 1024 * 1024;

/// Workspaces take turns, so that one with thousands of agents does not delay others.
const QUEUE: QueueConfig<RegisterRequest, WorkspaceId> = QueueConfig {
    name: "direct_registrations",
    max_items: 16_384,
    key_share: 1,
    max_bytes: 32 * 1024 * 1024,
    batch_items: 256,
    batch_bytes: 1024 * 1024,
    batch_weight: u64::MAX,
    interval: Duration::ZERO,
    linger: Linger::NONE,
    key: |request| request.item.registrant.scope.workspace_id(),
    bytes: |request| size_of::<RegisterRequest>() + request.item.bytes,
    weight: |_| 1,
};

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
                self.hold_at_once(registrant.scope, bytes).await.map(|memory| HeldNode { node, memory })
            }
            None => None,
        };
        Ok(RegisteredProvider { node, ..registered })
    }

    async fn register_in_batch(&self, registrant: &Registrant) -> EngineResult<Option<BatchedOutcome>> {
        let registration = &registrant.registration;
        // The number of other providers has a bound, which is counted.
        if registration.provider != ProviderName::default_provider() {
            return Ok(None);
        }
        let bytes =
            encoded_length(&registration.capabilities) + registration.tags.iter().map(String::len).sum::<usize>();
        let queued = QueuedRegistration { registrant: registrant.clone(), bytes };
        // The reply is missing only when the task has ended, at the end of the process.
        let outcome = self.registrations.request(queued).await.await.map_err(|_| EngineError::Overloaded)?;
        Ok(outcome?)
    }
}

/// Registers direct nodes in batches until the engine is dropped.
pub(crate) async fn register_direct_nodes(engine: Weak<Inner>, mut requests: Batches<RegisterRequest, WorkspaceId>) {
    while let Some(batch) = requests.next().await {
        let Some(inner) = engine.upgrade() else { return };
        let engine = Engine { inner };
        let mut nodes = HashSet::new();
        // A statement cannot write a row twice. Callers that have given up look for their registration themselves.
        let (together, alone): (Vec<_>, Vec<_>) = batch
            .into_iter()
            .filter(|request| !request.reply.is_closed())
            .partition(|RegisterRequest { item: QueuedRegistration { registrant, .. }, .. }| {
                nodes.insert((registrant.scope, registrant.node_id.clone()))
            });
        let (items, replies) = Request::split(together);
        let claims: Vec<DirectClaim<'_>> = items.iter().map(|item| item.registrant.as_claim()).collect();
        match register_and_read(&engine, &claims).await {
            Ok(outcomes) => replies.into_iter().zip(outcomes).for_each(|(reply, outcome)| _ = reply.send(Ok(outcome))),
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "direct nodes not registered together");
                for reply in replies {
                    let unavailable = || StoreError::unavailable("registering direct nodes");
                    let _ = reply.send(if error.is_unavailable() { Err(unavailable()) } else { Ok(None) });
                }
            }
        }
        // After the others: these connections asked later.
        alone.into_iter().for_each(|request| _ = request.reply.send(Ok(None)));
    }
}

/// Registers connections, and reads what the replies to them show.
async fn register_and_read(engine: &Engine, claims: &[DirectClaim<'_>]) -> StoreResult<Vec<Option<BatchedOutcome>>> {
    let store = engine.store();
    let outcomes = store.register_direct_nodes(claims, engine.now()).await?;
    let nodes: Vec<_> = claims.iter().map(|claim| (claim.scope, claim.node.clone())).collect();
    // The registrations are committed: callers read by themselves what could not be read here.
    let read = store.nodes_within(&nodes, DESCRIBED_BYTES).await.unwrap_or_default();
    let read = read.into_iter().chain(std::iter::repeat_with(|| None));
    let outcome = |(outcome, node): (Option<_>, _)| outcome.map(|outcome| BatchedOutcome { outcome, node });
    Ok(outcomes.into_iter().zip(read).map(outcome).collect())
}
