//! Registry of this gateway's connections, and the loops that concern all of them: the lease, hints, liveness probes.
//!
//! [`Registry`] is shared by every connection task; events reach a connection through its [`Handle`].

use std::{
    collections::{HashMap, HashSet},
    hash::Hash,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::Duration,
};

use relay_domain::{
    AgentId, GatewayId, NodeId, ProviderName, WorkspaceScope,
    access::token::TokenHash,
    nodes::{DIRECT_ID_PREFIX, takeover::ProbeOutcome},
};
use relay_engine::{
    Engine,
    actions::InvokeFrame,
    hints::Hint,
    mailboxes::serving::{ConnectedProvider, Fence, LiveFrame, MailboxPosition},
    processes::gateway_lease::LEASE,
};
use tokio::sync::{Notify, broadcast, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    notices::{MissedWindow, Notice},
    queue::{Receiver, Sender, queue},
    relist_pause::RelistPause,
    silence_checks::{MAILBOXES_PER_QUERY, UncheckedPlaces},
};

/// Least time between two checks of all mailboxes, and two of all bindings, after messages were lost.
pub(super) const FULL_CHECK_PAUSE: Duration = Duration::from_secs(1);
/// Renewal interval of the gateway lease.
pub(super) const LEASE_RENEW_INTERVAL: Duration = Duration::from_secs(1);
/// Events that may wait for a connection. Further ones are dropped: all but closes are hints, and the silence check
/// finds what they announced.
pub(super) const MAX_QUEUED_EVENTS: usize = 256;
/// Time in which nearly all commits end.
const COMPARISON_DELAY: Duration = Duration::from_millis(300);
/// Messages with live copies that may wait for a connection, whose task takes them between two steps. Of each, its
/// share of the copies waits, about 96 KiB at most, and all of them take 12 MiB. A gateway sends some hundred messages
/// a second, so that the task may be busy for tenths of a second. The mailboxes of further ones are compared with
/// storage.
const MAX_QUEUED_COPIES: usize = 128;

/// Event for a connection from elsewhere in this gateway.
#[derive(Debug)]
pub(super) enum Event {
    /// Current positions of mailboxes.
    Positions(Vec<MailboxPosition>),
    /// Agents came or left: read the located agents again.
    Relist,
    /// Best-effort event for these agents.
    Notice { agents: Vec<AgentId>, notice: Arc<Notice> },
    /// Best-effort event for all agents of the connection.
    WorkspaceNotice(Arc<Notice>),
    /// An invocation for the connection's provider.
    Invoke(Arc<InvokeFrame>),
    /// Another connection took the provider under this epoch.
    ProviderTaken { epoch: i64 },
    /// Close the connection.
    Close { code: u16, reason: &'static str },
    /// Prove that the peer is alive.
    ProveLiveness(oneshot::Sender<ProbeOutcome>),
}

/// Address of a connection task.
#[derive(Debug, Clone)]
pub(super) struct Handle {
    pub(super) id: u64,
    events: Sender<Event>,
    pub(super) copies: Sender<Vec<(AgentId, LiveFrame)>>,
}

/// Queues of a connection task that are filled from elsewhere in this gateway.
pub(super) struct Inbox {
    pub(super) events: Receiver<Event>,
    /// Live copies for agents that are routed to the connection, or unassigned on its node; those of one message
    /// together.
    pub(super) copies: Receiver<Vec<(AgentId, LiveFrame)>>,
}

impl Handle {
    /// Sends an event. False if the queue is full or the connection has ended.
    pub(super) fn try_send(&self, event: Event) -> bool {
        self.events.try_send(event)
    }

