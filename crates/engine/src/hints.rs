//! Hints: wake-ups without authority. They go to every listener of this process and, over NATS, to the other processes.
//! A lost hint costs latency only.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use relay_domain::{
    AgentId, ChannelId, GatewayId, NodeId, ProviderName, WorkspaceId, WorkspaceScope, access::token::TokenHash,
    metric_names::HINTS_SENT, nodes::NodeKind,
};
use relay_store::nodes::locations::AgentLocation;
pub use relay_stream::Hint;
use relay_stream::Stream;
use relay_tasks::spawn_isolated;
use tokio::sync::{broadcast, mpsc};

use crate::{Inner, core::Core};

/// Bound of both queues. A slow listener loses the oldest hint, a slow NATS the newest.
const QUEUE: usize = 4096;

/// Keeps a hint far below NATS' payload limit: a notice has about 300 bytes.
const NOTICES_PER_HINT: usize = 1000;

const RESUBSCRIBE_AFTER: Duration = Duration::from_millis(500);

/// Keeps a hint far below NATS' payload limit.
const MAILBOXES_PER_HINT: usize = 1000;

/// Mailboxes by the gateway that serves them.
type MailboxesByGateway = HashMap<GatewayId, Vec<(WorkspaceId, AgentId)>>;

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

    /// Subscribes to the hints of all processes, except notices, from now on. A listener that lags by more than 4096 hints misses the
    /// oldest.
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

    /// Has this process compare a mailbox with its rows, because a message about it could not be verified.
    pub fn compare_mailbox(&self, scope: WorkspaceScope, agent: AgentId) {
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

    /// Sends a best-effort event to sockets.
    pub(crate) fn notify_all(&self, scope: WorkspaceScope, event: SocketEvent<'_>) {
        let SocketEvent { agents, topic, event, data, event_id } = event;
        self.publish(Hint::Notify {
            workspace: scope.workspace_id(),
            agents,
            topic: topic.to_owned(),
            event: event.to_owned(),
            data,
            event_id,
        });
    }

    fn publish(&self, hint: Hint) {
        let hint = Arc::new(hint);
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

/// Events of one kind for the socket of one agent.
pub(crate) struct AgentNotices {
    pub(crate) scope: WorkspaceScope,
    pub(crate) agent: AgentId,
    pub(crate) event: &'static str,
    /// Data of each event.
    pub(crate) each: Vec<serde_json::Value>,
}

impl Core {
    /// Sends best-effort events about the deliveries of their senders, together and only to the gateways that serve
    /// these. One post to many full mailboxes, or many dead letters, cause so many.
    pub(crate) fn notify_senders(&self, notices: Vec<AgentNotices>) {
        if notices.is_empty() {
            return;
        }
        let core = self.clone();
        spawn_isolated("notices", async move {
            let agents: Vec<_> = notices.iter().map(|one| (one.scope, one.agent)).collect();
            match core.store.gateways_of_agents(&agents).await {
                Ok(locations) => notices.into_iter().for_each(|one| core.send_notices(one, &locations)),
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "senders are not notified");
                }
            }
        });
    }

    fn send_notices(&self, notices: AgentNotices, locations: &[AgentLocation]) {
        let AgentNotices { scope, agent, event, each } = notices;
        let own = locations.iter().filter(|location| (location.scope, location.agent_id) == (scope, agent));
        for location in own {
            for each in each.chunks(NOTICES_PER_HINT) {
                let (workspace, topic, event) = (scope.workspace_id(), "agent".to_owned(), event.to_owned());
                let hint = Hint::NotifyEach { workspace, agent, topic, event, each: each.to_vec() };
                match (location.kind, location.gateway_id) {
                    // Workers call its endpoint.
                    (NodeKind::HttpPush, _) => self.hints.publish(hint),
                    (NodeKind::Ws | NodeKind::Poll, Some(gateway)) => {
                        self.hints.send_to_gateway(gateway, self.gateway_id(), hint);
                    }
                    (NodeKind::Ws | NodeKind::Poll, None) => {}
                }
            }
        }
    }
}

