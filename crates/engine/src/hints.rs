//! Hints: "look at this". They go to every part of this process and, over NATS, to every other one.
//! A hint has no authority, and losing one costs latency.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use relay_domain::{AgentId, ChannelId, GatewayId, NodeId, ProviderName, WorkspaceScope, token::TokenHash};
pub use relay_stream::Hint;
use relay_stream::Stream;
use tokio::sync::{broadcast, mpsc};

use crate::{Engine, Inner};

/// How many hints may wait for a slow listener, or for NATS, before the oldest or newest is lost.
const WAITING: usize = 4096;

const SUBSCRIBE_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// A hint for other processes: for one gateway, or for all.
pub(crate) type Outgoing = (Option<GatewayId>, Arc<Hint>);

/// Where hints of this process start from.
#[derive(Debug)]
pub struct Hints {
    local: broadcast::Sender<Arc<Hint>>,
    remote: mpsc::Sender<Outgoing>,
}

impl Hints {
    /// Hints, and the queue that [`forward`] empties into NATS.
    pub(crate) fn new() -> (Self, mpsc::Receiver<Outgoing>) {
        let (remote, queue) = mpsc::channel(WAITING);
        (Self { local: broadcast::channel(WAITING).0, remote }, queue)
    }

    /// Hints of all processes from now on. A listener that lags by more than 4096 misses the oldest.
    #[must_use]
    pub fn listen(&self) -> broadcast::Receiver<Arc<Hint>> {
        self.local.subscribe()
    }

    /// A node, its bindings or its token changed.
    pub fn node_changed(&self, scope: WorkspaceScope, node: NodeId) {
        self.agents_moved(scope, vec![node]);
    }

    /// Agents came to, left or changed on these nodes.
    pub fn agents_moved(&self, scope: WorkspaceScope, nodes: Vec<NodeId>) {
        self.give(Hint::NodesChanged { workspace: scope.workspace_id(), nodes });
    }

    /// Rows of these mailboxes were written, or settled otherwise than over their sockets.
    pub fn mailboxes_changed(&self, agents: impl IntoIterator<Item = (WorkspaceScope, AgentId)>) {
        let agents: Vec<_> = agents.into_iter().map(|(scope, agent)| (scope.workspace_id(), agent)).collect();
        // A hint stays far below NATS' payload limit.
        for some in agents.chunks(1000) {
            self.give(Hint::MailboxesChanged { agents: some.to_vec() });
        }
    }

    /// Rows of these mailboxes were written, of agents on nodes without a socket.
    pub(crate) fn deliveries_due(&self, agents: &[(WorkspaceScope, AgentId)]) {
        for some in agents.chunks(1000) {
            let agents = some.iter().map(|(scope, agent)| (scope.workspace_id(), *agent)).collect();
            self.give(Hint::DeliveriesDue { agents });
        }
    }

    /// Dead letters of these mailboxes were sent again, whatever the nodes of their agents are.
    pub(crate) fn redriven(&self, agents: &[(WorkspaceScope, AgentId)]) {
        self.mailboxes_changed(agents.iter().copied());
        self.deliveries_due(agents);
    }

    /// Rows of one mailbox were written, or settled otherwise than over its socket.
    pub fn mailbox_changed(&self, scope: WorkspaceScope, agent: AgentId) {
        self.mailboxes_changed([(scope, agent)]);
    }

    /// A token is dead.
    pub fn token_revoked(&self, hash: TokenHash) {
        self.give(Hint::TokenRevoked { hash: hash.to_string() });
    }

    /// What a workspace may use changed.
    pub fn quotas_changed(&self, scope: WorkspaceScope) {
        self.give(Hint::QuotasChanged { workspace: scope.workspace_id() });
    }

    /// Observer tokens, or the keys that sign them, are no longer what they were.
    pub(crate) fn observers_changed(&self) {
        self.give(Hint::ObserversChanged);
    }

    /// A channel's members, mutes or archived flag changed.
    pub fn members_changed(&self, scope: WorkspaceScope, channel: ChannelId) {
        self.give(Hint::MembersChanged { workspace: scope.workspace_id(), channel });
    }

    /// A provider is held under a new epoch: older connections of it close.
    pub fn provider_taken(&self, scope: WorkspaceScope, node: NodeId, provider: &ProviderName, epoch: i64) {
        let workspace = scope.workspace_id();
        self.give(Hint::ProviderTaken { workspace, node, provider: provider.to_string(), epoch });
    }

