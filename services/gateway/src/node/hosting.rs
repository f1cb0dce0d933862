//! Which agents a connection serves: those located on its provider, from when they may flow.

use futures::{
    FutureExt as _, StreamExt as _,
    stream::{AbortHandle, Abortable},
};
use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, atomic::AtomicI64},
    time::{Duration, Instant},
};

use relay_domain::{AgentId, WorkspaceScope};
use relay_engine::{
    Engine, EngineError, EngineResult,
    mailbox::{Fence, Position, Tail},
};

use super::{
    connection::{Connection, Done},
    control::{Bound, Effect},
    held::HeldAcks,
    served::{Served, Start},
};

/// How long a job waits for a storage that is away.
const STORAGE_RETRY: Duration = Duration::from_millis(500);
/// How often the engine is told that a connection has ended while storage does not take it: for five seconds and
/// more, as long as a restart of Postgres takes.
const DISCONNECT_ATTEMPTS: u32 = 10;

/// How agents that come to be served start.
#[derive(Clone, Copy)]
pub(super) enum StartRule {
    /// Wait until this connection names them.
    Gated,
    Open(Start),
}

/// Which agents a job begins to serve.
enum Whom {
    These(Vec<(WorkspaceScope, AgentId)>),
    /// All that are located on the provider. Where no inventory will say which of them run, they are online
    /// with it.
    Located {
        fence: Fence,
        online: bool,
    },
}

impl Connection {
    pub(super) fn apply(&mut self, effect: Effect) {
        match effect {
            Effect::None => {}
            Effect::Registered(bound) => {
                tracing::info!(node.id = %bound.fence.node_id, node.provider = %bound.fence.provider, node.epoch = bound.fence.epoch, node.capabilities = bound.capabilities, "node registered");
                self.state.registry.bind(&self.handle, &bound.fence);
                if bound.is_broker {
                    self.pacing.get_or_insert_default();
                }
                let start =
                    if bound.cursor_granted { StartRule::Gated } else { StartRule::Open(self.start_of(&bound)) };
                self.bound = Some(bound);
                self.serve_located(start);
            }
            Effect::Hosted { position, told } => {
                let start = match &self.bound {
                    _ if told => Start::Told(position.settled_floor),
                    Some(bound) => self.start_of(bound),
                    None => Start::AckFloor,
                };
                // A session of before belongs to a process that is gone: the new one starts where it was told.
                self.drop_agent(position.agent_id);
                self.named.insert(position.agent_id);
                self.serve(Whom::These(vec![(position.scope, position.agent_id)]), StartRule::Open(start));
            }
            Effect::Listed(agents) => {
                let start = self.bound.as_ref().map_or(Start::AckFloor, |bound| self.start_of(bound));
                self.named = agents.iter().copied().collect();
                // Nobody runs the others any more: nothing is sent until they are named again.
                let begun =
                    self.agents.iter().filter(|(_, (served, _))| served.session.is_open() || served.is_probing());
                let silent: Vec<_> =
                    begun.map(|(agent, _)| *agent).filter(|agent| !self.named.contains(agent)).collect();
                silent.into_iter().for_each(|agent| self.drop_agent(agent));
                let keys = agents.into_iter().map(|agent| (self.node.scope, agent)).collect();
                self.serve(Whom::These(keys), StartRule::Open(start));
            }
            Effect::Left(agent) => {
                self.named.remove(&agent);
                self.drop_agent(agent);
            }
            Effect::Gone => self.closing = Some((1000, "deregistered")),
            Effect::Unregistered { held, close } => {
                self.bound = held.or(self.bound.take());
                self.closing = Some(close);
            }
        }
    }

    /// Where agents start that no reply on this connection has told a cursor for.
    pub(super) fn start_of(&self, bound: &Bound) -> Start {
        match bound.is_broker {
            true if self.state.engine.was_restored_lately() => Start::ProbeAnyhow,
            true => Start::Probe,
            false => Start::AckFloor,
        }
    }

