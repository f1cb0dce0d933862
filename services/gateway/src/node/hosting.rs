//! Agents of a connection: those located on its provider, and when their deliveries start.
//!
//! Methods of [`Connection`] that apply the effects of requests, and the jobs that read locations from storage.

use futures::{
    FutureExt as _, StreamExt as _,
    stream::{AbortHandle, Abortable},
};
use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, atomic::AtomicI64},
    time::Duration,
};

use relay_domain::{AgentId, WorkspaceScope};
use relay_engine::{
    Engine, EngineError, EngineResult,
    mailboxes::serving::{Fence, MailboxPosition, Tail},
};
use tokio::time::Instant;

use super::{
    connection::{Connection, JobResult},
    control::{Effect, ProviderBinding},
    delayed_acks::DelayedAcks,
    served_agent::{ServedAgent, Start},
};

/// Delay between attempts while storage is unavailable.
const STORAGE_RETRY: Duration = Duration::from_millis(500);
/// Attempts to record a disconnect: about five seconds, the duration of a Postgres restart.
const DISCONNECT_ATTEMPTS: u32 = 10;

/// Start mode of the streams of newly served agents.
#[derive(Clone, Copy)]
pub(super) enum StartMode {
    /// Wait until this connection names the agent.
    Gated,
    Open(Start),
}

/// Agents that a job starts to serve.
enum ServeTarget {
    Agents(Vec<(WorkspaceScope, AgentId)>),
    /// All agents located on the provider. Without inventories they are online as soon as the provider is.
    Provider {
        fence: Fence,
        online: bool,
    },
}

impl Connection {
    pub(super) fn apply_effect(&mut self, effect: Effect) {
        match effect {
            Effect::None => {}
            Effect::Registered(binding) => {
                tracing::info!(node.id = %binding.fence.node_id, node.provider = %binding.fence.provider, node.epoch = binding.fence.epoch, node.capabilities = binding.capabilities, "node registered");
                self.state.registry.bind_peer(&self.handle, &binding.fence);
                if binding.is_broker {
                    self.pacing.get_or_insert_default();
                }
                let start = if binding.cursor_granted {
                    StartMode::Gated
                } else {
                    StartMode::Open(self.default_start(&binding))
                };
                self.binding = Some(binding);
                self.serve_located(start);
            }
            Effect::Hosted { position, cursor_in_reply } => {
                let start = match &self.binding {
                    _ if cursor_in_reply => Start::ReportedFloor(position.settled_floor),
                    Some(binding) => self.default_start(binding),
                    None => Start::AckFloor,
                };
                // An existing stream belongs to a process that has ended. The new process starts at the cursor in its
                // reply.
                self.drop_agent(position.agent_id);
                self.named_agents.insert(position.agent_id);
                self.start_serving(
                    ServeTarget::Agents(vec![(position.scope, position.agent_id)]),
                    StartMode::Open(start),
                );
            }
            Effect::Listed(agents) => {
                let start = self.binding.as_ref().map_or(Start::AckFloor, |binding| self.default_start(binding));
                self.named_agents = agents.iter().copied().collect();
                // The other agents no longer run: nothing is sent to them until they are named again.
                let begun =
                    self.agents.iter().filter(|(_, (served, _))| served.stream.is_open() || served.is_probing());
                let silent: Vec<_> =
                    begun.map(|(agent, _)| *agent).filter(|agent| !self.named_agents.contains(agent)).collect();
                silent.into_iter().for_each(|agent| self.drop_agent(agent));
                let keys = agents.into_iter().map(|agent| (self.node.scope, agent)).collect();
                self.start_serving(ServeTarget::Agents(keys), StartMode::Open(start));
            }
            Effect::AgentLeft(agent) => {
                self.named_agents.remove(&agent);
                self.drop_agent(agent);
            }
            Effect::Deregistered => self.closing = Some((1000, "deregistered")),
            Effect::RegistrationFailed { held, close } => {
                self.binding = held.or(self.binding.take());
                self.closing = Some(close);
            }
        }
    }

    /// Start of agents for which no reply on this connection contained a cursor.
    pub(super) fn default_start(&self, binding: &ProviderBinding) -> Start {
        match binding.is_broker {
            true if self.state.engine.was_restored_recently() => Start::ProbeAlways,
            true => Start::Probe,
            false => Start::AckFloor,
        }
    }

