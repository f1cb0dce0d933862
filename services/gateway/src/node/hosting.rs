//! Which agents a connection serves: those located on its provider, from when they may flow.

use futures::{
    FutureExt as _, StreamExt as _,
    stream::{AbortHandle, Abortable},
};
use std::collections::HashMap;

use relay_domain::AgentId;
use relay_engine::{
    EngineResult,
    mailbox::{Position, Tail},
};

use super::{
    connection::{Connection, Done},
    control::{Bound, Effect},
    pacing::position_probe,
    served::{Served, Start},
};

/// How agents that come to be served start.
#[derive(Clone, Copy)]
pub(super) enum StartRule {
    /// Wait until this connection names them.
    Gated,
    Open(Start),
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
                    _ if told => Start::SettledFloor,
                    Some(bound) => self.start_of(bound),
                    None => Start::AckFloor,
                };
                self.name_agents(vec![*position], start);
            }
            Effect::Listed(agents) => {
                let start = self.bound.as_ref().map_or(Start::AckFloor, |bound| self.start_of(bound));
                let scope = self.node.scope;
                let engine = self.state.engine.clone();
                let keys: Vec<_> = agents.into_iter().map(|agent| (scope, agent)).collect();
                self.jobs.push(
                    async move {
                        let agents = match engine.positions(&keys).await {
                            Ok(positions) => tailed(&engine, positions).await,
                            Err(error) => Err(error),
                        };
                        Done::Serve { start: StartRule::Open(start), agents }
                    }
                    .boxed(),
                );
            }
            Effect::Left(agent) => self.drop_agent(agent),
            Effect::Gone => self.closing = Some((1000, "deregistered")),
        }
    }

    /// Where agents start that no reply on this connection has told a cursor for.
    pub(super) const fn start_of(&self, bound: &Bound) -> Start {
        if bound.is_broker { Start::Probe } else { Start::AckFloor }
    }

    /// Serves all agents that are located here, tails first, so that nothing falls between.
    pub(super) fn serve_located(&mut self, start: StartRule) {
        let Some(bound) = &self.bound else { return };
        let (engine, fence, direct) = (self.state.engine.clone(), bound.fence.clone(), self.direct);
        self.jobs.push(
            async move {
                let agents = async {
                    let located = engine.positions_of_provider(fence.scope, &fence.node_id, &fence.provider).await?;
                    if direct {
                        let ids: Vec<_> = located.iter().map(|p| p.agent_id).collect();
                        engine.agents_online(fence.scope, &ids).await?;
                    }
                    tailed(&engine, located).await
                };
                Done::Serve { start, agents: agents.await }
            }
            .boxed(),
        );
    }

    pub(super) fn name_agents(&mut self, positions: Vec<Position>, start: Start) {
        let engine = self.state.engine.clone();
        let tails =
            async move { Done::Serve { start: StartRule::Open(start), agents: tailed(&engine, positions).await } };
        self.jobs.push(tails.boxed());
    }

    /// Reads again which agents are located here.
    pub(super) fn relist(&mut self) {
        let Some(bound) = &self.bound else { return };
        let (engine, fence) = (self.state.engine.clone(), bound.fence.clone());
        self.jobs.push(
            async move {
                Done::Relisted(engine.positions_of_provider(fence.scope, &fence.node_id, &fence.provider).await)
            }
            .boxed(),
        );
    }

    pub(super) fn on_relisted(&mut self, positions: Vec<Position>) {
        let gone: Vec<_> =
            self.agents.keys().filter(|agent| !positions.iter().any(|p| p.agent_id == **agent)).copied().collect();
        for agent in gone {
            self.drop_agent(agent);
        }
        let (known, new): (Vec<_>, Vec<_>) = positions.into_iter().partition(|p| self.agents.contains_key(&p.agent_id));
        known.iter().for_each(|position| self.on_position(position));
        let Some(bound) = &self.bound else { return };
        if new.is_empty() {
            return;
        }
        let start = if bound.cursor_granted { StartRule::Gated } else { StartRule::Open(self.start_of(bound)) };
        let engine = self.state.engine.clone();
        self.jobs.push(async move { Done::Serve { start, agents: tailed(&engine, new).await } }.boxed());
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
        if !self.agents.contains_key(&agent) {
            let (abort, registration) = AbortHandle::new_pair();
            self.tails.push(Abortable::new(tail.map(move |live| (agent, live)).boxed(), registration).boxed());
            let next = self.state.registry.serve(&self.handle, &bound.fence, agent);
            self.names.insert(position.agent_name.clone(), agent);
            self.agents.insert(agent, (Served::new(position.agent_name.clone(), abort), next));
        }
        let StartRule::Open(start) = start else { return };
        if let Some((served, _)) = self.agents.get_mut(&agent)
            && served.open(start, &position)
        {
            self.probing += 1;
            let probe =
                position_probe(&position.agent_name, &agent.to_string(), &format!("position_{}", uuid::Uuid::new_v4()));
            self.send(probe);
        }
        self.queue(agent);
    }

    /// A broker that does not tell a position in time has none.
    pub(super) fn give_up_late_probes(&mut self) {
        let late: Vec<_> =
            self.agents.iter().filter(|(_, (served, _))| served.probe_is_late()).map(|(agent, _)| *agent).collect();
        for agent in late {
            if let Some((served, _)) = self.agents.get_mut(&agent) {
                served.probe_answered(0);
                self.probing = self.probing.saturating_sub(1);
            }
            self.queue(agent);
        }
    }

    pub(super) fn drop_agent(&mut self, agent: AgentId) {
        if let Some((served, _)) = self.agents.remove(&agent) {
            self.probing -= usize::from(served.is_probing());
            self.names.remove(&served.name);
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
        if let Some((served, _)) = self.agents.get_mut(&position.agent_id) {
            served.session.on_head(position.next_seq - 1);
            served.session.resume();
            self.queue(position.agent_id);
        }
    }
}

/// Tails first, then positions: what is committed in between shows in one of the two.
async fn tailed(engine: &relay_engine::Engine, located: Vec<Position>) -> EngineResult<Vec<(Position, Tail)>> {
    let mut tails = HashMap::with_capacity(located.len());
    for position in &located {
        tails.insert(position.agent_id, engine.tail(position.scope, position.agent_id).await?);
    }
    let keys: Vec<_> = located.iter().map(|position| (position.scope, position.agent_id)).collect();
    let positions = engine.positions(&keys).await?;
    Ok(positions.into_iter().filter_map(|p| tails.remove(&p.agent_id).map(|tail| (p, tail))).collect())
}
