//! Frames in and out of the sessions: live copies, repairs, acks, and whose turn it is to send.

use std::time::{Duration, Instant};

use axum::extract::ws::Utf8Bytes;
use futures::FutureExt as _;
use relay_domain::{
    AgentId, metric_names,
    session::{Arrival, Seq},
};
use relay_engine::{
    Engine, EngineResult,
    auth::NodeCaller,
    mailbox::{CursorMove, Fence, LiveFrame, Position, Repaired, Want},
};

use relay_wire::frame;

use super::{
    connection::{Connection, Done},
    control::Bound,
    held::HeldAcks,
    notice::Notice,
    pacing::{BARRIER_AGENT, Pacing, position_probe},
    served::{Answered, Outgoing, Served},
};

/// How long a floor usually takes to be stored.
const STORED_WITHIN: Duration = Duration::from_millis(40);
/// Mailboxes repaired by one read.
const REPAIRED_AT_ONCE: usize = 100;
/// How long a failed repair waits before the next.
const REPAIR_RETRY: Duration = Duration::from_millis(200);
/// Frames that one agent sends before the next has its turn.
const TURN: usize = 16;

impl Connection {
    pub(super) fn on_live(&mut self, agent: AgentId, live: LiveFrame) {
        let Some(bound) = &self.bound else { return };
        let Some((served, _)) = self.agents.get_mut(&agent) else { return };
        let fence = &bound.fence;
        if !is_here(&live.location, fence) {
            // The agent was elsewhere when this was committed. Nothing is sent on the strength of a hint:
            // the binding is read again.
            served.session.suspend();
            self.state.engine.hints().mailbox_changed(fence.scope, agent);
            self.relist();
        }
        let Some((served, _)) = self.agents.get_mut(&agent) else { return };
        match live.body.and_then(|body| Utf8Bytes::try_from(body).ok()) {
            Some(body) if !self.outbound.is_full() => {
                let out =
                    Outgoing { body, delivery_id: Some(live.delivery_id), traceparent: live.traceparent, live: true };
                if served.session.on_live(live.seq, out) == Arrival::Duplicate {
                    metrics::counter!(metric_names::DUPLICATES_DROPPED).increment(1);
                }
            }
            // Too large for the log, or no room for it: read from the store in its turn.
            _ => served.session.on_head(live.seq),
        }
        self.queue(agent);
    }

    pub(super) fn on_ack(&mut self, name: &str, up_to: i64) {
        if name == BARRIER_AGENT {
            if let Some(pacing) = &mut self.pacing {
                pacing.confirmed();
            }
            return;
        }
        // An agent renamed while connected is still known by the single agent of its own node.
        let only = || if self.direct { self.agents.keys().next().copied() } else { None };
        let Some(agent) = self.names.get(name).copied().or_else(only) else { return };
        let Some((served, _)) = self.agents.get_mut(&agent) else { return };
        match served.probe_answered(up_to, self.state.engine.was_restored_lately()) {
            Answered::Nothing => {}
            Answered::Open => {
                self.probing = self.probing.saturating_sub(1);
                self.queue(agent);
            }
            Answered::Above => {
                self.look_into(agent, up_to);
                return;
            }
        }
        let Some((served, _)) = self.agents.get_mut(&agent) else { return };
        let Some(ack) = served.session.on_ack(up_to) else { return };
        if ack.clamped {
            metrics::counter!(metric_names::ACKS_CLAMPED).increment(1);
        }
        for sent in served.traced_until(ack.floor) {
            // A moment below the frame's span: when its ack came.
            let span = tracing::info_span!("node.ack", delivery.up_to_seq = ack.floor);
            relay_engine::trace::set_parent(&span, &sent);
            span.in_scope(|| {});
        }
        if let Some(took) = served.timed_until(ack.floor) {
            metrics::histogram!(metric_names::ACK_LATENCY_SECONDS).record(took.as_secs_f64());
        }
        match &mut served.held {
            Some(held) => held.acked(ack.floor, Instant::now()),
            None => self.cursor_moved(agent, 0, ack.floor),
        }
    }

