//! Delivery of one connection: live frames, repairs, acks, and the order in which agents send.
//!
//! Methods of [`Connection`], called by its task. The per-mailbox rules are in `relay_domain::mailboxes::stream`.

use std::time::Duration;

use axum::extract::ws::Utf8Bytes;
use futures::FutureExt as _;
use relay_domain::{
    AgentId,
    mailboxes::stream::{Arrival, Seq},
    metric_names,
};
use relay_engine::{
    Engine, EngineResult,
    access::authentication::NodeCaller,
    mailboxes::serving::{CursorMove, Fence, LiveFrame, MailboxPosition, RepairRequest, RepairedMailbox},
};
use tokio::time::Instant;

use relay_tasks::spawn_isolated;
use relay_wire::nodes::frame;

use super::{
    connection::{Connection, JobResult},
    control::ProviderBinding,
    delayed_acks::DelayedAcks,
    notices::Notice,
    pacing::{BARRIER_AGENT, Pacing, position_probe},
    served_agent::{Outgoing, PositionAnswer, ServedAgent},
};

/// Interval at which a delayed ack is looked up in storage; a floor is usually stored within it.
const ACK_STORE_POLL_INTERVAL: Duration = Duration::from_millis(40);
/// Mailboxes repaired by one read.
const MAILBOXES_PER_REPAIR: usize = 100;
/// Delay after a failed repair.
const REPAIR_RETRY: Duration = Duration::from_millis(200);
/// Frames that one agent sends before the next agent's turn.
const FRAMES_PER_TURN: usize = 16;

impl Connection {
    pub(super) fn on_live(&mut self, agent: AgentId, live: LiveFrame) {
        let Some(binding) = &self.binding else { return };
        let Some((served, _)) = self.agents.get_mut(&agent) else { return };
        let fence = &binding.fence;
        if !is_on_provider(&live.location, fence) {
            // The agent was located elsewhere when this was committed. A hint carries no authority, so the stream
            // stops until the binding has been read again.
            served.stream.suspend();
            self.state.engine.hints().mailbox_changed(fence.scope, agent);
            self.relist();
        }
        let Some((served, _)) = self.agents.get_mut(&agent) else { return };
        match live.body.and_then(|body| Utf8Bytes::try_from(body).ok()) {
            Some(body) if !self.outbound.is_full() => {
                let out =
                    Outgoing { body, delivery_id: Some(live.delivery_id), traceparent: live.traceparent, live: true };
                if served.stream.on_live(live.seq, out) == Arrival::Duplicate {
                    metrics::counter!(metric_names::DUPLICATES_DROPPED).increment(1);
                }
            }
            // Too large for the log, or no room in the queue: read from storage later.
            _ => served.stream.on_head(live.seq),
        }
        self.queue_agent(agent);
    }

    pub(super) fn on_ack(&mut self, name: &str, up_to: i64) {
        if name == BARRIER_AGENT {
            if let Some(pacing) = &mut self.pacing {
                pacing.on_barrier_ack();
            }
            return;
        }
        // A direct node has one agent, so its acks count even if the agent was renamed while connected.
        let only = || if self.direct { self.agents.keys().next().copied() } else { None };
        let Some(agent) = self.names.get(name).copied().or_else(only) else { return };
        let Some((served, _)) = self.agents.get_mut(&agent) else { return };
        match served.on_probe_answer(up_to, self.state.engine.was_restored_recently()) {
            PositionAnswer::Unexpected => {}
            PositionAnswer::Opened => {
                self.probing = self.probing.saturating_sub(1);
                self.queue_agent(agent);
            }
            PositionAnswer::AboveHead => {
                self.verify_reported_position(agent, up_to);
                return;
            }
        }
        let Some((served, _)) = self.agents.get_mut(&agent) else { return };
        let Some(ack) = served.stream.on_ack(up_to) else { return };
        if ack.clamped {
            metrics::counter!(metric_names::ACKS_CLAMPED).increment(1);
        }
        for sent in served.take_traces(ack.floor) {
            // Empty child span of the frame's span: it marks the time of the ack.
            let span = tracing::info_span!("node.ack", delivery.up_to_seq = ack.floor);
            relay_trace::set_parent(&span, &sent);
            span.in_scope(|| {});
        }
        if let Some(took) = served.take_ack_latency(ack.floor) {
            metrics::histogram!(metric_names::ACK_LATENCY_SECONDS).record(took.as_secs_f64());
        }
        match &mut served.delayed_acks {
            Some(acks) => acks.add(ack.floor, Instant::now()),
            None => self.cursor_moved(agent, 0, ack.floor),
        }
    }