    /// Closes the connection. Unlike other events, a close needs no room in the queue.
    pub(super) fn close(&self, code: u16, reason: &'static str) {
        self.events.send_above_limit(Event::Close { code, reason });
    }
}

#[derive(Debug)]
pub(super) struct AgentRoute {
    pub(super) handle: Handle,
    pub(super) node_id: NodeId,
    pub(super) provider: ProviderName,
    /// Next seq that the stream sends.
    pub(super) next: Arc<AtomicI64>,
    /// Set while the agent may have missed outcomes of its invocations.
    pub(super) missed: Option<MissedWindow>,
}

#[derive(Debug)]
pub(super) struct Peer {
    pub(super) handle: Handle,
    /// Token that opened the socket.
    pub(super) token: TokenHash,
    /// The node is one agent's own connection.
    pub(super) is_direct: bool,
    /// Provider that the connection registered as, and when.
    pub(super) fence: Option<Fence>,
    pub(super) bound_at: Instant,
    /// True if the invocations sent to the previous connection have been sent again.
    pub(super) resent_invocations: bool,
}

#[derive(Debug, Default)]
pub(super) struct Maps {
    pub(super) peers: HashMap<u64, Peer>,
    pub(super) nodes: HashMap<(WorkspaceScope, NodeId), Vec<u64>>,
    /// Connections by the token that opened them.
    pub(super) tokens: HashMap<TokenHash, Vec<u64>>,
    pub(super) agents: HashMap<(WorkspaceScope, AgentId), AgentRoute>,
    /// Connections of providers that host agents, which receive notices to a whole workspace once.
    pub(super) brokers: HashMap<WorkspaceScope, Vec<u64>>,
    /// The agents among them that are on their own nodes.
    pub(super) direct: HashMap<WorkspaceScope, super::direct_agents::DirectAgents>,
}

/// Connections of this gateway. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Registry {
    maps: Arc<Mutex<Maps>>,
    ids: Arc<AtomicU64>,
    /// Mailboxes that are compared as soon as storage has answered before: of hints, and of copies that were not
    /// verified.
    due_comparisons: Arc<Mutex<HashSet<(WorkspaceScope, AgentId)>>>,
    due_comparisons_notify: Arc<Notify>,
    /// Mailboxes that are compared after [`COMPARISON_DELAY`]: of new routes, and of copies that were dropped.
    delayed_comparisons: Arc<Mutex<HashSet<(WorkspaceScope, AgentId)>>>,
    delayed_comparisons_notify: Arc<Notify>,
    /// Compared by the next silence check whether or not the change feed names them.
    pub(super) unchecked: Arc<Mutex<UncheckedPlaces>>,
    /// Workspaces that are said to be deleted and have connections here.
    pub(super) ended: Arc<Mutex<HashSet<WorkspaceScope>>>,
    pub(super) ended_notify: Arc<Notify>,
    pub(super) invocation_notify: Arc<Notify>,
    started: Instant,
    /// Time until which this gateway certainly holds its lease, in milliseconds after `started`.
    trusted_until_ms: Arc<AtomicU64>,
}

impl Default for Registry {
    fn default() -> Self {
        Self {
            maps: Arc::default(),
            ids: Arc::default(),
            due_comparisons: Arc::default(),
            due_comparisons_notify: Arc::default(),
            delayed_comparisons: Arc::default(),
            delayed_comparisons_notify: Arc::default(),
            unchecked: Arc::default(),
            ended: Arc::default(),
            ended_notify: Arc::default(),
            invocation_notify: Arc::default(),
            started: Instant::now(),
            trusted_until_ms: Arc::default(),
        }
    }
}

/// Removes a connection from an index, and its key with the last one.
fn remove_from_index<K: Eq + Hash>(index: &mut HashMap<K, Vec<u64>>, key: &K, id: u64) {
    if let Some(ids) = index.get_mut(key) {
        ids.retain(|other| *other != id);
        if ids.is_empty() {
            index.remove(key);
        }
    }
}

impl Registry {
    pub(super) fn maps(&self) -> MutexGuard<'_, Maps> {
        self.maps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add_peer(&self, scope: WorkspaceScope, node: &NodeId, token: TokenHash) -> (Handle, Inbox) {
        let ((events, event_inbox), (copies, copy_inbox)) = (queue(MAX_QUEUED_EVENTS), queue(MAX_QUEUED_COPIES));
        let handle = Handle { id: self.ids.fetch_add(1, Ordering::Relaxed), events, copies };
        let mut maps = self.maps();
        maps.peers.insert(
            handle.id,
            Peer {
                handle: handle.clone(),
                token,
                is_direct: node.as_str().starts_with(DIRECT_ID_PREFIX),
                fence: None,
                bound_at: Instant::now(),
                resent_invocations: false,
            },
        );
        maps.nodes.entry((scope, node.clone())).or_default().push(handle.id);
        maps.tokens.entry(token).or_default().push(handle.id);
        metrics::gauge!(relay_domain::metric_names::CONNECTED_NODES).increment(1);
        (handle, Inbox { events: event_inbox, copies: copy_inbox })
    }