    /// A broker has had more than its agent's mailbox holds: the database was restored, or the broker is wrong.
    fn look_into(&mut self, agent: AgentId, told: Seq) {
        let Some(bound) = &self.bound else { return };
        let (engine, fence) = (self.state.engine.clone(), bound.fence.clone());
        self.jobs.push(until_looked_into(engine, fence, agent, told).boxed());
    }

    pub(super) fn on_looked_into(&mut self, agent: AgentId, told: Seq, position: Option<&Position>) {
        let Some((served, _)) = self.agents.get_mut(&agent).filter(|(served, _)| served.is_probing()) else { return };
        let Some(position) = position else {
            self.drop_agent(agent);
            return;
        };
        served.looked_into(told, position);
        self.probing = self.probing.saturating_sub(1);
        // The answer is an ack like any other.
        let name = served.name.clone();
        self.queue(agent);
        self.on_ack(&name, told);
    }

    /// Stores the held acks that are due, which makes room for more frames.
    pub(super) fn store_due_acks(&mut self) {
        if !self.bound.as_ref().is_some_and(|bound| bound.looks_up) {
            return;
        }
        let now = Instant::now();
        let held = |(agent, (served, _)): (&AgentId, &mut (Served, _))| Some((*agent, served.held.as_mut()?.due(now)?));
        let due: Vec<_> = self.agents.iter_mut().filter_map(held).collect();
        for (agent, floor) in due {
            self.cursor_moved(agent, 0, floor);
            self.jobs.push(until_stored(self.state.engine.clone(), self.node.clone(), agent, floor).boxed());
        }
    }

    pub(super) fn on_stored(&mut self, agent: AgentId, floor: Seq) {
        if let Some(held) = self.agents.get_mut(&agent).and_then(|(served, _)| served.held.as_mut()) {
            held.stored(floor);
        }
        self.queue(agent);
    }

    /// When the next held ack is due.
    pub(super) fn next_due_ack(&self) -> Option<Instant> {
        self.agents.values().filter_map(|(served, _)| served.held.as_ref()?.next()).min()
    }

    /// The acks of an agent that leaves this connection are stored when they would have been.
    pub(super) fn store_last_ack_later(&self, agent: AgentId, served: &Served) {
        let (Some(bound), Some((at, floor))) = (&self.bound, served.held.as_ref().and_then(HeldAcks::last)) else {
            return;
        };
        let (engine, moved) = (self.state.engine.clone(), moved(bound, agent, 0, floor));
        tokio::spawn(async move {
            tokio::time::sleep_until(at.into()).await;
            engine.cursor_moved(moved);
        });
    }

    pub(super) fn cursor_moved(&self, agent: AgentId, sent_seq: i64, acked_seq: i64) {
        let Some(bound) = &self.bound else { return };
        self.state.engine.cursor_moved(moved(bound, agent, sent_seq, acked_seq));
    }

    pub(super) fn queue(&mut self, agent: AgentId) {
        if let Some((served, _)) = self.agents.get_mut(&agent)
            && !served.queued
        {
            served.queued = true;
            self.queued.push_back(agent);
        }
    }

    /// Sends what may leave, a turn per agent, and asks for what is missing.
    pub(super) fn pump(&mut self) {
        if self.outbound.is_full() {
            // The writer wakes us when there is room.
            return;
        }
        let may_repair = !self.repair_busy && self.state.registry.is_trusted() && Instant::now() >= self.repair_after;
        let mut wants = Vec::new();
        let mut turns = self.queued.len();
        while turns > 0 {
            turns -= 1;
            let Some(agent) = self.queued.pop_front() else { break };
            let left = self.turn(agent);
            let now = self.now_ms();
            let Some((served, _)) = self.agents.get_mut(&agent) else { continue };
            served.queued = false;
            if may_repair
                && wants.len() < REPAIRED_AT_ONCE
                && let Some(from) = served.session.wants_repair(now)
            {
                let agent_name = served.name.clone();
                wants.push(Want {
                    agent_id: agent,
                    agent_name,
                    from,
                    settled_below: served.floor,
                    resumed_to: served.session.resumed_to(),
                });
            } else if left
                || served.wants_probe()
                || served.may_send() && (served.session.has_ready() || served.session.is_behind() && !self.repair_busy)
            {
                // One whose repair is under way comes back with it.
                self.queue(agent);
                // Another turn at once only for those that could go on.
                turns += usize::from(left && !self.outbound.is_full());
            }
        }
        if !wants.is_empty() {
            self.repair_busy = true;
            let (engine, scope) = (self.state.engine.clone(), self.node.scope);
            self.jobs.push(async move { Done::Repaired(engine.read_missing(scope, &wants).await) }.boxed());
        }
    }