    /// Verifies a position above the mailbox's head: the database was restored, or the broker is wrong.
    fn verify_reported_position(&mut self, agent: AgentId, reported: Seq) {
        let Some(binding) = &self.binding else { return };
        let (engine, fence) = (self.state.engine.clone(), binding.fence.clone());
        self.jobs.push(verify_position(engine, fence, agent, reported).boxed());
    }

    pub(super) fn on_position_verified(&mut self, agent: AgentId, reported: Seq, position: Option<&MailboxPosition>) {
        let Some((served, _)) = self.agents.get_mut(&agent).filter(|(served, _)| served.is_probing()) else { return };
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
        if !self.binding.as_ref().is_some_and(|binding| binding.rereads_after_ack) {
            return;
        }
        let now = Instant::now();
        let take_due = |(agent, (served, _)): (&AgentId, &mut (ServedAgent, _))| {
            Some((*agent, served.delayed_acks.as_mut()?.take_due(now)?))
        };
        let due: Vec<_> = self.agents.iter_mut().filter_map(take_due).collect();
        for (agent, floor) in due {
            self.cursor_moved(agent, 0, floor);
            self.jobs.push(wait_until_ack_stored(self.state.engine.clone(), self.node.clone(), agent, floor).boxed());
        }
    }

    pub(super) fn on_ack_stored(&mut self, agent: AgentId, floor: Seq) {
        if let Some(acks) = self.agents.get_mut(&agent).and_then(|(served, _)| served.delayed_acks.as_mut()) {
            acks.mark_stored(floor);
        }
        self.queue_agent(agent);
    }

    /// Time when the next delayed ack is due.
    pub(super) fn next_due_ack(&self) -> Option<Instant> {
        self.agents.values().filter_map(|(served, _)| served.delayed_acks.as_ref()?.next_due()).min()
    }

    /// Stores the pending ack of an agent that leaves this connection, at the time when it was due.
    pub(super) fn store_last_ack(&self, agent: AgentId, served: &ServedAgent) {
        let (Some(binding), Some((at, floor))) =
            (&self.binding, served.delayed_acks.as_ref().and_then(DelayedAcks::last_pending))
        else {
            return;
        };
        let (engine, cursor_move) = (self.state.engine.clone(), cursor_move(binding, agent, 0, floor));
        spawn_isolated("connection", async move {
            tokio::time::sleep_until(at).await;
            engine.cursor_moved(cursor_move);
        });
    }

    pub(super) fn cursor_moved(&self, agent: AgentId, sent_seq: i64, acked_seq: i64) {
        let Some(binding) = &self.binding else { return };
        self.state.engine.cursor_moved(cursor_move(binding, agent, sent_seq, acked_seq));
    }

    pub(super) fn queue_agent(&mut self, agent: AgentId) {
        if let Some((served, _)) = self.agents.get_mut(&agent)
            && !served.queued
        {
            served.queued = true;
            self.queued.push_back(agent);
        }
    }

