//! Delivery of one connection: live copies, repairs, acks, and the order in which agents send.
//!
//! Methods of [`ConnectionState`]. The per-mailbox rules are in `relay_domain::mailboxes::stream`.

use std::time::Duration;

use axum::extract::ws::Utf8Bytes;
use relay_domain::{
    AgentId,
    mailboxes::stream::{Arrival, Seq},
    metric_names,
};
use relay_engine::{
    EngineResult,
    mailboxes::serving::{Fence, LiveFrame, MailboxPosition, RepairRequest, RepairedMailbox, ReplayBody, ReplayFrame},
};
use relay_wire::nodes::frame;
use tokio::time::Instant;

use super::{
    effects::Effect,
    jobs::Read,
    outbound::{BufferCount, OutgoingBody, OutgoingFrame},
    pacing::{BARRIER_AGENT, Pacing},
    served_agent::PositionAnswer,
    state::ConnectionState,
};
use crate::node::notices::Notice;

/// Agents named in the context updates of one connection within [`UPDATE_WINDOW`]. Further updates are dropped.
const AGENTS_IN_UPDATES: usize = 20_000;
const UPDATE_WINDOW: Duration = Duration::from_secs(1);
/// Mailboxes repaired by one read.
const MAILBOXES_PER_REPAIR: usize = 100;
/// Delay after a failed repair.
const REPAIR_RETRY: Duration = Duration::from_millis(200);
/// Agents whose live copies are remembered until they are served, about 16 KiB. Beyond it all are forgotten: the
/// comparison of their new routes finds the deliveries.
const MAX_UNSERVED: usize = 1024;
/// Bound of the live copies that wait on a connection. Further ones are read from storage in their turn.
const MAX_LIVE_BYTES: usize = 1024 * 1024;
/// While rows of more bytes wait to be sent, no others are read. Those of recipients of one message count for each.
const MAX_ROW_BYTES: usize = 512 * 1024;
/// Time after which a connection that sends nothing returns the memory of the rows that it has read.
const RETURN_AFTER: Duration = Duration::from_secs(1);
/// Frames that one agent sends before the next agent's turn.
const FRAMES_PER_TURN: usize = 16;

impl ConnectionState {
    pub(super) fn on_live(&mut self, agent: AgentId, live: LiveFrame) {
        // Copies for a whole node come before the registration as well. Its new routes are compared with storage
        // afterwards.
        let Some(binding) = &self.binding else { return };
        let Some(served) = self.agents.get_mut(&agent) else {
            if self.unserved.len() >= MAX_UNSERVED {
                self.unserved.clear();
            }
            let seq = self.unserved.entry(agent).or_default();
            *seq = live.seq.max(*seq);
            return;
        };
        let has_moved = !is_on_provider(&live.location, &binding.fence);
        if has_moved {
            // The agent was located elsewhere when this was committed. A hint carries no authority, so the stream
            // stops until the binding has been read again.
            served.suspend(self.conditions.now);
        }
        match live.body.and_then(|body| Utf8Bytes::try_from(body).ok()) {
            Some(body) if !self.conditions.room.is_empty() && self.live_bytes.bytes() < MAX_LIVE_BYTES => {
                let frame = OutgoingFrame {
                    _buffered: self.live_bytes.add(body.len()),
                    body: OutgoingBody::Text(body),
                    delivery_id: Some(live.delivery_id),
                    traceparent: live.traceparent,
                    live: true,
                    held_since: self.conditions.now,
                    expires_at_ms: live.expires_at_ms,
                };
                if served.stream.on_live(live.seq, frame) == Arrival::Duplicate {
                    self.emit(Effect::Count(metric_names::DUPLICATES_DROPPED));
                }
            }
            // Too large for a copy, or no room in the queue: read from storage later.
            _ => served.stream.on_head(live.seq),
        }
        // The hint is for the gateway that serves the agent now; the list shows whether this connection still does.
        if has_moved {
            self.emit(Effect::MailboxChanged(agent));
            self.relist();
        }
        self.queue_agent(agent);
    }

