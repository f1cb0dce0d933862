//! Hints: wake-ups without authority. They go to every listener of this process and, over NATS, to the other processes.
//! A lost hint costs latency only. Main type: [`Hints`], which sends and receives them.

mod by_gateway;

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use relay_domain::{
    AgentId, ChannelId, GatewayId, NodeId, ProviderName, WorkspaceScope, access::token::TokenHash,
    metric_names::HINTS_SENT,
};
pub use relay_stream::Hint;
use relay_stream::Stream;
use tokio::sync::{broadcast, mpsc};

pub(crate) use self::by_gateway::AgentNotices;
use crate::Inner;

/// Bound of both queues. A slow listener loses the oldest hint, a slow NATS the newest.
const QUEUE: usize = 4096;

const RESUBSCRIBE_AFTER: Duration = Duration::from_millis(500);

/// Keeps a hint far below NATS' payload limit.
const MAILBOXES_PER_HINT: usize = 1000;

/// Hint for other processes: for one gateway, or for all.
pub(crate) type RemoteHint = (Option<GatewayId>, Arc<Hint>);

/// Best-effort event for agents' sockets.
pub(crate) struct SocketEvent<'a> {
    /// `None`: all direct nodes of the workspace.
    pub(crate) agents: Option<Vec<AgentId>>,
    pub(crate) topic: &'a str,
    pub(crate) event: &'a str,
    pub(crate) data: serde_json::Value,
    /// With an id it is a `deliver` frame with seq 0, otherwise a `context.update`.
    pub(crate) event_id: Option<String>,
}

impl SocketEvent<'_> {
    fn into_hint(self, scope: WorkspaceScope) -> Hint {
        let Self { agents, topic, event, data, event_id } = self;
        Hint::Notify {
            workspace: scope.workspace_id(),
            agents,
            topic: topic.to_owned(),
            event: event.to_owned(),
            data,
            event_id,
        }
    }
}

/// Sender of hints.
#[derive(Debug)]
pub struct Hints {
    local: broadcast::Sender<Arc<Hint>>,
    /// Apart from the others, which announce changes: a flood of notices must not displace those.
    notices: broadcast::Sender<Arc<Hint>>,
    remote: mpsc::Sender<RemoteHint>,
}

impl Hints {
    /// Creates the sender, and the queue that [`forward_to_nats`] drains.
    pub(crate) fn new() -> (Self, mpsc::Receiver<RemoteHint>) {
        let (remote, queue) = mpsc::channel(QUEUE);
        (Self { local: broadcast::channel(QUEUE).0, notices: broadcast::channel(QUEUE).0, remote }, queue)
    }

    /// Subscribes to the notices for agents' sockets of all processes from now on.
    #[must_use]
    pub fn subscribe_notices(&self) -> broadcast::Receiver<Arc<Hint>> {
        self.notices.subscribe()
    }

    /// Subscribes to the hints of all processes, except notices, from now on. A listener that lags by more than 4096
    /// hints misses the oldest.
    #[must_use]
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<Hint>> {
        self.local.subscribe()
    }

    /// Hints that a node, its bindings or its token changed.
    pub fn node_changed(&self, scope: WorkspaceScope, node: NodeId) {
        self.agents_moved(scope, vec![node]);
    }

    /// Hints that agents moved to, left or changed on these nodes.
    pub fn agents_moved(&self, scope: WorkspaceScope, nodes: Vec<NodeId>) {
        self.publish(Hint::NodesChanged { workspace: scope.workspace_id(), nodes });
    }

    /// Hints that rows of these mailboxes were written, or settled other than over their sockets.
    pub fn mailboxes_changed(&self, agents: impl IntoIterator<Item = (WorkspaceScope, AgentId)>) {
        let agents: Vec<_> = agents.into_iter().map(|(scope, agent)| (scope.workspace_id(), agent)).collect();
        for some in agents.chunks(MAILBOXES_PER_HINT) {
            self.publish(Hint::MailboxesChanged { agents: some.to_vec() });
        }
    }

    /// Hints that deliveries were written for agents on nodes without a socket.
    pub(crate) fn deliveries_due(&self, agents: &[(WorkspaceScope, AgentId)]) {
        for some in agents.chunks(MAILBOXES_PER_HINT) {
            let agents = some.iter().map(|(scope, agent)| (scope.workspace_id(), *agent)).collect();
            self.publish(Hint::DeliveriesDue { agents });
        }
    }