    /// Serves all agents located here. Live tails open before positions are read, so that no delivery is lost between
    /// the two.
    pub(super) fn serve_located(&mut self, start: StartMode) {
        let Some(binding) = &self.binding else { return };
        let (fence, online) = (binding.fence.clone(), !binding.cursor_granted);
        self.start_serving(ServeTarget::Provider { fence, online }, start);
    }

    fn start_serving(&mut self, target: ServeTarget, start: StartMode) {
        let engine = self.state.engine.clone();
        self.jobs.push(read_target(engine, target, start).boxed());
    }

    /// Reads the agents located here again.
    pub(super) fn relist(&mut self) {
        let Some(binding) = &self.binding else { return };
        if self.relist_busy {
            self.relist_again = true;
            return;
        }
        self.relist_busy = true;
        self.jobs.push(relist(self.state.engine.clone(), binding.fence.clone()).boxed());
    }

    /// Applies a list of located agents. The list was requested at `asked`: agents adopted later may be missing from
    /// it.
    pub(super) fn on_relisted(&mut self, asked: Instant, positions: Vec<MailboxPosition>) {
        self.relist_busy = false;
        if std::mem::take(&mut self.relist_again) {
            self.relist();
        }
        let located: HashSet<AgentId> = positions.iter().map(|position| position.agent_id).collect();
        let older = self.agents.iter().filter(|(_, (served, _))| served.adopted < asked);
        let gone: Vec<_> = older.map(|(agent, _)| *agent).filter(|agent| !located.contains(agent)).collect();
        gone.into_iter().for_each(|agent| self.drop_agent(agent));
        let (known, new): (Vec<_>, Vec<_>) = positions.into_iter().partition(|p| self.agents.contains_key(&p.agent_id));
        known.iter().for_each(|position| self.on_position(position));
        let Some(binding) = &self.binding else { return };
        if new.is_empty() {
            return;
        }
        let start =
            if binding.cursor_granted { StartMode::Gated } else { StartMode::Open(self.default_start(binding)) };
        let keys = new.into_iter().map(|position| (position.scope, position.agent_id)).collect();
        self.start_serving(ServeTarget::Agents(keys), start);
    }

    /// Starts to serve an agent, or opens its stream if it was gated.
    pub(super) fn adopt_agent(&mut self, position: MailboxPosition, tail: Tail, start: StartMode) {
        let Some(binding) = &self.binding else { return };
        let agent = position.agent_id;
        let here = position.node_id == binding.fence.node_id
            && position.provider.as_ref().is_none_or(|provider| *provider == binding.fence.provider);
        if !here {
            return;
        }
        if self.agents.contains_key(&agent) {
            self.reclaim_route(&position);
        } else {
            let (abort, registration) = AbortHandle::new_pair();
            self.tails.push(Abortable::new(tail.map(move |live| (agent, live)).boxed(), registration).boxed());
            let next = Arc::new(AtomicI64::new(0));
            self.state.registry.route_agent(&self.handle, &binding.fence, agent, &next);
            self.names.insert(position.agent_name.clone(), agent);
            let mut served = ServedAgent::new(position.agent_name.clone(), abort);
            served.delayed_acks = binding.rereads_after_ack.then(DelayedAcks::default);
            self.agents.insert(agent, (served, next));
        }
        let start = match start {
            // The request that named it may be outdated: the agent has left, or a newer inventory does not list it.
            StartMode::Open(start) if !binding.cursor_granted || self.named_agents.contains(&agent) => start,
            // Named before on this connection: it came back.
            StartMode::Gated if self.named_agents.contains(&agent) => self.default_start(binding),
            StartMode::Open(_) | StartMode::Gated => return,
        };
        if let Some((served, _)) = self.agents.get_mut(&agent)
            && served.open(start, &position)
        {
            self.probing += 1;
        }
        self.queue_agent(agent);
    }

    /// Opens the streams whose broker did not report a position in time, as if it had none.
    pub(super) fn expire_late_probes(&mut self) {
        let late: Vec<_> =
            self.agents.iter().filter(|(_, (served, _))| served.probe_is_late()).map(|(agent, _)| *agent).collect();
        for agent in late {
            if let Some((served, _)) = self.agents.get_mut(&agent) {
                served.on_probe_answer(0, false);
                self.probing = self.probing.saturating_sub(1);
            }
            self.queue_agent(agent);
        }
    }