    /// One agent's turn. Returns whether it could send more at once.
    pub(super) fn turn(&mut self, agent: AgentId) -> bool {
        if !self.state.registry.is_trusted() {
            return false;
        }
        let Some((served, next)) = self.agents.get_mut(&agent) else { return false };
        if served.wants_probe() {
            if self.pacing.as_ref().is_none_or(Pacing::has_room) {
                let msg_id = format!("position_{}", uuid::Uuid::new_v4());
                self.outbound.text(position_probe(&served.name, &agent.to_string(), &msg_id).into());
                served.probe_sent();
                if let Some(barrier) = self.pacing.as_mut().and_then(Pacing::sent) {
                    self.outbound.text(barrier.into());
                }
            }
            return false;
        }
        let (mut last, mut sent) = (0, 0);
        for _ in 0..TURN {
            if self.outbound.is_full()
                || self.pacing.as_ref().is_some_and(|pacing| !pacing.has_room())
                || !served.may_send()
            {
                break;
            }
            let Some((seq, out)) = served.session.take() else { break };
            last = seq;
            sent += 1;
            if self.direct
                && seq > served.sent_before
                && let Some(id) = &out.delivery_id
            {
                self.outbound.text(accepted(agent, id).into());
            }
            let span = out.traceparent.as_deref().map(|traceparent| {
                let span =
                    tracing::info_span!("node.deliver", delivery.seq = seq, delivery.id = out.delivery_id.as_deref());
                relay_engine::trace::set_parent(&span, traceparent);
                span
            });
            let entered = span.as_ref().map(tracing::Span::enter);
            self.outbound.text(out.body);
            if entered.is_some()
                && let Some(sent) = relay_engine::trace::current()
            {
                served.trace(seq, sent);
            }
            drop(entered);
            if !out.live && seq <= served.session.resumed_to() {
                metrics::counter!(metric_names::DELIVERIES_REPLAYED).increment(1);
            }
            served.time(seq);
            if let Some(barrier) = self.pacing.as_mut().and_then(Pacing::sent) {
                self.outbound.text(barrier.into());
            }
        }
        let left = served.session.has_ready()
            && served.may_send()
            && !self.outbound.is_full()
            && self.pacing.as_ref().is_none_or(Pacing::has_room);
        next.store(served.session.next(), std::sync::atomic::Ordering::Relaxed);
        if last > 0 {
            metrics::counter!(metric_names::DELIVERIES_SENT).increment(sent);
            self.cursor_moved(agent, last, 0);
        }
        left
    }

    pub(super) fn on_repaired(&mut self, repaired: EngineResult<Vec<Repaired>>) {
        self.repair_busy = false;
        match repaired {
            Ok(repaired) => {
                for one in repaired {
                    let Some((served, _)) = self.agents.get_mut(&one.agent_id) else { continue };
                    let frames = one.frames.into_iter().filter_map(|frame| {
                        let body = Utf8Bytes::try_from(frame.body).ok()?;
                        let delivery_id = frame.delivery_id.map(|id| id.to_string());
                        Some((frame.seq, Outgoing { body, delivery_id, traceparent: None, live: false }))
                    });
                    served.session.on_rows(frames);
                    self.queue(one.agent_id);
                }
            }
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "a repair waits for storage");
                self.repair_after = Instant::now() + REPAIR_RETRY;
                for (served, _) in self.agents.values_mut() {
                    served.session.on_repair_failed();
                }
            }
        }
        let behind: Vec<_> =
            self.agents.iter().filter(|(_, (served, _))| served.session.is_behind()).map(|(agent, _)| *agent).collect();
        behind.into_iter().for_each(|agent| self.queue(agent));
    }

    /// Passes a best-effort event on, if there is room and the agent takes deliveries at all.
    pub(super) fn on_notice(&mut self, agent: AgentId, notice: &Notice) {
        let room = !self.outbound.is_full() && self.pacing.as_ref().is_none_or(Pacing::has_room);
        let Some((served, _)) = self.agents.get(&agent).filter(|(served, _)| room && served.session.is_open()) else {
            if notice.outcome().is_some() {
                self.state.registry.may_have_missed(self.node.scope, agent);
            }
            return;
        };
        let id = agent.to_string();
        match &notice.event_id {
            // Brokers do not know context updates and log each of them.
            None if self.pacing.is_some() => {}
            None => self.send(frame::context_update(&notice.topic, &notice.event, &[id], &notice.data)),
            Some(event_id) => {
                let text = frame::event_deliver(&id, &served.name, event_id, &notice.event, &notice.data);
                if let Some(invocation) = notice.outcome() {
                    self.state.engine.outcome_told(self.node.scope, invocation);
                }
                let barrier = self.pacing.as_mut().and_then(Pacing::sent);
                self.send(text);
                if let Some(barrier) = barrier {
                    self.send(barrier);
                }
            }
        }
    }
}