    /// Records the provider of a connection.
    pub(super) fn bind_peer(&self, handle: &Handle, fence: &Fence) {
        // The lock of the maps is held over that of the unchecked places below; no code takes them in the other order.
        let maps = &mut *self.maps();
        if let Some(peer) = maps.peers.get_mut(&handle.id) {
            // A connection may register again.
            if peer.fence.is_none() && !peer.is_direct {
                maps.brokers.entry(fence.scope).or_default().push(handle.id);
            }
            peer.fence = Some(fence.clone());
            peer.bound_at = Instant::now();
            peer.resent_invocations = false;
        }
        // An agent may have moved to the node between the first list of its agents and now.
        self.check_node_later(fence.scope, &fence.node_id);
        // Invocations may be waiting for it.
        self.invocation_notify.notify_one();
    }

    pub(super) fn remove_peer(&self, handle: &Handle, scope: WorkspaceScope, node: &NodeId) {
        let mut maps = self.maps();
        let Some(peer) = maps.peers.remove(&handle.id) else { return };
        remove_from_index(&mut maps.nodes, &(scope, node.clone()), handle.id);
        remove_from_index(&mut maps.tokens, &peer.token, handle.id);
        remove_from_index(&mut maps.brokers, &scope, handle.id);
        metrics::gauge!(relay_domain::metric_names::CONNECTED_NODES).decrement(1);
    }

    /// Runs the loops that concern all connections, until `stop`.
    pub async fn run(self, engine: Engine, gateway: GatewayId, stop: CancellationToken) {
        let loops = async {
            tokio::join!(
                self.run_silence_checks(&engine, gateway),
                self.handle_hints(&engine),
                self.compare_due_mailboxes(&engine),
                self.compare_delayed_mailboxes(),
                self.answer_probes(&engine, gateway),
                self.scan_invocations(&engine, gateway),
                self.run_outcome_scans(&engine),
                self.close_suspended_and_drained(&engine),
                self.check_tokens(&engine),
            )
        };
        // A panic in one loop ends this whole task, and thereby the process (ADR 0022).
        tokio::join!(self.renew_lease_until(&engine, gateway, &stop), stop.run_until_cancelled(loops));
    }

    #[must_use]
    pub fn connections(&self) -> usize {
        self.maps().peers.len()
    }

    /// Closes all connections, spread evenly over `within`, so that their nodes do not all reconnect at once.
    pub async fn drain(&self, within: Duration, code: u16, reason: &'static str) {
        // A copy: the lock must not be held over the pauses, in which connections end and remove themselves.
        let handles: Vec<Handle> = self.maps().peers.values().map(|peer| peer.handle.clone()).collect();
        let pause = within / u32::try_from(handles.len().max(1)).unwrap_or(u32::MAX);
        for handle in handles {
            handle.close(code, reason);
            tokio::time::sleep(pause).await;
        }
    }

    /// Returns whether deliveries may be sent. Without a lease, or shortly after the process was paused, the agents
    /// may have been moved elsewhere, so nothing unverified is sent.
    pub(super) fn is_trusted(&self) -> bool {
        self.elapsed_ms() < self.trusted_until_ms.load(Ordering::Relaxed)
    }