    pub(super) fn drop_agent(&mut self, agent: AgentId) {
        if let Some((served, _)) = self.agents.remove(&agent) {
            self.store_last_ack(agent, &served);
            self.probing -= usize::from(served.is_probing());
            // The name may belong to a newer agent by now.
            if self.names.get(&served.name) == Some(&agent) {
                self.names.remove(&served.name);
            }
            self.state.registry.unroute_agent(&self.handle, self.node.scope, agent);
        }
    }

    pub(super) fn on_position(&mut self, position: &MailboxPosition) {
        let Some(binding) = &self.binding else { return };
        let here = position.node_id == binding.fence.node_id
            && position.provider.as_ref().is_none_or(|provider| *provider == binding.fence.provider);
        if !here {
            self.drop_agent(position.agent_id);
            return;
        }
        self.reclaim_route(position);
        if let Some((served, _)) = self.agents.get_mut(&position.agent_id) {
            served.stream.on_head(position.next_seq - 1);
            served.stream.resume();
            self.queue_agent(position.agent_id);
        }
    }

    /// Keeps the route of an agent that is served here, also after another connection has served it temporarily.
    fn reclaim_route(&self, position: &MailboxPosition) {
        let (Some(binding), Some((_, next))) = (&self.binding, self.agents.get(&position.agent_id)) else { return };
        match self.state.registry.find_route(self.node.scope, position.agent_id) {
            Some((handle, _)) if handle == self.handle.id => {}
            // Unassigned: another connection of this node may serve it as well.
            Some((_, node)) if position.provider.is_none() && node == binding.fence.node_id => {}
            _ => self.state.registry.route_agent(&self.handle, &binding.fence, position.agent_id, next),
        }
    }
}

/// Opens live tails, then reads positions: a delivery committed in between appears in at least one of the two.
async fn open_tails(engine: &Engine, keys: &[(WorkspaceScope, AgentId)]) -> EngineResult<Vec<(MailboxPosition, Tail)>> {
    let mut tails = HashMap::with_capacity(keys.len());
    for (scope, agent) in keys {
        tails.insert(*agent, engine.tail_mailbox(*scope, *agent).await?);
    }
    let positions = engine.positions(keys).await?;
    Ok(positions.into_iter().filter_map(|p| tails.remove(&p.agent_id).map(|tail| (p, tail))).collect())
}

/// Opens the tails of a target, and retries while storage is unavailable. The job ends with its connection, which
/// bounds the retries.
async fn read_target(engine: Engine, target: ServeTarget, start: StartMode) -> JobResult {
    loop {
        match open_target(&engine, &target).await {
            Ok(agents) => return JobResult::Serve { start, agents },
            Err(error) => wait_for_storage(&error).await,
        }
    }
}

async fn open_target(engine: &Engine, target: &ServeTarget) -> EngineResult<Vec<(MailboxPosition, Tail)>> {
    match target {
        ServeTarget::Agents(keys) => open_tails(engine, keys).await,
        ServeTarget::Provider { fence, online } => {
            let located = engine.positions_of_provider(fence.scope, &fence.node_id, &fence.provider).await?;
            let ids: Vec<_> = located.iter().map(|position| position.agent_id).collect();
            if *online {
                engine.mark_agents_online(fence.scope, &ids).await?;
            }
            let keys: Vec<_> = ids.into_iter().map(|agent| (fence.scope, agent)).collect();
            open_tails(engine, &keys).await
        }
    }
}

/// Reads the agents located here now.
async fn relist(engine: Engine, fence: Fence) -> JobResult {
    loop {
        let asked = Instant::now();
        match engine.positions_of_provider(fence.scope, &fence.node_id, &fence.provider).await {
            Ok(positions) => return JobResult::Relisted { asked, positions },
            Err(error) => wait_for_storage(&error).await,
        }
    }
}

async fn wait_for_storage(error: &EngineError) {
    tracing::debug!(error = error as &dyn std::error::Error, "storage unavailable, retrying");
    tokio::time::sleep(STORAGE_RETRY).await;
}

/// Records that a connection has ended. Retries for a few seconds; after that the worker finds the expired connection
/// half a minute later.
pub(super) async fn disconnect_provider(engine: &Engine, fence: &Fence) {
    for _ in 0..DISCONNECT_ATTEMPTS {
        match engine.disconnect_provider(fence).await {
            Ok(_) => return,
            Err(error) => wait_for_storage(&error).await,
        }
    }
}