    /// Serves all agents that are located here, tails first, so that nothing falls between.
    pub(super) fn serve_located(&mut self, start: StartRule) {
        let Some(bound) = &self.bound else { return };
        let (fence, online) = (bound.fence.clone(), !bound.cursor_granted);
        self.serve(Whom::Located { fence, online }, start);
    }

    fn serve(&mut self, whom: Whom, start: StartRule) {
        let engine = self.state.engine.clone();
        self.jobs.push(serve(engine, whom, start).boxed());
    }

    /// Reads again which agents are located here.
    pub(super) fn relist(&mut self) {
        let Some(bound) = &self.bound else { return };
        if self.relist_busy {
            self.relist_again = true;
            return;
        }
        self.relist_busy = true;
        self.jobs.push(relist(self.state.engine.clone(), bound.fence.clone()).boxed());
    }

    /// `asked` is when the list was asked for: agents adopted since then may not be in it.
    pub(super) fn on_relisted(&mut self, asked: Instant, positions: Vec<Position>) {
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
        let Some(bound) = &self.bound else { return };
        if new.is_empty() {
            return;
        }
        let start = if bound.cursor_granted { StartRule::Gated } else { StartRule::Open(self.start_of(bound)) };
        let keys = new.into_iter().map(|position| (position.scope, position.agent_id)).collect();
        self.serve(Whom::These(keys), start);
    }

    /// Begins to serve an agent, or opens it if it was gated.
    pub(super) fn adopt(&mut self, position: Position, tail: Tail, start: StartRule) {
        let Some(bound) = &self.bound else { return };
        let agent = position.agent_id;
        let here = position.node_id == bound.fence.node_id
            && position.provider.as_ref().is_none_or(|provider| *provider == bound.fence.provider);
        if !here {
            return;
        }
        if self.agents.contains_key(&agent) {
            self.keep_place(&position);
        } else {
            let (abort, registration) = AbortHandle::new_pair();
            self.tails.push(Abortable::new(tail.map(move |live| (agent, live)).boxed(), registration).boxed());
            let next = Arc::new(AtomicI64::new(0));
            self.state.registry.serve(&self.handle, &bound.fence, agent, &next);
            self.names.insert(position.agent_name.clone(), agent);
            let mut served = Served::new(position.agent_name.clone(), abort);
            served.held = bound.looks_up.then(HeldAcks::default);
            self.agents.insert(agent, (served, next));
        }
        let start = match start {
            // What named it may be out of date by now: it has left, or a newer inventory does not list it.
            StartRule::Open(start) if !bound.cursor_granted || self.named.contains(&agent) => start,
            // This connection has named it before: it came back.
            StartRule::Gated if self.named.contains(&agent) => self.start_of(bound),
            _ => return,
        };
        if let Some((served, _)) = self.agents.get_mut(&agent)
            && served.open(start, &position)
        {
            self.probing += 1;
        }
        self.queue(agent);
    }

    /// A broker that does not tell a position in time has none.
    pub(super) fn give_up_late_probes(&mut self) {
        let late: Vec<_> =
            self.agents.iter().filter(|(_, (served, _))| served.probe_is_late()).map(|(agent, _)| *agent).collect();
        for agent in late {
            if let Some((served, _)) = self.agents.get_mut(&agent) {
                served.probe_answered(0, false);
                self.probing = self.probing.saturating_sub(1);
            }
            self.queue(agent);
        }
    }

    pub(super) fn drop_agent(&mut self, agent: AgentId) {
        if let Some((served, _)) = self.agents.remove(&agent) {
            self.store_last_ack_later(agent, &served);
            self.probing -= usize::from(served.is_probing());
            // The name may be a newer agent's by now.
            if self.names.get(&served.name) == Some(&agent) {
                self.names.remove(&served.name);
            }
            self.state.registry.unserve(&self.handle, self.node.scope, agent);
        }
    }