    /// Sends frames in turns, one turn per agent, and requests missing frames.
    pub(super) fn pump_deliveries(&mut self) {
        if self.outbound.is_full() {
            // The writer wakes the task when there is room.
            return;
        }
        let may_repair = !self.repair_busy && self.state.registry.is_trusted() && Instant::now() >= self.repair_after;
        let mut wants = Vec::new();
        let mut turns = self.queued.len();
        while turns > 0 {
            turns -= 1;
            let Some(agent) = self.queued.pop_front() else { break };
            let left = self.send_turn(agent);
            let now = self.now_ms();
            let Some((served, _)) = self.agents.get_mut(&agent) else { continue };
            served.queued = false;
            if may_repair
                && wants.len() < MAILBOXES_PER_REPAIR
                && let Some(from) = served.stream.request_repair(now)
            {
                let agent_name = served.name.clone();
                wants.push(RepairRequest {
                    agent_id: agent,
                    agent_name,
                    from,
                    settled_below: served.floor,
                    resumed_to: served.stream.replay_end(),
                });
            } else if left
                || served.wants_probe()
                || served.may_send() && (served.stream.has_ready() || served.stream.is_behind() && !self.repair_busy)
            {
                // An agent whose repair is in progress is queued again with the repair.
                self.queue_agent(agent);
                // Another turn in this call only for agents that could send more at once.
                turns += usize::from(left && !self.outbound.is_full());
            }
        }
        if !wants.is_empty() {
            self.repair_busy = true;
            let (engine, scope) = (self.state.engine.clone(), self.node.scope);
            self.jobs
                .push(async move { JobResult::Repaired(engine.read_missing_deliveries(scope, &wants).await) }.boxed());
        }
    }

    /// Runs one agent's turn. Returns whether it could send more at once.
    pub(super) fn send_turn(&mut self, agent: AgentId) -> bool {
        if !self.state.registry.is_trusted() {
            return false;
        }
        let Some((served, next)) = self.agents.get_mut(&agent) else { return false };
        if served.wants_probe() {
            if self.pacing.as_ref().is_none_or(Pacing::has_room) {
                let msg_id = format!("position_{}", uuid::Uuid::new_v4());
                self.outbound.send_text(position_probe(&served.name, &agent.to_string(), &msg_id).into());
                served.probe_sent();
                if let Some(barrier) = self.pacing.as_mut().and_then(Pacing::count_frame) {
                    self.outbound.send_text(barrier.into());
                }
            }
            return false;
        }
        let (mut last, mut sent) = (0, 0);
        for _ in 0..FRAMES_PER_TURN {
            if self.outbound.is_full()
                || self.pacing.as_ref().is_some_and(|pacing| !pacing.has_room())
                || !served.may_send()
            {
                break;
            }
            let Some((seq, out)) = served.stream.next_frame() else { break };
            last = seq;
            sent += 1;
            if self.direct
                && seq > served.sent_before
                && let Some(id) = &out.delivery_id
            {
                self.outbound.send_text(delivery_accepted_frame(agent, id).into());
            }
            let span = out.traceparent.as_deref().map(|traceparent| {
                let span =
                    tracing::info_span!("node.deliver", delivery.seq = seq, delivery.id = out.delivery_id.as_deref());
                relay_trace::set_parent(&span, traceparent);
                span
            });
            let entered = span.as_ref().map(tracing::Span::enter);
            self.outbound.send_text(out.body);
            if entered.is_some()
                && let Some(sent) = relay_trace::current_traceparent()
            {
                served.add_trace(seq, sent);
            }
            drop(entered);
            if !out.live && seq <= served.stream.replay_end() {
                metrics::counter!(metric_names::DELIVERIES_REPLAYED).increment(1);
            }
            served.start_ack_timer(seq);
            if let Some(barrier) = self.pacing.as_mut().and_then(Pacing::count_frame) {
                self.outbound.send_text(barrier.into());
            }
        }
        let left = served.stream.has_ready()
            && served.may_send()
            && !self.outbound.is_full()
            && self.pacing.as_ref().is_none_or(Pacing::has_room);
        next.store(served.stream.next(), std::sync::atomic::Ordering::Relaxed);
        if last > 0 {
            metrics::counter!(metric_names::DELIVERIES_SENT).increment(sent);
            self.cursor_moved(agent, last, 0);
        }
        left
    }