    /// Hints that dead letters of these mailboxes were redriven, for nodes of every kind.
    pub(crate) fn deliveries_redriven(&self, agents: &[(WorkspaceScope, AgentId)]) {
        self.mailboxes_changed(agents.iter().copied());
        self.deliveries_due(agents);
    }

    /// Hints that rows of one mailbox were written, or settled other than over its socket.
    pub fn mailbox_changed(&self, scope: WorkspaceScope, agent: AgentId) {
        self.mailboxes_changed([(scope, agent)]);
    }

    /// Has this process compare a mailbox with its rows, because a live copy of it is of another recovery epoch.
    pub fn compare_mailbox(&self, scope: WorkspaceScope, agent: AgentId) {
        // Only this process received the copy. Without a listener it serves no mailboxes.
        let _ = self.local.send(Arc::new(Hint::MailboxesChanged { agents: vec![(scope.workspace_id(), agent)] }));
    }

    pub fn token_revoked(&self, hash: TokenHash) {
        self.publish(Hint::TokenRevoked { hash: hash.to_string() });
    }

    /// Hints that a workspace was deleted, so that its tokens are forgotten and its sockets close.
    pub(crate) fn workspace_deleted(&self, scope: WorkspaceScope) {
        self.publish(Hint::WorkspaceDeleted { workspace: scope.workspace_id() });
    }

    /// Hints that quotas or rights of a workspace or of its agents changed.
    pub fn quotas_changed(&self, scope: WorkspaceScope) {
        self.publish(Hint::QuotasChanged { workspace: scope.workspace_id() });
    }

    /// Hints that observer tokens or signing keys changed.
    pub(crate) fn observers_changed(&self) {
        self.publish(Hint::ObserversChanged);
    }

    /// Hints that a channel's members, mutes or archived flag changed.
    pub fn members_changed(&self, scope: WorkspaceScope, channel: ChannelId) {
        self.publish(Hint::MembersChanged { workspace: scope.workspace_id(), channel });
    }

    /// Hints that a provider has a new epoch, so that its older connections close.
    pub fn provider_taken(&self, scope: WorkspaceScope, node: NodeId, provider: &ProviderName, epoch: i64) {
        let workspace = scope.workspace_id();
        self.publish(Hint::ProviderTaken { workspace, node, provider: provider.to_string(), epoch });
    }

    /// Sends a best-effort event to the sockets of these agents as `context.update`. Never replayed.
    pub fn notify(
        &self,
        scope: WorkspaceScope,
        agents: Vec<AgentId>,
        topic: &str,
        event: &str,
        data: serde_json::Value,
    ) {
        self.notify_all(scope, SocketEvent { agents: Some(agents), topic, event, data, event_id: None });
    }

    /// Sends a best-effort event to the sockets of all gateways.
    pub(crate) fn notify_all(&self, scope: WorkspaceScope, event: SocketEvent<'_>) {
        self.publish(event.into_hint(scope));
    }

    /// Sends a best-effort event to the sockets of one gateway, which may be this process (`own`).
    pub(crate) fn notify_gateway(
        &self,
        gateway: GatewayId,
        own: Option<GatewayId>,
        scope: WorkspaceScope,
        event: SocketEvent<'_>,
    ) {
        self.send_to_gateway(gateway, own, event.into_hint(scope));
    }

    fn publish(&self, hint: Hint) {
        let hint = Arc::new(hint);
        // Not by way of NATS, which may be down, and whose receivers drop the hints of their own process.
        self.send_local(Arc::clone(&hint));
        self.send_remote(None, hint);
    }

    fn send_local(&self, hint: Arc<Hint>) {
        let listeners = match *hint {
            Hint::Notify { .. } | Hint::NotifyEach { .. } | Hint::NoticeMissed { .. } => &self.notices,
            Hint::NodesChanged { .. }
            | Hint::MailboxesChanged { .. }
            | Hint::DeliveriesDue { .. }
            | Hint::TokenRevoked { .. }
            | Hint::TokenDoubted { .. }
            | Hint::WorkspaceDeleted { .. }
            | Hint::QuotasChanged { .. }
            | Hint::ObserversChanged
            | Hint::MembersChanged { .. }
            | Hint::ProviderTaken { .. }
            | Hint::Invoke { .. } => &self.local,
        };
        // No listener is fine, and so is a full queue: periodic checks find the change.
        let _ = listeners.send(hint);
    }