    pub(super) fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Renews the lease each second until `stop`. A renewal in progress is not interrupted: Postgres could apply it
    /// after the release of the lease.
    async fn renew_lease_until(&self, engine: &Engine, gateway: GatewayId, stop: &CancellationToken) {
        let mut first = true;
        loop {
            // The lease counts from before the request, whose duration is unknown.
            let (asked, asked_at) = (self.elapsed_ms(), Instant::now());
            match engine.processes().renew_lease(gateway).await {
                Ok(held) => {
                    let broken = !std::mem::take(&mut first) && (held.is_some() || !self.is_trusted());
                    if let (true, Some(held)) = (broken, held) {
                        self.close_lost_connections(engine, asked_at, &held).await;
                    }
                    if broken {
                        self.compare_all_mailboxes(engine).await;
                    }
                    // Last: positions that a break may have changed are queued before deliveries may leave again.
                    let lease = u64::try_from(LEASE.as_millis()).unwrap_or(0);
                    self.trusted_until_ms.store(asked + lease, Ordering::Relaxed);
                }
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "lease renewal failed, retrying");
                }
            }
            if stop.run_until_cancelled(tokio::time::sleep(LEASE_RENEW_INTERVAL)).await.is_none() {
                return;
            }
        }
    }

    /// Closes connections that hold their provider no longer: another connection took it over, or their token was
    /// revoked and the node is deleted. Connections that registered after `asked` may be missing from `held`.
    pub(super) async fn close_lost_connections(&self, engine: &Engine, asked: Instant, held: &[ConnectedProvider]) {
        let lost = self.lost_connections(asked, held);
        if lost.is_empty() {
            return;
        }
        let tokens: Vec<TokenHash> = lost.iter().map(|(token, _)| *token).collect();
        let revoked = match engine.access().revoked_tokens(&tokens).await {
            Ok(revoked) => revoked,
            Err(error) => {
                // Their clients come back and are refused then, if their tokens are revoked.
                tracing::debug!(error = &error as &dyn std::error::Error, "tokens of lost connections are unknown");
                Vec::new()
            }
        };
        for (token, handle) in lost {
            if revoked.contains(&token) {
                self.close_revoked(&token);
            } else {
                handle.close(1012, "taken over");
            }
        }
    }

    fn lost_connections(&self, asked: Instant, held: &[ConnectedProvider]) -> Vec<(TokenHash, Handle)> {
        let held: HashSet<&ConnectedProvider> = held.iter().collect();
        let maps = self.maps();
        let lost = maps.peers.values().filter(|peer| {
            peer.bound_at < asked
                && peer.fence.as_ref().is_some_and(|fence| {
                    !held.contains(&ConnectedProvider {
                        scope: fence.scope,
                        node_id: fence.node_id.clone(),
                        provider: fence.provider.clone(),
                        epoch: fence.epoch,
                    })
                })
        });
        lost.map(|peer| (peer.token, peer.handle.clone())).collect()
    }

    async fn handle_hints(&self, engine: &Engine) {
        let (mut hints, mut notices) = (engine.hints().subscribe(), engine.hints().subscribe_notices());
        let mut relists = RelistPause::new(FULL_CHECK_PAUSE, Instant::now());
        loop {
            let due_at = relists.due_at();
            let hint = tokio::select! {
                // Changes come before notices.
                biased;
                () = tokio::time::sleep_until(due_at.unwrap_or_else(Instant::now)), if due_at.is_some() => {
                    relists.complete(Instant::now());
                    metrics::counter!(relay_domain::metric_names::RELISTS).increment(1);
                    for peer in self.maps().peers.values() {
                        peer.handle.try_send(Event::Relist);
                    }
                    continue;
                }
                hint = hints.recv() => hint.inspect_err(|error| {
                    if let broadcast::error::RecvError::Lagged(missed) = error {
                        tracing::warn!(missed, "hints were missed, the silence check will find the changes");
                        relists.request();
                    }
                }),
                // Lost notices concern no connection's agents.
                notice = notices.recv() => notice,
            };
            match hint {
                Ok(hint) => self.handle_hint(&hint),
                Err(broadcast::error::RecvError::Lagged(_)) => self.mark_all_possibly_missed(),
                Err(broadcast::error::RecvError::Closed) => return,
            }
        }
    }

    /// Has mailboxes that are served here compared with storage. In another loop: slow storage must not delay hints.
    pub(super) fn compare_soon(&self, keys: impl IntoIterator<Item = (WorkspaceScope, AgentId)>) {
        self.due_comparisons.lock().unwrap_or_else(PoisonError::into_inner).extend(keys);
        self.due_comparisons_notify.notify_one();
    }

    /// Has mailboxes compared once commits have ended that are under way, and waiting copies were handled.
    pub(super) fn compare_later(&self, keys: impl IntoIterator<Item = (WorkspaceScope, AgentId)>) {
        self.delayed_comparisons.lock().unwrap_or_else(PoisonError::into_inner).extend(keys);
        self.delayed_comparisons_notify.notify_one();
    }

    /// Takes the mailboxes that wait for [`COMPARISON_DELAY`].
    pub(super) fn take_delayed_comparisons(&self) -> Vec<(WorkspaceScope, AgentId)> {
        self.delayed_comparisons.lock().unwrap_or_else(PoisonError::into_inner).drain().collect()
    }

    /// Has new routes, and mailboxes with dropped copies, compared once. A commit that began before the provider
    /// registered sends no live copy, or sends it to the gateway of the former socket; and a copy may come before the
    /// route.
    pub(super) async fn compare_delayed_mailboxes(&self) {
        loop {
            self.delayed_comparisons_notify.notified().await;
            // Taken before the wait, so that each mailbox waits for at least as long.
            let keys = self.take_delayed_comparisons();
            tokio::time::sleep(COMPARISON_DELAY).await;
            self.compare_soon(keys);
        }
    }

    /// Takes the mailboxes that are to be compared now.
    pub(super) fn take_due_comparisons(&self) -> Vec<(WorkspaceScope, AgentId)> {
        self.due_comparisons.lock().unwrap_or_else(PoisonError::into_inner).drain().collect()
    }

    /// Compares the mailboxes that wait for it, in batches.
    async fn compare_due_mailboxes(&self, engine: &Engine) {
        loop {
            self.due_comparisons_notify.notified().await;
            let keys = self.take_due_comparisons();
            for slice in keys.chunks(MAILBOXES_PER_QUERY) {
                self.compare_mailboxes(engine, slice).await;
            }
        }
    }

    fn handle_hint(&self, hint: &Hint) {
        match hint {
            Hint::MailboxesChanged { agents } => {
                let keys: Vec<_> = {
                    let maps = self.maps();
                    let keys = agents.iter().map(|(w, agent)| (WorkspaceScope::from_engine_row(*w), *agent));
                    keys.filter(|key| maps.agents.contains_key(key)).collect()
                };
                if !keys.is_empty() {
                    self.compare_soon(keys);
                }
            }
            Hint::NodesChanged { workspace, nodes } => {
                let scope = WorkspaceScope::from_engine_row(*workspace);
                let maps = self.maps();
                for id in nodes.iter().filter_map(|node| maps.nodes.get(&(scope, node.clone()))).flatten() {
                    if let Some(peer) = maps.peers.get(id) {
                        // If the queue is full, the change feed names the move within seconds.
                        peer.handle.try_send(Event::Relist);
                    }
                }
            }
            Hint::ProviderTaken { workspace, node, provider, epoch } => {
                let scope = WorkspaceScope::from_engine_row(*workspace);
                let maps = self.maps();
                for id in maps.nodes.get(&(scope, node.clone())).into_iter().flatten() {
                    let Some(peer) = maps.peers.get(id) else { continue };
                    // The hint also reaches the connection that took the provider, whose epoch it names.
                    let older = peer
                        .fence
                        .as_ref()
                        .is_some_and(|fence| fence.provider.as_str() == provider && fence.epoch < *epoch);
                    if older {
                        peer.handle.try_send(Event::ProviderTaken { epoch: *epoch });
                    }
                }
            }
            Hint::Invoke { .. } => self.handle_invoke_hint(hint),
            Hint::Notify { .. } | Hint::NotifyEach { .. } => self.handle_notify_hint(hint),
            Hint::TokenRevoked { hash } => {
                if let Ok(hash) = hash.parse() {
                    self.close_revoked(&hash);
                }
            }
            Hint::NoticeMissed { workspace, agents } => self.handle_missed_notice(*workspace, agents.as_deref()),
            Hint::WorkspaceDeleted { workspace } => {
                self.check_workspace(WorkspaceScope::from_engine_row(*workspace));
            }
            // The token check closes the sockets of a revoked token.
            Hint::TokenDoubted { .. }
            | Hint::MembersChanged { .. }
            | Hint::QuotasChanged { .. }
            | Hint::DeliveriesDue { .. }
            | Hint::ObserversChanged => {}
        }
    }
}