    /// A best-effort event for the sockets of these agents: `context.update`, never replayed.
    pub fn notify(
        &self,
        scope: WorkspaceScope,
        agents: Vec<AgentId>,
        topic: &str,
        event: &str,
        data: serde_json::Value,
    ) {
        self.notify_all(scope, Some(agents), topic, event, data, None);
    }

    /// The same for all direct nodes of the workspace when no agents are given, and as a `deliver` frame with
    /// seq 0 when an event id is.
    pub(crate) fn notify_all(
        &self,
        scope: WorkspaceScope,
        agents: Option<Vec<AgentId>>,
        topic: &str,
        event: &str,
        data: serde_json::Value,
        event_id: Option<String>,
    ) {
        self.give(Hint::Notify {
            workspace: scope.workspace_id(),
            agents,
            topic: topic.to_owned(),
            event: event.to_owned(),
            data,
            event_id,
        });
    }

    fn give(&self, hint: Hint) {
        let hint = Arc::new(hint);
        // Nobody listening is fine, and so is a full queue: the silence check finds what it hinted at.
        let _ = self.local.send(Arc::clone(&hint));
        let _ = self.remote.try_send((None, hint));
    }

    /// A hint that concerns one gateway, which may be `own`.
    pub(crate) fn to_gateway(&self, gateway: GatewayId, own: Option<GatewayId>, hint: Hint) {
        let hint = Arc::new(hint);
        if own == Some(gateway) {
            let _ = self.local.send(hint);
        } else {
            let _ = self.remote.try_send((Some(gateway), hint));
        }
    }
}

/// Passes the hints of other processes, for all or for one gateway, to the listeners of this one, until the engine is
/// gone.
pub(crate) async fn receive(engine: Weak<Inner>, stream: Stream, gateway: Option<GatewayId>) {
    let mut hints = loop {
        let listened = match gateway {
            None => stream.hints().await,
            Some(gateway) => stream.hints_to(gateway).await,
        };
        match listened {
            Ok(hints) => break hints,
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "waiting for nats");
                tokio::time::sleep(SUBSCRIBE_AGAIN_AFTER).await;
            }
        }
    };
    while let Some(hint) = hints.next().await {
        let Some(inner) = engine.upgrade() else { return };
        let _ = inner.hints.local.send(Arc::new(hint));
    }
}

/// What hints mean for the engine's own memory, until the engine is gone. A lagging listener forgets
/// more than it had to.
pub(crate) async fn obey(engine: Weak<Inner>, mut hints: broadcast::Receiver<Arc<Hint>>) {
    loop {
        let hint = hints.recv().await;
        let Some(inner) = engine.upgrade() else { return };
        match hint.as_deref() {
            Ok(Hint::TokenRevoked { hash }) => {
                if let Ok(hash) = hash.parse::<TokenHash>() {
                    let engine = Engine { inner };
                    engine.forget_token(&hash);
                    engine.inner.observers.recheck();
                }
            }
            Ok(Hint::ObserversChanged) => inner.observers.wake(),
            Ok(Hint::MembersChanged { workspace, channel }) => {
                inner.audiences.forget(WorkspaceScope::from_engine_row(*workspace), *channel);
            }
            Ok(Hint::QuotasChanged { workspace }) => Engine { inner }.forget_quotas(*workspace).await,
            Ok(_) => {}
            Err(broadcast::error::RecvError::Lagged(_)) => {
                inner.observers.wake();
                Engine { inner }.forget_all_tokens();
            }
            Err(broadcast::error::RecvError::Closed) => return,
        }
    }
}

/// Sends this process's hints to the others until the engine is gone.
pub(crate) async fn forward(stream: Stream, mut queue: mpsc::Receiver<Outgoing>) {
    while let Some((gateway, hint)) = queue.recv().await {
        match gateway {
            None => stream.hint(&hint).await,
            Some(gateway) => stream.hint_to(gateway, &hint).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::WorkspaceId;

    use super::*;

    #[test]
    fn a_redrive_is_told_to_sockets_and_to_those_who_push() {
        let (hints, _queue) = Hints::new();
        let mut heard = hints.listen();
        let (workspace, agent) = (WorkspaceId::new(7), AgentId::new(1));
        hints.redriven(&[(WorkspaceScope::from_engine_row(workspace), agent)]);
        let mut told = [false; 2];
        while let Ok(hint) = heard.try_recv() {
            match &*hint {
                Hint::MailboxesChanged { agents } => told[0] = *agents == [(workspace, agent)],
                Hint::DeliveriesDue { agents } => told[1] = *agents == [(workspace, agent)],
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(told, [true, true]);
    }
}
