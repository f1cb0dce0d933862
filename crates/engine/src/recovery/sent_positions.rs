//! Seqs that this process sent before a failover: the database may have lost the deliveries, and must not assign their
//! numbers to others. Brokers report what they received; for clients with a socket of their own only the gateway knows, and
//! for http_push endpoints only the worker.

use std::{
    sync::{OnceLock, atomic::Ordering},
    time::Duration,
};

use relay_domain::{AgentId, NodeId, ProviderName, WorkspaceScope, mailboxes::stream::Seq};
use relay_store::nodes::fence::Fence;

use super::Recovery;
use crate::{Engine, EngineError, EngineResult};

/// Mailboxes that are compared by one statement.
const MAILBOXES_PER_READ: usize = 1000;
/// Bound of raising one head. The statements of a transaction have no deadline on this side: on a dead network the process
/// would not serve until the kernel closes the connection.
const RAISE_TIMEOUT: Duration = Duration::from_secs(10);

/// Highest seq that this process has sent to an agent.
#[derive(Debug, Clone)]
pub struct SentPosition {
    /// Connection that sent it, or the http_push node.
    pub fence: Fence,
    pub agent_id: AgentId,
    pub seq: Seq,
}

impl SentPosition {
    /// Returns the position of an agent on an http_push node, which is no provider's.
    #[must_use]
    pub fn pushed(scope: WorkspaceScope, node_id: NodeId, agent_id: AgentId, seq: Seq) -> Self {
        Self { fence: Fence { scope, node_id, provider: ProviderName::default_provider(), epoch: 0 }, agent_id, seq }
    }
}

/// Source of the positions of all sockets, or of all http_push endpoints.
pub(crate) struct SentPositions(OnceLock<Box<dyn Fn() -> Vec<SentPosition> + Send + Sync>>);

impl SentPositions {
    pub(crate) const fn none() -> Self {
        Self(OnceLock::new())
    }

    fn read(&self) -> Vec<SentPosition> {
        self.0.get().map(|source| source()).unwrap_or_default()
    }
}

impl Recovery {
    /// Sets the source of the positions that this process has sent, which a recovery asks. Called once, by a gateway or a
    /// worker.
    pub fn set_sent_positions(&self, source: impl Fn() -> Vec<SentPosition> + Send + Sync + 'static) {
        // A second source would be a mistake of the caller; the first one stays.
        let _ = self.state.sent_positions.0.set(Box::new(source));
    }
}

/// Raises the heads of mailboxes above what this process sent before the last recovery, unless that was done.
pub(super) async fn raise_heads(engine: &Engine) -> EngineResult<()> {
    let state = &engine.inner.recovery.state;
    if !state.must_raise_heads.load(Ordering::SeqCst) {
        return Ok(());
    }
    for chunk in state.sent_positions.read().chunks(MAILBOXES_PER_READ) {
        let positions: Vec<_> = chunk.iter().map(|sent| (sent.fence.scope, sent.agent_id, sent.seq)).collect();
        let reassigned = engine.store().reassigned_seqs(&positions).await?;
        for sent in chunk.iter().filter(|sent| reassigned.contains(&(sent.fence.scope, sent.agent_id))) {
            let raised = engine.inner.recovery.raise_to(&sent.fence, sent.agent_id, sent.seq);
            let raised = tokio::time::timeout(RAISE_TIMEOUT, raised).await;
            raised.map_err(|_| EngineError::storage_timeout("raising a mailbox head above a sent seq"))??;
        }
    }
    state.must_raise_heads.store(false, Ordering::SeqCst);
    Ok(())
}