    /// Returns whether the copy was committed in this connection's recovery epoch. One of a lost delivery, which was on
    /// its way during a failover, would take the place of the delivery that has its number now.
    pub(super) fn is_current(&self, live: &LiveFrame) -> bool {
        live.epoch.is_none() || live.epoch == self.recovery_epoch
    }

    /// Handles a copy of another recovery epoch, whose seq may belong to another delivery: the position is read.
    pub(super) fn on_outdated(&mut self, agent: AgentId) {
        if self.agents.contains_key(&agent) {
            self.emit(Effect::CompareMailbox(agent));
        }
    }

    pub(super) fn on_ack(&mut self, name: &str, up_to: Seq) {
        let now = self.now();
        if name == BARRIER_AGENT {
            if let Some(pacing) = &mut self.pacing {
                pacing.on_barrier_ack(now);
            }
            return;
        }
        // A direct node has one agent, so its acks count even if the agent was renamed while connected.
        let only = || if self.node.is_direct() { self.agents.keys().next().copied() } else { None };
        let Some(agent) = self.names.get(name).copied().or_else(only) else { return };
        let Some(served) = self.agents.get_mut(&agent) else { return };
        match served.on_probe_answer(up_to, self.conditions.was_restored) {
            // An ordinary ack. The answer to a probe is one as well (ADR 0002), so both go on below.
            PositionAnswer::Unexpected => {}
            PositionAnswer::Opened => {
                self.probing = self.probing.saturating_sub(1);
                self.queue_agent(agent);
            }
            PositionAnswer::AboveSent => {
                // The database was restored, or the broker is wrong: not an ack until storage has confirmed the
                // position.
                if let Some(binding) = &self.binding {
                    let fence = binding.fence.clone();
                    self.start_read(Read::VerifyPosition { fence, agent, reported: up_to });
                }
                return;
            }
        }
        let Some(served) = self.agents.get_mut(&agent) else { return };
        let Some(ack) = served.stream.on_ack(up_to) else { return };
        let latency = served.take_ack_latency(ack.floor, now);
        let is_delayed = served.delayed_acks.as_mut().map(|acks| acks.add(ack.floor, now)).is_some();
        if ack.clamped {
            self.emit(Effect::Count(metric_names::ACKS_CLAMPED));
        }
        self.emit(Effect::Acked { agent, floor: ack.floor, latency });
        if !is_delayed {
            self.emit(Effect::StoreAck { agent, floor: ack.floor });
        }
    }

    pub(super) fn on_position_verified(&mut self, agent: AgentId, reported: Seq, position: Option<&MailboxPosition>) {
        let Some(served) = self.agents.get_mut(&agent).filter(|served| served.is_probing()) else { return };
        let Some(position) = position else {
            self.drop_agent(agent);
            return;
        };
        served.on_position_verified(reported, position);
        self.probing = self.probing.saturating_sub(1);
        // The reported position is also an ack.
        let name = served.name.clone();
        self.queue_agent(agent);
        self.on_ack(&name, reported);
    }

    /// Stores the delayed acks that are due, which makes room for more frames.
    pub(super) fn store_due_acks(&mut self) {
        // For other clients each step would walk all agents in vain.
        if !self.binding.as_ref().is_some_and(|binding| binding.rereads_after_ack) {
            return;
        }
        let now = self.now();
        let due: Vec<_> = self
            .agents
            .iter_mut()
            .filter_map(|(agent, served)| Some((*agent, served.delayed_acks.as_mut()?.take_due(now)?)))
            .collect();
        for (agent, floor) in due {
            self.emit(Effect::StoreAck { agent, floor });
            self.start_read(Read::StoredAck { agent, floor });
        }
    }

    pub(super) fn on_ack_stored(&mut self, agent: AgentId, floor: Seq) {
        if let Some(acks) = self.agents.get_mut(&agent).and_then(|served| served.delayed_acks.as_mut()) {
            acks.mark_stored(floor);
        }
        self.queue_agent(agent);
    }