/// Whether a location, `node/provider` or `node/` for none in particular, is the fence's. Ids of nodes may contain `/`.
fn is_here(location: &str, fence: &Fence) -> bool {
    let provider = location.strip_prefix(fence.node_id.as_str()).and_then(|rest| rest.strip_prefix('/'));
    provider.is_some_and(|provider| provider.is_empty() || provider == fence.provider.as_str())
}

/// Waits until a floor that was written behind can be read. The job ends with its connection, so it needs no other
/// bound.
async fn until_stored(engine: Engine, node: NodeCaller, agent: AgentId, floor: Seq) -> Done {
    loop {
        tokio::time::sleep(STORED_WITHIN).await;
        match engine.positions(&[(node.scope, agent)]).await.as_deref() {
            // An agent that has left for another node acknowledges nothing here any more.
            Ok([position]) if position.ack_floor < floor && position.node_id == node.node_id => {}
            Ok(_) => return Done::Stored { agent, floor },
            Err(error) => tracing::debug!(error = error as &dyn std::error::Error, "held acks wait for storage"),
        }
    }
}

/// Asks until storage answers. The job ends with its connection, so it needs no other bound.
async fn until_looked_into(engine: Engine, fence: Fence, agent: AgentId, told: Seq) -> Done {
    loop {
        match engine.position_told(&fence, agent, told).await {
            Ok(position) => return Done::LookedInto { agent, told, position },
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "a told position waits for storage");
                tokio::time::sleep(REPAIR_RETRY).await;
            }
        }
    }
}

fn moved(bound: &Bound, agent: AgentId, sent_seq: Seq, acked_seq: Seq) -> CursorMove {
    CursorMove {
        scope: bound.fence.scope,
        agent_id: agent,
        node_id: bound.fence.node_id.clone(),
        provider: bound.fence.provider.clone(),
        sent_seq,
        acked_seq,
    }
}

/// `delivery.accepted`, written right before the first `deliver` of a row to a direct node. Ids need no
/// escaping.
fn accepted(agent: AgentId, delivery_id: &str) -> String {
    let message_id = delivery_id.split('_').nth(1).unwrap_or_default();
    format!(
        r#"{{"v":1,"type":"context.update","topic":"agent","event":"delivery.accepted","agent_ids":["{agent}"],"data":{{"delivery_id":"{delivery_id}","message_id":"{message_id}"}}}}"#
    )
}

#[cfg(test)]
mod tests {
    use relay_domain::{NodeId, ProviderName, WorkspaceId, WorkspaceScope};

    use super::*;

    #[test]
    fn a_location_is_here_whatever_its_node_is_called() {
        let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(1));
        for node in ["n", "team/n"] {
            let (node_id, provider) = (NodeId::new(node), ProviderName::new("broker"));
            let fence = Fence { scope, node_id, provider, epoch: 1 };
            assert!(is_here(&format!("{node}/broker"), &fence) && is_here(&format!("{node}/"), &fence), "{node}");
            for elsewhere in
                [format!("{node}/other"), format!("{node}2/broker"), node.to_owned(), "m/broker".to_owned()]
            {
                assert!(!is_here(&elsewhere, &fence), "{elsewhere}");
            }
        }
    }
}