impl Core {
    /// Hints that rows of these mailboxes were settled by the engine: to the gateways that serve them, and to all
    /// processes for agents whose deliveries workers dispatch or any gateway hands out. Expiry settles many at once.
    pub(crate) fn mailboxes_settled(&self, mailboxes: Vec<(WorkspaceScope, AgentId)>) {
        let core = self.clone();
        spawn_isolated("hints", async move {
            match core.store.gateways_of_agents(&mailboxes).await {
                Ok(locations) => {
                    let (for_all, by_gateway) = route_mailboxes(&locations);
                    core.hints.mailboxes_changed(for_all);
                    for (gateway, agents) in by_gateway {
                        for some in agents.chunks(MAILBOXES_PER_HINT) {
                            let hint = Hint::MailboxesChanged { agents: some.to_vec() };
                            core.hints.send_to_gateway(gateway, core.gateway_id(), hint);
                        }
                    }
                }
                Err(error) => {
                    tracing::debug!(
                        error = &error as &dyn std::error::Error,
                        "failed to locate mailboxes, all processes get the hint"
                    );
                    core.hints.mailboxes_changed(mailboxes);
                }
            }
        });
    }
}

/// Divides mailboxes into those of concern to all processes and those of one gateway. Agents that are served by none
/// need no hint.
fn route_mailboxes(locations: &[AgentLocation]) -> (Vec<(WorkspaceScope, AgentId)>, MailboxesByGateway) {
    let (mut for_all, mut by_gateway) = (Vec::new(), MailboxesByGateway::new());
    for location in locations {
        let (scope, agent) = (location.scope, location.agent_id);
        match (location.kind, location.gateway_id) {
            (NodeKind::HttpPush | NodeKind::Poll, _) => for_all.push((scope, agent)),
            (NodeKind::Ws, Some(gateway)) => {
                by_gateway.entry(gateway).or_default().push((scope.workspace_id(), agent));
            }
            (NodeKind::Ws, None) => {}
        }
    }
    (for_all, by_gateway)
}

/// Passes hints of other processes, for all or for one gateway, to the listeners of this one, until the engine is
/// dropped.
pub(crate) async fn receive_remote(hints: Weak<Hints>, stream: Stream, gateway: Option<GatewayId>) {
    let mut remote = loop {
        let listened = match gateway {
            None => stream.subscribe_hints().await,
            Some(gateway) => stream.subscribe_hints_to(gateway).await,
        };
        match listened {
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
                inner.quotas.forget(*workspace).await;
                inner.access.tokens.forget_workspace(*workspace);
            }
            Ok(_) => {}
            Err(broadcast::error::RecvError::Lagged(_)) => {
                inner.observers.cache.request_refresh();
                inner.access.tokens.forget_all();
            }
            Err(broadcast::error::RecvError::Closed) => return,
        }
    }
}

/// Sends the hints of this process to NATS until the engine is dropped.
pub(crate) async fn forward_to_nats(stream: Stream, mut queue: mpsc::Receiver<RemoteHint>) {
    while let Some((gateway, hint)) = queue.recv().await {
        match gateway {
            None => stream.send_hint(&hint).await,
            Some(gateway) => stream.send_hint_to(gateway, &hint).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mailboxes_of_sockets_are_of_concern_to_their_gateways_only() {
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(7));
        let location = |agent, kind, gateway: Option<i64>| AgentLocation {
            scope,
            agent_id: AgentId::new(agent),
            kind,
            gateway_id: gateway.map(GatewayId::new),
        };
        let (for_all, by_gateway) = route_mailboxes(&[
            location(1, NodeKind::Ws, Some(10)),
            location(2, NodeKind::Ws, Some(20)),
            location(3, NodeKind::Ws, Some(10)),
            location(4, NodeKind::Ws, None),
            location(5, NodeKind::HttpPush, None),
            location(6, NodeKind::Poll, None),
        ]);
        assert_eq!(for_all, [(scope, AgentId::new(5)), (scope, AgentId::new(6))]);
        let of_gateway = |id, agents: &[i64]| {
            (GatewayId::new(id), agents.iter().map(|agent| (scope.workspace_id(), AgentId::new(*agent))).collect())
        };
        assert_eq!(by_gateway, HashMap::from([of_gateway(10, &[1, 3]), of_gateway(20, &[2])]));
    }

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