    /// Time when the next delayed ack is due.
    pub(super) fn next_due_ack(&self) -> Option<Instant> {
        if !self.binding.as_ref().is_some_and(|binding| binding.rereads_after_ack) {
            return None;
        }
        self.agents.values().filter_map(|served| served.delayed_acks.as_ref()?.next_due()).min()
    }

    pub(super) fn queue_agent(&mut self, agent: AgentId) {
        if let Some(served) = self.agents.get_mut(&agent)
            && !served.queued
        {
            served.queued = true;
            self.queued.push_back(agent);
        }
    }

    /// Returns whether another delivery may leave.
    pub(super) fn has_room(&self) -> bool {
        !self.conditions.room.is_empty() && self.pacing.as_ref().is_none_or(Pacing::has_room)
    }

    /// Sends frames in turns, one turn per agent, and requests missing frames.
    pub(super) fn pump_deliveries(&mut self) {
        self.return_waiting_rows();
        let may_repair = !self.is_repairing
            && self.conditions.is_trusted
            && self.now() >= self.repair_after
            && self.row_bytes.bytes() < MAX_ROW_BYTES;
        let now_ms = self.now_ms();
        let mut wants = Vec::new();
        // Agents that are queued again below get no turn in this call, unless they could send at once.
        let mut turns = self.queued.len();
        // Without room, the writer wakes the task when there is some.
        while turns > 0 && !self.conditions.room.is_empty() {
            turns -= 1;
            let Some(agent) = self.queued.pop_front() else { break };
            let left = self.send_turn(agent);
            // Rows that could not leave would only take memory.
            let has_room = self.has_room();
            let Some(served) = self.agents.get_mut(&agent) else { continue };
            served.queued = false;
            if may_repair
                && wants.len() < MAILBOXES_PER_REPAIR
                && has_room
                && served.may_send()
                && let Some(from) = served.stream.request_repair(now_ms)
            {
                wants.push(RepairRequest {
                    agent_id: agent,
                    agent_name: served.name.clone(),
                    from,
                    settled_below: served.floor,
                    resumed_to: served.stream.replay_end(),
                });
            } else if left
                || served.wants_probe()
                || served.may_send() && (served.stream.has_ready() || served.stream.is_behind() && !self.is_repairing)
            {
                // An agent whose repair is in progress is queued again with the repair.
                self.queue_agent(agent);
                // Another turn in this call only for agents that could send more at once.
                turns += usize::from(left);
            }
        }
        if !wants.is_empty() {
            self.is_repairing = true;
            self.start_read(Read::Repair(wants));
        }
    }

    /// Runs one agent's turn. Returns whether it could send more at once.
    fn send_turn(&mut self, agent: AgentId) -> bool {
        if !self.conditions.is_trusted {
            return false;
        }
        let Some(served) = self.agents.get_mut(&agent) else { return false };
        if served.wants_probe() {
            if self.pacing.as_ref().is_none_or(Pacing::has_room) {
                served.probe_sent(self.conditions.now);
                let name = served.name.clone();
                self.emit(Effect::ProbePosition { agent, name });
                // A broker acks it like a delivery, so it counts in the window.
                self.count_paced_frame();
            }
            return false;
        }
        let (mut last, mut count) = (0, 0);
        while count < FRAMES_PER_TURN
            && self.has_room()
            && let Some(seq) = self.send_next_frame(agent)
        {
            last = seq;
            count += 1;
        }
        if last > 0 {
            self.emit(Effect::Sent { agent, up_to: last, count: count as u64 });
        }
        let has_room = self.has_room();
        let Some(served) = self.agents.get_mut(&agent) else { return false };
        let left = served.stream.has_ready() && served.may_send() && has_room;
        if let Some(next) = served.take_next_change() {
            self.emit(Effect::NextSeq { agent, next });
        }
        left
    }

