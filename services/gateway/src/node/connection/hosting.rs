//! Agents of a connection: those located on its provider, and when their deliveries start.
//!
//! Methods of [`ConnectionState`] that apply the effects of requests and the locations that jobs have read.

use std::collections::HashSet;

use relay_domain::AgentId;
use relay_engine::mailboxes::serving::MailboxPosition;
use tokio::time::Instant;

use super::{
    control::{ProviderBinding, RequestEffect},
    delayed_acks::DelayedAcks,
    effects::Effect,
    jobs::{Read, ServeTarget},
    served_agent::{ServedAgent, Start},
    state::{ConnectionState, Relisting},
};

/// Start mode of the streams of newly served agents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StartMode {
    /// Wait until this connection names the agent.
    Gated,
    Open(Start),
}

impl ConnectionState {
    pub(super) fn apply_request_effect(&mut self, effect: RequestEffect) {
        match effect {
            RequestEffect::None => {}
            RequestEffect::Registered(binding) => {
                if binding.is_broker {
                    // Kept when the connection registers again: its unconfirmed frames are in the broker's queue all
                    // the same.
                    self.pacing.get_or_insert_default();
                }
                let read = Read::Serve {
                    start: self.start_of_unnamed(&binding),
                    target: ServeTarget::Provider { fence: binding.fence.clone(), online: !binding.cursor_granted },
                };
                self.binding = Some(binding);
                self.changes.forget_recorded();
                // Before the read: from now on moves to this provider reach the connection, so that none falls between
                // the two.
                self.emit(Effect::Register);
                self.start_read(read);
            }
            RequestEffect::Hosted { position, cursor_in_reply } => {
                let start = match &self.binding {
                    _ if cursor_in_reply => Start::ReportedFloor(position.settled_floor),
                    Some(binding) => self.default_start(binding),
                    None => Start::AckFloor,
                };
                // An existing stream belongs to a process that has ended. The new process starts at the cursor in its
                // reply.
                self.drop_agent(position.agent_id);
                self.named_agents.insert(position.agent_id);
                self.serve(vec![position.agent_id], StartMode::Open(start));
            }
            RequestEffect::Listed(agents) => {
                let start = self.binding.as_ref().map_or(Start::AckFloor, |binding| self.default_start(binding));
                self.named_agents = agents.iter().copied().collect();
                // The other agents no longer run: nothing is sent to them until they are named again.
                let has_begun = |served: &ServedAgent| served.stream.is_open() || served.is_probing();
                let begun = self.agents.iter().filter(|(_, served)| has_begun(served)).map(|(agent, _)| *agent);
                let silent: Vec<_> = begun.filter(|agent| !self.named_agents.contains(agent)).collect();
                silent.into_iter().for_each(|agent| self.drop_agent(agent));
                self.serve(agents, StartMode::Open(start));
            }
            RequestEffect::AgentLeft(agent) => {
                self.named_agents.remove(&agent);
                self.drop_agent(agent);
            }
            RequestEffect::ChangeChecked(beat) => {
                self.on_change_checked(*beat);
                self.request_change();
            }
            RequestEffect::ChangeUnchecked(beat) => self.on_change_unchecked(*beat),
            RequestEffect::Deregistered => self.close((1000, "deregistered")),
            RequestEffect::Refused { close } => self.close(close),
            RequestEffect::RegistrationFailed { held, close } => {
                // If it had registered before, it still holds its former provider, which its end must release.
                self.binding = held.or(self.binding.take());
                self.close(close);
            }
        }
    }

    /// Start of agents for which no reply on this connection contained a cursor.
    fn default_start(&self, binding: &ProviderBinding) -> Start {
        match binding.is_broker {
            true if self.conditions.was_restored => Start::ProbeAlways,
            true => Start::Probe,
            false => Start::AckFloor,
        }
    }

    /// Start of agents that are located here without having been named.
    fn start_of_unnamed(&self, binding: &ProviderBinding) -> StartMode {
        if binding.cursor_granted { StartMode::Gated } else { StartMode::Open(self.default_start(binding)) }
    }

    fn serve(&mut self, agents: Vec<AgentId>, start: StartMode) {
        self.start_read(Read::Serve { target: ServeTarget::Agents(agents), start });
    }

    /// Reads the agents located here again.
    pub(super) fn relist(&mut self) {
        let Some(binding) = &self.binding else { return };
        if self.relisting != Relisting::Idle {
            // The read in progress may have passed the row that has changed.
            self.relisting = Relisting::Again;
            return;
        }
        let read = Read::Relist(binding.fence.clone());
        self.relisting = Relisting::Busy;
        self.start_read(read);
    }