    pub(super) fn on_position(&mut self, position: &Position) {
        let Some(bound) = &self.bound else { return };
        let here = position.node_id == bound.fence.node_id
            && position.provider.as_ref().is_none_or(|provider| *provider == bound.fence.provider);
        if !here {
            self.drop_agent(position.agent_id);
            return;
        }
        self.keep_place(position);
        if let Some((served, _)) = self.agents.get_mut(&position.agent_id) {
            served.session.on_head(position.next_seq - 1);
            served.session.resume();
            self.queue(position.agent_id);
        }
    }

    /// What is told to an agent that is served here comes here, also after another connection has served it for a while.
    fn keep_place(&self, position: &Position) {
        let (Some(bound), Some((_, next))) = (&self.bound, self.agents.get(&position.agent_id)) else { return };
        match self.state.registry.served_by(self.node.scope, position.agent_id) {
            Some((handle, _)) if handle == self.handle.id => {}
            // Of no particular provider, it is the other's of this node just as well.
            Some((_, node)) if position.provider.is_none() && node == bound.fence.node_id => {}
            _ => self.state.registry.serve(&self.handle, &bound.fence, position.agent_id, next),
        }
    }
}

/// Tails first, then positions: what is committed in between shows in one of the two.
async fn tailed(engine: &Engine, keys: &[(WorkspaceScope, AgentId)]) -> EngineResult<Vec<(Position, Tail)>> {
    let mut tails = HashMap::with_capacity(keys.len());
    for (scope, agent) in keys {
        tails.insert(*agent, engine.tail(*scope, *agent).await?);
    }
    let positions = engine.positions(keys).await?;
    Ok(positions.into_iter().filter_map(|p| tails.remove(&p.agent_id).map(|tail| (p, tail))).collect())
}

/// Begins to serve agents. A storage that is away is asked again: the job ends with its connection, so it
/// needs no other bound.
async fn serve(engine: Engine, whom: Whom, start: StartRule) -> Done {
    loop {
        match find(&engine, &whom).await {
            Ok(agents) => return Done::Serve { start, agents },
            Err(error) => wait_for_storage(&error).await,
        }
    }
}

async fn find(engine: &Engine, whom: &Whom) -> EngineResult<Vec<(Position, Tail)>> {
    match whom {
        Whom::These(keys) => tailed(engine, keys).await,
        Whom::Located { fence, online } => {
            let located = engine.positions_of_provider(fence.scope, &fence.node_id, &fence.provider).await?;
            let ids: Vec<_> = located.iter().map(|position| position.agent_id).collect();
            if *online {
                engine.agents_online(fence.scope, &ids).await?;
            }
            let keys: Vec<_> = ids.into_iter().map(|agent| (fence.scope, agent)).collect();
            tailed(engine, &keys).await
        }
    }
}

/// Which agents are located here now.
async fn relist(engine: Engine, fence: Fence) -> Done {
    loop {
        let asked = Instant::now();
        match engine.positions_of_provider(fence.scope, &fence.node_id, &fence.provider).await {
            Ok(positions) => return Done::Relisted { asked, positions },
            Err(error) => wait_for_storage(&error).await,
        }
    }
}

async fn wait_for_storage(error: &EngineError) {
    tracing::debug!(error = error as &dyn std::error::Error, "waiting for storage");
    tokio::time::sleep(STORAGE_RETRY).await;
}

/// Tells the engine that a connection has ended. A storage that is away for a moment is asked again; one that
/// stays away leaves it to the worker, who notices half a minute later.
pub(super) async fn disconnect(engine: &Engine, fence: &Fence) {
    for _ in 0..DISCONNECT_ATTEMPTS {
        match engine.disconnect_provider(fence).await {
            Ok(_) => return,
            Err(error) => wait_for_storage(&error).await,
        }
    }
}