    /// Sends the next frame of an agent, if it may leave. Returns its seq.
    fn send_next_frame(&mut self, agent: AgentId) -> Option<Seq> {
        let now = self.now();
        let served = self.agents.get_mut(&agent).filter(|served| served.may_send())?;
        let unix_ms = self.conditions.unix_ms;
        if served.stream.ready_frame().is_some_and(|frame| frame.is_outdated(now, unix_ms)) {
            // All outdated frames at once: one repair reads them again, instead of one for each.
            served.stream.drop_frames(|frame| frame.is_outdated(now, unix_ms));
            return None;
        }
        let (seq, frame) = served.stream.next_frame()?;
        served.start_ack_timer(seq, now);
        let is_replay = !frame.live && seq <= served.stream.replay_end();
        if self.node.is_direct()
            && seq > served.sent_before
            && let Some(id) = &frame.delivery_id
        {
            // Right before its delivery, which the SDK looks up when it reads this frame. Tombstones have no delivery.
            let accepted = frame::encode_delivery_accepted(agent, id);
            self.send_text(accepted);
        }
        self.rows_moved = now;
        // The room is that of the start of the step, so its own frames are counted here.
        self.conditions.room.take(frame.body.byte_len());
        self.emit(Effect::Deliver { agent, seq, frame });
        if is_replay {
            self.emit(Effect::Count(metric_names::DELIVERIES_REPLAYED));
        }
        self.count_paced_frame();
        Some(seq)
    }

    /// Counts a frame that a broker confirms, and sends the barrier that must follow it, if one is due.
    fn count_paced_frame(&mut self) {
        let now = self.now();
        if let Some(barrier) = self.pacing.as_mut().and_then(|pacing| pacing.count_frame(now)) {
            self.send_text(barrier);
        }
    }

    pub(super) fn on_repaired(&mut self, repaired: EngineResult<Vec<RepairedMailbox>>) {
        self.is_repairing = false;
        match repaired {
            Ok(repaired) => {
                let now = self.now();
                self.rows_moved = now;
                // Those that the memory did not suffice for come first in the next repair.
                let cut = repaired.iter().filter(|one| one.frames.is_empty()).map(|one| one.agent_id);
                let cut: Vec<_> = cut.collect();
                for one in repaired {
                    let Some(served) = self.agents.get_mut(&one.agent_id) else { continue };
                    let frames = one.frames.into_iter().filter_map(|row| outgoing_row(&self.row_bytes, row, now));
                    served.stream.on_rows(frames);
                }
                cut.into_iter().for_each(|agent| self.queue_agent(agent));
            }
            Err(_) => {
                self.repair_after = self.now() + REPAIR_RETRY;
                for served in self.agents.values_mut() {
                    // Which streams were requested is not kept; the call has no effect on the others.
                    served.stream.on_repair_failed();
                }
            }
        }
        let behind: Vec<_> =
            self.agents.iter().filter(|(_, served)| served.stream.is_behind()).map(|(agent, _)| *agent).collect();
        behind.into_iter().for_each(|agent| self.queue_agent(agent));
    }

    /// Drops the rows of a connection that takes none of them, so that others may use their memory. They are read again
    /// once it does.
    fn return_waiting_rows(&mut self) {
        if self.next_return().is_some_and(|at| at <= self.now()) {
            for served in self.agents.values_mut() {
                served.stream.drop_frames(|frame| !frame.live);
            }
        }
    }

    /// Time when the waiting rows are dropped.
    pub(super) fn next_return(&self) -> Option<Instant> {
        (self.row_bytes.bytes() > 0).then(|| self.rows_moved + RETURN_AFTER)
    }

    /// Sends a `context.update` once for those of these agents that receive deliveries, if there is room.
    pub(super) fn on_context_update(&mut self, agents: &[AgentId], notice: &Notice) {
        // Published brokers do not handle context updates and log each of them.
        if self.pacing.is_some() || !self.has_room() {
            return;
        }
        let receives = |agent: &&AgentId| self.agents.get(*agent).is_some_and(|served| served.stream.is_open());
        let mut agents: Vec<AgentId> = agents.iter().filter(receives).copied().collect();
        agents.sort_unstable();
        if agents.is_empty() || !self.may_name_agents(agents.len()) {
            return;
        }
        let ids: Vec<String> = agents.iter().map(ToString::to_string).collect();
        self.send_text(frame::encode_context_update(&notice.topic, &notice.event, &ids, &notice.data));
    }