    /// Applies a list of located agents. The list was requested at `asked`: agents adopted later may be missing from
    /// it.
    pub(super) fn on_relisted(&mut self, asked: Instant, positions: Vec<MailboxPosition>) {
        if std::mem::replace(&mut self.relisting, Relisting::Idle) == Relisting::Again {
            self.relist();
        }
        let located: HashSet<AgentId> = positions.iter().map(|position| position.agent_id).collect();
        let older = self.agents.iter().filter(|(_, served)| served.adopted < asked);
        let gone: Vec<_> = older.map(|(agent, _)| *agent).filter(|agent| !located.contains(agent)).collect();
        gone.into_iter().for_each(|agent| self.drop_agent(agent));
        let (known, new): (Vec<_>, Vec<_>) = positions.into_iter().partition(|p| self.agents.contains_key(&p.agent_id));
        for position in &known {
            self.on_position(position);
            if let Some(served) = self.agents.get_mut(&position.agent_id) {
                served.resume(asked);
            }
        }
        let Some(binding) = &self.binding else { return };
        if !new.is_empty() {
            let start = self.start_of_unnamed(binding);
            self.serve(new.into_iter().map(|position| position.agent_id).collect(), start);
        }
    }

    /// Starts to serve an agent, or opens its stream if it was gated.
    pub(super) fn adopt_agent(&mut self, position: &MailboxPosition, start: StartMode) {
        let Some(binding) = &self.binding else { return };
        // It has moved since it was named; the connection there lists it.
        if !is_located_on(position, binding) {
            return;
        }
        let agent = position.agent_id;
        let start = match start {
            // The request that named it may be outdated: the agent has left, or a newer inventory does not list it.
            StartMode::Open(start) if !binding.cursor_granted || self.named_agents.contains(&agent) => Some(start),
            // Named before on this connection: it came back.
            StartMode::Gated if self.named_agents.contains(&agent) => Some(self.default_start(binding)),
            StartMode::Open(_) | StartMode::Gated => None,
        };
        if self.agents.contains_key(&agent) {
            self.emit(Effect::ReclaimRoute { agent, is_assigned: position.provider.is_some() });
        } else {
            let delayed_acks = binding.rereads_after_ack.then(DelayedAcks::default);
            self.names.insert(position.agent_name.clone(), agent);
            let served = ServedAgent::new(position.agent_name.clone(), self.now(), delayed_acks);
            self.agents.insert(agent, Box::new(served));
            self.emit(Effect::Route(agent));
        }
        if let (Some(start), Some(served)) = (start, self.agents.get_mut(&agent)) {
            self.probing += usize::from(served.open(start, position));
            // A copy may have come after the position was read.
            if let Some(seq) = self.unserved.remove(&agent) {
                served.stream.on_head(seq);
            }
            self.queue_agent(agent);
        }
    }

    /// Opens the streams whose broker did not report a position in time, as if it had none.
    pub(super) fn expire_late_probes(&mut self) {
        let now = self.now();
        let late: Vec<_> =
            self.agents.iter().filter(|(_, served)| served.probe_is_late(now)).map(|(agent, _)| *agent).collect();
        for agent in late {
            if let Some(served) = self.agents.get_mut(&agent) {
                served.on_probe_answer(0, false);
                self.probing = self.probing.saturating_sub(1);
            }
            self.queue_agent(agent);
        }
    }

    pub(super) fn drop_agent(&mut self, agent: AgentId) {
        let Some(served) = self.agents.remove(&agent) else { return };
        // An ack that waits is stored at its time, also without this connection.
        if let Some((at, floor)) = served.delayed_acks.as_ref().and_then(DelayedAcks::last_pending) {
            self.emit(Effect::StoreAckAt { at, agent, floor });
        }
        // Otherwise the tick would look for its late answer for ever.
        self.probing -= usize::from(served.is_probing());
        // The name may belong to a newer agent by now.
        if self.names.get(&served.name) == Some(&agent) {
            self.names.remove(&served.name);
        }
        self.emit(Effect::Unroute(agent));
    }

    pub(super) fn drop_all_agents(&mut self) {
        let agents: Vec<_> = self.agents.keys().copied().collect();
        agents.into_iter().for_each(|agent| self.drop_agent(agent));
    }

    pub(super) fn on_position(&mut self, position: &MailboxPosition) {
        let Some(binding) = &self.binding else { return };
        let agent = position.agent_id;
        if !is_located_on(position, binding) {
            self.drop_agent(agent);
            return;
        }
        let Some(served) = self.agents.get_mut(&agent) else { return };
        // A suspended stream stays so: the position may have been read before the move that the copy has shown.
        served.stream.on_head(position.next_seq - 1);
        self.emit(Effect::ReclaimRoute { agent, is_assigned: position.provider.is_some() });
        self.queue_agent(agent);
    }
}

/// Returns whether an agent is located on the provider of a connection.
fn is_located_on(position: &MailboxPosition, binding: &ProviderBinding) -> bool {
    position.node_id == binding.fence.node_id
        && position.provider.as_ref().is_none_or(|provider| *provider == binding.fence.provider)
}