    fn send_remote(&self, gateway: Option<GatewayId>, hint: Arc<Hint>) {
        metrics::counter!(HINTS_SENT, "to" => if gateway.is_some() { "gateway" } else { "all" }).increment(1);
        // A full queue drops the hint, as NATS may: the receivers find the change by their own checks.
        let _ = self.remote.try_send((gateway, hint));
    }

    /// Sends a hint to one gateway, which may be this process (`own`).
    pub(crate) fn send_to_gateway(&self, gateway: GatewayId, own: Option<GatewayId>, hint: Hint) {
        let hint = Arc::new(hint);
        if own == Some(gateway) {
            self.send_local(hint);
        } else {
            self.send_remote(Some(gateway), hint);
        }
    }
}

/// Passes hints of other processes, for all or for one gateway, to the listeners of this one, until the engine is
/// dropped.
pub(crate) async fn receive_remote(hints: Weak<Hints>, stream: Stream, gateway: Option<GatewayId>) {
    let mut remote = loop {
        match stream.subscribe_hints(gateway).await {
            Ok(remote) => break remote,
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "waiting for nats");
                tokio::time::sleep(RESUBSCRIBE_AFTER).await;
            }
        }
    };
    while let Some(hint) = remote.next().await {
        let Some(hints) = hints.upgrade() else { return };
        hints.send_local(Arc::new(hint));
    }
}

/// Applies hints to the engine's own caches until the engine is dropped. A lagging listener does not know what it
/// missed, so it invalidates everything.
pub(crate) async fn handle_hints(engine: Weak<Inner>, mut hints: broadcast::Receiver<Arc<Hint>>) {
    loop {
        let hint = hints.recv().await;
        let Some(inner) = engine.upgrade() else { return };
        match hint.as_deref() {
            // An unverified revocation is enough for this: a token that is still valid costs one lookup more.
            Ok(Hint::TokenRevoked { hash } | Hint::TokenDoubted { hash }) => {
                if let Ok(hash) = hash.parse::<TokenHash>() {
                    inner.access.tokens.forget(&hash);
                    inner.observers.cache.notify_access_change();
                }
            }
            Ok(Hint::WorkspaceDeleted { workspace }) => {
                inner.access.tokens.forget_workspace(*workspace);
                inner.observers.cache.request_refresh();
                inner.observers.cache.notify_access_change();
            }
            Ok(Hint::ObserversChanged) => inner.observers.cache.request_refresh(),
            Ok(Hint::MembersChanged { workspace, channel }) => {
                inner.messages.audiences.forget(WorkspaceScope::from_engine_row(*workspace), *channel);
            }
            // Also rights: both are cached facts of a workspace that change rarely.
            Ok(Hint::QuotasChanged { workspace }) => {
                inner.quotas.forget(*workspace);
                inner.access.tokens.forget_workspace(*workspace);
            }
            Ok(_) => {}
            Err(broadcast::error::RecvError::Lagged(_)) => {
                inner.observers.cache.request_refresh();
                // Quotas and audiences stay: quotas are read again within a minute, and each commit checks its
                // audience.
                inner.access.tokens.forget_all();
            }
            Err(broadcast::error::RecvError::Closed) => return,
        }
    }
}

/// Sends the hints of this process to NATS until the engine is dropped.
pub(crate) async fn forward_to_nats(stream: Stream, mut queue: mpsc::Receiver<RemoteHint>) {
    while let Some((gateway, hint)) = queue.recv().await {
        stream.send_hint(gateway, &hint).await;
    }
}

#[cfg(test)]
mod tests {
    use relay_domain::WorkspaceId;

    use super::*;

    #[test]
    fn redrives_hint_sockets_and_http_push() {
        let (hints, _queue) = Hints::new();
        let mut received = hints.subscribe();
        let (workspace, agent) = (WorkspaceId::new(7), AgentId::new(1));
        hints.deliveries_redriven(&[(WorkspaceScope::from_engine_row(workspace), agent)]);
        let mut seen = [false; 2];
        while let Ok(hint) = received.try_recv() {
            let (slot, agents) = if let Hint::MailboxesChanged { agents } = &*hint {
                (0, agents)
            } else if let Hint::DeliveriesDue { agents } = &*hint {
                (1, agents)
            } else {
                panic!("{hint:?}")
            };
            seen[slot] = *agents == [(workspace, agent)];
        }
        assert_eq!(seen, [true, true]);
    }
}