    /// Counts agents that an update names. The first update of a second always passes; the limit keeps agents that
    /// come online together from filling the socket with lists of each other.
    fn may_name_agents(&mut self, count: usize) -> bool {
        let now = self.now();
        if now.duration_since(self.updates.0) >= UPDATE_WINDOW {
            self.updates = (now, 0);
        }
        let is_within = self.updates.1 == 0 || self.updates.1 + count <= AGENTS_IN_UPDATES;
        if is_within {
            self.updates.1 += count;
        } else {
            self.emit(Effect::Count(metric_names::NOTICES_DROPPED));
        }
        is_within
    }

    /// Sends a best-effort event as a `deliver` frame, if there is room and the agent receives deliveries.
    pub(super) fn on_notice(&mut self, agent: AgentId, notice: &Notice) {
        let has_room = self.has_room();
        let Some(served) = self.agents.get(&agent).filter(|served| has_room && served.stream.is_open()) else {
            if notice.outcome_invocation().is_some() {
                self.emit(Effect::OutcomeMissed(agent));
            }
            return;
        };
        let id = agent.to_string();
        let Some(event_id) = &notice.event_id else { return };
        let text = frame::encode_event_delivery(&id, &served.name, event_id, &notice.event, &notice.data);
        if let Some(invocation) = notice.outcome_invocation() {
            self.emit(Effect::OutcomeSent(invocation));
        }
        self.send_text(text);
        self.count_paced_frame();
    }
}

fn outgoing_row(row_bytes: &BufferCount, row: ReplayFrame, now: Instant) -> Option<(Seq, OutgoingFrame)> {
    // Tombstones are encoded by this process and therefore UTF-8; a row that is dropped here would be requested again.
    let (body, delivery_id, expires_at_ms) = match row.body {
        ReplayBody::Tombstone(body) => (OutgoingBody::Text(Utf8Bytes::try_from(body).ok()?), None, None),
        ReplayBody::Delivery { id, frame, expires_at_ms, memory } => {
            (OutgoingBody::Row { frame, _memory: memory }, Some(id.to_string()), Some(expires_at_ms))
        }
    };
    let frame = OutgoingFrame {
        _buffered: row_bytes.add(body.byte_len()),
        body,
        delivery_id,
        traceparent: None,
        live: false,
        held_since: now,
        expires_at_ms,
    };
    Some((row.seq, frame))
}

/// Returns whether a location belongs to the fence. It is `node/provider`, or `node/` for an unassigned agent; ids of
/// nodes may contain `/`.
fn is_on_provider(location: &str, fence: &Fence) -> bool {
    let provider = location.strip_prefix(fence.node_id.as_str()).and_then(|rest| rest.strip_prefix('/'));
    provider.is_some_and(|provider| provider.is_empty() || provider == fence.provider.as_str())
}

#[cfg(test)]
mod tests {
    use relay_domain::{NodeId, ProviderName, WorkspaceId, WorkspaceScope};

    use super::*;

    #[test]
    fn a_location_matches_its_provider_even_if_the_node_id_contains_slashes() {
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(1));
        for node in ["n", "team/n"] {
            let (node_id, provider) = (NodeId::new(node), ProviderName::new("broker"));
            let fence = Fence { scope, node_id, provider, epoch: 1 };
            assert!(
                is_on_provider(&format!("{node}/broker"), &fence) && is_on_provider(&format!("{node}/"), &fence),
                "{node}"
            );
            for elsewhere in
                [format!("{node}/other"), format!("{node}2/broker"), node.to_owned(), "m/broker".to_owned()]
            {
                assert!(!is_on_provider(&elsewhere, &fence), "{elsewhere}");
            }
        }
    }
}
