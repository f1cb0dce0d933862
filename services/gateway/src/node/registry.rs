//! All connections of this gateway: who serves whom, and what concerns them all (the lease, the silence
//! check, hints, probes).

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use relay_domain::{AgentId, GatewayId, NodeId, ProviderName, WorkspaceScope, takeover::Proof};
use relay_engine::{
    Engine,
    actions::InvokeFrame,
    gateway::LEASE,
    hints::Hint,
    mailbox::{Fence, HeldProvider, Position},
};
use tokio::sync::{Notify, broadcast, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::notice::{Missed, Notice};

/// Every session is compared with its mailbox this often; with NATS away, more often.
const SILENCE_EVERY: Duration = Duration::from_secs(3);
const SILENCE_EVERY_WITHOUT_NATS: Duration = Duration::from_millis(500);
/// At one silence check in so many the nodes' agents are compared too.
const RELIST_ROUNDS: u32 = 4;
/// Mailboxes per statement of the silence check.
const SLICE: usize = 1000;
/// Leases are renewed this often.
pub(super) const RENEW_EVERY: Duration = Duration::from_secs(1);
/// Events that may wait for a connection. Past it they are dropped: all but closes are hints, which the
/// silence check makes up for.
pub(super) const EVENTS: usize = 256;

/// Something from outside for a connection.
#[derive(Debug)]
pub(super) enum Event {
    /// Mailboxes stand so.
    Positions(Vec<Position>),
    /// Agents came or left: read again who is here.
    Relist,
    /// A best-effort event for these agents.
    Notice { agents: Vec<AgentId>, notice: Arc<Notice> },
    /// An invocation for the connection's provider.
    Invoke(Arc<InvokeFrame>),
    /// The provider that the connection registered as is held under this epoch.
    Taken { epoch: i64 },
    /// The connection is over.
    Close { code: u16, reason: &'static str },
    /// Prove that the peer is alive.
    Prove(oneshot::Sender<Proof>),
}

/// How to reach a connection.
#[derive(Debug, Clone)]
pub(super) struct Handle {
    pub(super) id: u64,
    events: mpsc::Sender<Event>,
}

impl Handle {
    /// Tells it unless too much waits for it already. False then, or when it is gone.
    pub(super) fn tell(&self, event: Event) -> bool {
        self.events.try_send(event).is_ok()
    }

    /// Closing must arrive even at a busy connection.
    pub(super) fn close(&self, code: u16, reason: &'static str) {
        let events = self.events.clone();
        tokio::spawn(async move {
            let _ = events.send(Event::Close { code, reason }).await;
        });
    }
}

#[derive(Debug)]
pub(super) struct ServedBy {
    pub(super) handle: Handle,
    pub(super) node_id: NodeId,
    pub(super) provider: ProviderName,
    /// The seq that the session sends next.
    pub(super) next: Arc<AtomicI64>,
    /// Whether there may be outcomes that the agent has not been told.
    pub(super) missed: Option<Missed>,
}

#[derive(Debug)]
pub(super) struct Peer {
    pub(super) handle: Handle,
    /// What it registered as, and when.
    pub(super) fence: Option<Fence>,
    pub(super) bound_at: Instant,
    /// Whether all that an earlier connection was sent has been sent again.
    pub(super) looked_back: bool,
}

#[derive(Debug, Default)]
pub(super) struct Maps {
    pub(super) peers: HashMap<u64, Peer>,
    pub(super) nodes: HashMap<(WorkspaceScope, NodeId), Vec<u64>>,
    pub(super) agents: HashMap<(WorkspaceScope, AgentId), ServedBy>,
    /// Those of `agents` that are on their own nodes.
    pub(super) direct: HashMap<WorkspaceScope, super::direct::DirectAgents>,
}

/// The connections of this gateway. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Registry {
    maps: Arc<Mutex<Maps>>,
    ids: Arc<AtomicU64>,
    /// Mailboxes that hints have named and nobody has looked at yet. No more than this gateway serves.
    hinted: Arc<Mutex<HashSet<(WorkspaceScope, AgentId)>>>,
    hinted_news: Arc<Notify>,
    pub(super) invocation_news: Arc<Notify>,
    started: Instant,
    /// Until when this gateway holds its lease for certain, in milliseconds after `started`.
    trusted_until_ms: Arc<AtomicU64>,
}

impl Default for Registry {
    fn default() -> Self {
        Self {
            maps: Arc::default(),
            ids: Arc::default(),
            hinted: Arc::default(),
            hinted_news: Arc::default(),
            invocation_news: Arc::default(),
            started: Instant::now(),
            trusted_until_ms: Arc::default(),
        }
    }
}

impl Registry {
    pub(super) fn maps(&self) -> MutexGuard<'_, Maps> {
        self.maps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn enter(&self, scope: WorkspaceScope, node: &NodeId) -> (Handle, mpsc::Receiver<Event>) {
        let (events, inbox) = mpsc::channel(EVENTS);
        let handle = Handle { id: self.ids.fetch_add(1, Ordering::Relaxed), events };
        let mut maps = self.maps();
        maps.peers.insert(
            handle.id,
            Peer { handle: handle.clone(), fence: None, bound_at: Instant::now(), looked_back: false },
        );
        maps.nodes.entry((scope, node.clone())).or_default().push(handle.id);
        metrics::gauge!(relay_domain::metric_names::CONNECTED_NODES).increment(1);
        (handle, inbox)
    }

    /// The connection registered under this fence.
    pub(super) fn bind(&self, handle: &Handle, fence: &Fence) {
        if let Some(peer) = self.maps().peers.get_mut(&handle.id) {
            peer.fence = Some(fence.clone());
            peer.bound_at = Instant::now();
            peer.looked_back = false;
        }
        // Something may have waited for it.
        self.invocation_news.notify_one();
    }

    pub(super) fn leave(&self, handle: &Handle, scope: WorkspaceScope, node: &NodeId) {
        let mut maps = self.maps();
        if maps.peers.remove(&handle.id).is_none() {
            return;
        }
        if let Some(ids) = maps.nodes.get_mut(&(scope, node.clone())) {
            ids.retain(|id| *id != handle.id);
            if ids.is_empty() {
                maps.nodes.remove(&(scope, node.clone()));
            }
        }
        metrics::gauge!(relay_domain::metric_names::CONNECTED_NODES).decrement(1);
    }

    /// Runs what concerns all connections until `stop`.
    pub async fn run(self, engine: Engine, gateway: GatewayId, stop: CancellationToken) {
        let loops = async {
            tokio::join!(
                self.keep_lease(&engine, gateway),
                self.check_silence(&engine, gateway),
                self.obey_hints(&engine),
                self.look_at_hinted(&engine),
                self.answer_probes(&engine, gateway),
                self.look_for_invocations(&engine, gateway),
                self.catch_callers_up(&engine),
                self.close_kept_out(&engine),
            )
        };
        let _ = stop.run_until_cancelled(loops).await;
    }

    /// How many connections there are.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.maps().peers.len()
    }

    /// Closes all connections, spread evenly over `within`, so that their nodes do not all come back in
    /// the same moment.
    pub async fn drain(&self, within: Duration, code: u16, reason: &'static str) {
        let handles: Vec<Handle> = self.maps().peers.values().map(|peer| peer.handle.clone()).collect();
        let pause = within / u32::try_from(handles.len().max(1)).unwrap_or(u32::MAX);
        for handle in handles {
            handle.close(code, reason);
            tokio::time::sleep(pause).await;
        }
    }

    /// Whether deliveries may be written. Without a lease, or for a moment after waking from a pause, the
    /// rest of the engine may have moved agents elsewhere: nothing unverified is sent.
    pub(super) fn is_trusted(&self) -> bool {
        self.elapsed_ms() < self.trusted_until_ms.load(Ordering::Relaxed)
    }

    pub(super) fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    async fn keep_lease(&self, engine: &Engine, gateway: GatewayId) {
        let mut first = true;
        loop {
            // The lease counts from before it was asked for.
            let (asked, asked_at) = (self.elapsed_ms(), Instant::now());
            match engine.renew_lease(gateway).await {
                Ok(held) => {
                    let broken = !std::mem::take(&mut first) && (held.is_some() || !self.is_trusted());
                    if let (true, Some(held)) = (broken, held) {
                        self.close_lost(asked_at, &held);
                    }
                    if broken {
                        self.look_at_all(engine).await;
                    }
                    let lease = u64::try_from(LEASE.as_millis()).unwrap_or(0);
                    self.trusted_until_ms.store(asked + lease, Ordering::Relaxed);
                }
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "the gateway's lease was not renewed");
                }
            }
            tokio::time::sleep(RENEW_EVERY).await;
        }
    }

    /// After a break of the lease: connections that the rest of the engine has given up must end.
    /// A connection that registered after `asked` may not be among those held.
    fn close_lost(&self, asked: Instant, held: &[HeldProvider]) {
        let held: HashSet<&HeldProvider> = held.iter().collect();
        let maps = self.maps();
        let lost = maps.peers.values().filter(|peer| {
            peer.bound_at < asked
                && peer.fence.as_ref().is_some_and(|fence| {
                    !held.contains(&HeldProvider {
                        scope: fence.scope,
                        node_id: fence.node_id.clone(),
                        provider: fence.provider.clone(),
                        epoch: fence.epoch,
                    })
                })
        });
        for peer in lost {
            peer.handle.close(1012, "taken over");
        }
    }

    /// Silence is checked, not trusted: live copies are at-most-once.
    async fn check_silence(&self, engine: &Engine, gateway: GatewayId) {
        let mut link = engine.link();
        let mut round = 0_u32;
        loop {
            let up = link.borrow_and_update().up;
            self.look_at_all(engine).await;
            if round.is_multiple_of(RELIST_ROUNDS) {
                self.look_at_nodes(engine).await;
                let asked = Instant::now();
                // A take-over whose hint was lost shows here at the latest.
                match engine.connections_held(gateway).await {
                    Ok(held) => self.close_lost(asked, &held),
                    Err(error) => {
                        tracing::debug!(error = &error as &dyn std::error::Error, "connections could not be compared");
                    }
                }
            }
            round = round.wrapping_add(1);
            let pause = if up { SILENCE_EVERY } else { SILENCE_EVERY_WITHOUT_NATS };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = link.changed() => {}
            }
        }
    }

    async fn look_at_all(&self, engine: &Engine) {
        let keys: Vec<_> = self.maps().agents.keys().copied().collect();
        for slice in keys.chunks(SLICE) {
            self.look_at(engine, slice).await;
        }
    }

    /// Finds agents that have come to a node unheard of: the hint was lost.
    async fn look_at_nodes(&self, engine: &Engine) {
        let keys: Vec<_> = self.maps().nodes.keys().cloned().collect();
        for slice in keys.chunks(SLICE) {
            let located = match engine.agents_on_nodes(slice).await {
                Ok(located) => located,
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "nodes could not be compared");
                    return;
                }
            };
            let maps = self.maps();
            for agent in located.iter().filter(|a| !maps.agents.contains_key(&(a.scope, a.agent_id))) {
                let ids = maps.nodes.get(&(agent.scope, agent.node_id.clone())).into_iter().flatten();
                for peer in ids.filter_map(|id| maps.peers.get(id)) {
                    let provider = peer.fence.as_ref().map(|fence| &fence.provider);
                    if provider.is_some() && (agent.provider.is_none() || agent.provider.as_ref() == provider) {
                        peer.handle.tell(Event::Relist);
                    }
                }
            }
        }
    }

    /// Reads where mailboxes stand and tells their connections what they do not know.
    async fn look_at(&self, engine: &Engine, keys: &[(WorkspaceScope, AgentId)]) {
        let positions = match engine.positions(keys).await {
            Ok(positions) => positions,
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "mailboxes could not be compared");
                return;
            }
        };
        let mut news: HashMap<u64, (Handle, Vec<Position>)> = HashMap::new();
        {
            let maps = self.maps();
            for position in positions {
                let Some(served) = maps.agents.get(&(position.scope, position.agent_id)) else { continue };
                let here = position.node_id == served.node_id
                    && position.provider.as_ref().is_none_or(|provider| *provider == served.provider);
                if !here || served.next.load(Ordering::Relaxed) != position.next_seq {
                    let entry = news.entry(served.handle.id).or_insert_with(|| (served.handle.clone(), Vec::new()));
                    entry.1.push(position);
                }
            }
        }
        for (handle, positions) in news.into_values() {
            handle.tell(Event::Positions(positions));
        }
    }

    async fn obey_hints(&self, engine: &Engine) {
        let mut hints = engine.hints().listen();
        loop {
            match hints.recv().await {
                Ok(hint) => self.obey(&hint),
                Err(broadcast::error::RecvError::Lagged(missed)) => {
                    tracing::warn!(missed, "hints were missed: the silence check makes up for them");
                    self.all_may_have_missed();
                    for peer in self.maps().peers.values() {
                        peer.handle.tell(Event::Relist);
                    }
                }
                Err(broadcast::error::RecvError::Closed) => return,
            }
        }
    }

    /// Looks at the mailboxes that hints have named, set-wise.
    async fn look_at_hinted(&self, engine: &Engine) {
        loop {
            self.hinted_news.notified().await;
            let keys: Vec<_> = self.hinted.lock().unwrap_or_else(PoisonError::into_inner).drain().collect();
            for slice in keys.chunks(SLICE) {
                self.look_at(engine, slice).await;
            }
        }
    }

    fn obey(&self, hint: &Hint) {
        match hint {
            Hint::MailboxesChanged { agents } => {
                let keys: Vec<_> = {
                    let maps = self.maps();
                    let keys = agents.iter().map(|(w, agent)| (WorkspaceScope::from_engine_row(*w), *agent));
                    keys.filter(|key| maps.agents.contains_key(key)).collect()
                };
                if !keys.is_empty() {
                    // Read beside this loop: a slow storage must not hold up the other hints.
                    self.hinted.lock().unwrap_or_else(PoisonError::into_inner).extend(keys);
                    self.hinted_news.notify_one();
                }
            }
            Hint::NodesChanged { workspace, nodes } => {
                let scope = WorkspaceScope::from_engine_row(*workspace);
                let maps = self.maps();
                for id in nodes.iter().filter_map(|node| maps.nodes.get(&(scope, node.clone()))).flatten() {
                    if let Some(peer) = maps.peers.get(id) {
                        peer.handle.tell(Event::Relist);
                    }
                }
            }
            Hint::ProviderTaken { workspace, node, provider, epoch } => {
                let scope = WorkspaceScope::from_engine_row(*workspace);
                let maps = self.maps();
                for id in maps.nodes.get(&(scope, node.clone())).into_iter().flatten() {
                    let Some(peer) = maps.peers.get(id) else { continue };
                    let older = peer
                        .fence
                        .as_ref()
                        .is_some_and(|fence| fence.provider.as_str() == provider && fence.epoch < *epoch);
                    if older {
                        peer.handle.tell(Event::Taken { epoch: *epoch });
                    }
                }
            }
            Hint::Invoke { .. } => self.obey_invoke(hint),
            Hint::Notify { .. } => self.obey_notify(hint),
            Hint::TokenRevoked { .. }
            | Hint::MembersChanged { .. }
            | Hint::QuotasChanged { .. }
            | Hint::DeliveriesDue { .. }
            | Hint::ObserversChanged => {}
        }
    }
}