    pub(super) fn on_repaired(&mut self, repaired: EngineResult<Vec<RepairedMailbox>>) {
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
                    served.stream.on_rows(frames);
                    self.queue_agent(one.agent_id);
                }
            }
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "repair failed, retrying");
                self.repair_after = Instant::now() + REPAIR_RETRY;
                for (served, _) in self.agents.values_mut() {
                    served.stream.on_repair_failed();
                }
            }
        }
        let behind: Vec<_> =
            self.agents.iter().filter(|(_, (served, _))| served.stream.is_behind()).map(|(agent, _)| *agent).collect();
        behind.into_iter().for_each(|agent| self.queue_agent(agent));
    }

    /// Sends a best-effort event, if there is room and the agent receives deliveries.
    pub(super) fn on_notice(&mut self, agent: AgentId, notice: &Notice) {
        let room = !self.outbound.is_full() && self.pacing.as_ref().is_none_or(Pacing::has_room);
        let Some((served, _)) = self.agents.get(&agent).filter(|(served, _)| room && served.stream.is_open()) else {
            if notice.outcome_invocation().is_some() {
                self.state.registry.mark_possibly_missed(self.node.scope, agent);
            }
            return;
        };
        let id = agent.to_string();
        match &notice.event_id {
            // Brokers do not handle context updates and log each of them.
            None if self.pacing.is_some() => {}
            None => self.send_text(frame::encode_context_update(&notice.topic, &notice.event, &[id], &notice.data)),
            Some(event_id) => {
                let text = frame::encode_event_delivery(&id, &served.name, event_id, &notice.event, &notice.data);
                if let Some(invocation) = notice.outcome_invocation() {
                    self.state.engine.record_outcome_sent(self.node.scope, invocation);
                }
                let barrier = self.pacing.as_mut().and_then(Pacing::count_frame);
                self.send_text(text);
                if let Some(barrier) = barrier {
                    self.send_text(barrier);
                }
            }
        }
    }
}

/// Returns whether a location belongs to the fence. It is `node/provider`, or `node/` for an unassigned agent; ids of
/// nodes may contain `/`.
fn is_on_provider(location: &str, fence: &Fence) -> bool {
    let provider = location.strip_prefix(fence.node_id.as_str()).and_then(|rest| rest.strip_prefix('/'));
    provider.is_some_and(|provider| provider.is_empty() || provider == fence.provider.as_str())
}

/// Waits until a floor that was written asynchronously is visible. The job ends with its connection, which bounds the
/// wait.
async fn wait_until_ack_stored(engine: Engine, node: NodeCaller, agent: AgentId, floor: Seq) -> JobResult {
    loop {
        tokio::time::sleep(ACK_STORE_POLL_INTERVAL).await;
        match engine.positions(&[(node.scope, agent)]).await.as_deref() {
            // An agent that moved to another node sends no more acks here.
            Ok([position]) if position.ack_floor < floor && position.node_id == node.node_id => {}
            Ok(_) => return JobResult::AckStored { agent, floor },
            Err(error) => {
                tracing::debug!(error = error as &dyn std::error::Error, "delayed ack not verified, retrying")
            }
        }
    }
}

/// Verifies a reported position, and retries until storage answers. The job ends with its connection, which bounds the
/// retries.
async fn verify_position(engine: Engine, fence: Fence, agent: AgentId, reported: Seq) -> JobResult {
    loop {
        match engine.accept_broker_position(&fence, agent, reported).await {
            Ok(position) => return JobResult::PositionVerified { agent, reported, position },
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "position check failed, retrying");
                tokio::time::sleep(REPAIR_RETRY).await;
            }
        }
    }
}

fn cursor_move(binding: &ProviderBinding, agent: AgentId, sent_seq: Seq, acked_seq: Seq) -> CursorMove {
    CursorMove {
        scope: binding.fence.scope,
        agent_id: agent,
        node_id: binding.fence.node_id.clone(),
        provider: binding.fence.provider.clone(),
        sent_seq,
        acked_seq,
    }
}

/// Builds the `delivery.accepted` frame that precedes the first `deliver` of a row to a direct node. Ids need no
/// escaping.
fn delivery_accepted_frame(agent: AgentId, delivery_id: &str) -> String {
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
