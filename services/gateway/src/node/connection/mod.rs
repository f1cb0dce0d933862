//! Connection of one node: the task that owns its socket.
//!
//! [`ConnectionState`] decides; the task feeds it with messages, events, live copies and results of jobs, and performs
//! the effects that it returns. The task never waits for storage: work that needs storage is a job, polled beside the
//! socket, so that acks are accepted and deliveries are sent while another agent registers.

mod control;
mod delayed_acks;
mod effects;
mod flow;
mod heartbeats;
mod hosting;
mod inbound;
mod invocations;
mod jobs;
mod outbound;
mod pacing;
mod peer_liveness;
mod registration;
mod requests;
mod served_agent;
mod state;
#[cfg(test)]
mod state_tests;
mod token_check;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use axum::extract::ws::WebSocket;
use futures::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use relay_domain::{
    AgentId, access::token::TokenHash, mailboxes::stream::Seq, metric_names, workspaces::family::FamilyId,
};
use relay_engine::{access::callers::NodeCaller, mailboxes::serving::CursorMove};
use relay_runtime::server::ReadGate;
use relay_tasks::{isolate, spawn_isolated};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::{
    control::ControlContext,
    effects::{Conditions, Effect, Input},
    inbound::{Inbound, ReadOutcome, TOO_LARGE},
    jobs::{Job, JobResult},
    outbound::{DeliveryTraces, Outbound, OutgoingFrame},
    registration::INTERNAL,
    state::{ConnectionState, NOT_REGISTERED},
};
use super::registry::{Handle, Inbox};
use crate::state::AppState;

/// Time that frames received before the end may take.
const FINISH_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that the peer has to receive the close frame.
const CLOSE_LINGER: Duration = Duration::from_secs(2);

/// Other end of a socket.
pub(super) struct Peer {
    pub(super) node: NodeCaller,
    /// Token that opened the socket.
    pub(super) token: TokenHash,
    /// Bounds what the socket reads ahead.
    pub(super) gate: ReadGate,
}

/// Shell of a connection: its socket, jobs and place in the registry.
struct Connection {
    state: ConnectionState,
    app: AppState,
    node: NodeCaller,
    token: TokenHash,
    /// Instance name for clients that give none; unique per connection.
    name: String,
    /// Recovery epoch under which the socket was opened. After another recovery it sends nothing and its acks count no
    /// more, until it is closed.
    epoch: Option<i64>,
    /// Address of this task in the registry.
    handle: Handle,
    outbound: Outbound,
    routes: HashMap<AgentId, Route>,
    jobs: FuturesUnordered<BoxFuture<'static, JobResult>>,
    /// Cancelled when the connection ends, so that jobs stop retrying for a closed peer.
    closed: CancellationToken,
}

/// Parts of a served agent outside of the state.
struct Route {
    /// The seq that leaves next, which the registry's silence check reads.
    next: Arc<AtomicI64>,
    traces: DeliveryTraces,
}

/// Serves a node's socket until it ends.
///
/// Not an `async fn`: its future would hold the arguments, among them the socket, beside the connection made of them.
pub(super) fn serve_socket(
    socket: WebSocket,
    app: AppState,
    family: FamilyId,
    peer: Peer,
) -> impl Future<Output = ()> + Send {
    let Peer { node, token, gate } = peer;
    let (sink, inbound) = socket.split();
    let mut inbound = Inbound::new(inbound, gate, app.connections.bodies.clone(), family);
    let (outbound, writer) = Outbound::new(sink);
    let writer = spawn_isolated("connection", writer);
    let (handle, mut inbox) = app.registry.add_peer(node.scope, &node.node_id, token);
    // A drain that has begun since the check of the upgrade may have listed the connections before this one was added.
    if app.shutdown.is_requested() {
        handle.close(1012, "draining");
    }
    // Read after the registration: a recovery that ends before is not missed, and one that ends later closes this peer.
    let epoch = app.engine.recovery().epoch();
    let now = Instant::now();
    let mut connection = Connection {
        state: ConnectionState::new(node.clone(), epoch, now, now + app.connections.registration_timeout),
        app,
        node,
        token,
        name: uuid::Uuid::new_v4().to_string(),
        epoch,
        handle,
        outbound,
        routes: HashMap::new(),
        jobs: FuturesUnordered::new(),
        closed: CancellationToken::new(),
    };
    async move {
        // After a panic as well, the routes and the provider are released: the client reconnects and resumes.
        if isolate("connection", connection.run(&mut inbound, &mut inbox)).await.is_none() {
            connection.state.close(INTERNAL);
        }
        // Apart from this future, which would have room for it from the start.
        Box::pin(connection.shut_down(inbound, writer)).await;
    }
}

impl Connection {
    async fn run(&mut self, inbound: &mut Inbound, inbox: &mut Inbox) {
        while self.state.closing().is_none() && !self.outbound.is_closed() {
            let accepts_input = self.state.accepts_input(Instant::now()) && !self.outbound.is_crowded();
            // The writer has made room since the last step looked.
            let has_room_again = self.state.waits_for_room() && !self.outbound.is_full();
            let next_wake = self.state.next_wake();
            let input = tokio::select! {
                // Events come first: one may say that an agent has moved, and nothing may be sent to it after that.
                biased;
                Some(event) = inbox.events.recv() => Input::Event(event),
                Some(done) = self.jobs.next(), if !self.jobs.is_empty() => Input::Job(done),
                frame = inbound.next(), if accepts_input => match frame {
                    Some(ReadOutcome::Message(message, memory)) => Input::Message(message, memory),
                    Some(ReadOutcome::Refused(close)) => return self.state.close(close),
                    Some(ReadOutcome::Failed(error)) => {
                        if let Some(close) = close_after_error(&error) {
                            self.state.close(close);
                        }
                        return;
                    }
                    // The stream has ended, so no close frame would arrive.
                    None => return,
                },
                // After the socket, whose frames are limited per window: copies cannot wait for long behind them.
                Some(copies) = inbox.copies.recv() => Input::Live(copies),
                () = std::future::ready(()), if has_room_again => Input::Wake,
                // Also at the end of the writer, which the condition of the loop then finds.
                () = self.outbound.drained() => Input::Wake,
                () = tokio::time::sleep_until(next_wake) => Input::Wake,
            };
            self.state.step(input, self.conditions());
            self.perform_effects();
        }
    }

    fn conditions(&self) -> Conditions {
        let recovery = self.app.engine.recovery();
        Conditions {
            now: Instant::now(),
            unix_ms: self.app.engine.now().timestamp_millis(),
            is_trusted: self.app.registry.is_trusted() && recovery.serves(self.epoch),
            was_restored: recovery.was_restored_recently(),
            room: self.outbound.room(),
            is_crowded: self.outbound.is_crowded(),
        }
    }

    fn perform_effects(&mut self) {
        while let Some(effect) = self.state.next_effect() {
            self.perform(effect);
        }
    }

    fn perform(&mut self, effect: Effect) {
        let (engine, registry) = (&self.app.engine, &self.app.registry);
        match effect {
            Effect::Send(text) => self.outbound.send_text(text),
            Effect::Ping => self.outbound.send_ping(),
            Effect::ProbePosition { agent, name } => {
                let msg_id = format!("position_{}", uuid::Uuid::new_v4());
                self.outbound.send_text(pacing::position_probe(&name, &agent.to_string(), &msg_id).into());
            }
            Effect::Deliver { agent, seq, frame } => self.deliver(agent, seq, frame),
            Effect::Start(job) => self.start(job),
            Effect::Register => self.on_registered(),
            Effect::Route(agent) => self.route(agent),
            Effect::ReclaimRoute { agent, is_assigned } => self.reclaim_route(agent, is_assigned),
            Effect::Unroute(agent) => {
                self.routes.remove(&agent);
                registry.unroute_agent(&self.handle, self.node.scope, agent);
            }
            Effect::NextSeq { agent, next } => {
                if let Some(route) = self.routes.get(&agent) {
                    // Only the silence check reads it, and an older number costs it no more than a comparison.
                    route.next.store(next, Ordering::Relaxed);
                }
                if let Some(binding) = self.state.binding() {
                    engine.recovery().note_sent(&binding.fence, agent, next - 1);
                }
            }
            Effect::Sent { agent, up_to, count } => {
                metrics::counter!(metric_names::DELIVERIES_SENT).increment(count);
                // 0 leaves the ack floor as it is: moves of one mailbox are merged by their maxima.
                self.move_cursor(agent, up_to, 0);
            }
            Effect::Acked { agent, floor, latency } => {
                if let Some(latency) = latency {
                    metrics::histogram!(metric_names::ACK_LATENCY_SECONDS).record(latency.as_secs_f64());
                }
                if let Some(route) = self.routes.get_mut(&agent) {
                    route.traces.on_ack(floor);
                }
            }
            Effect::StoreAck { agent, floor } => self.move_cursor(agent, 0, floor),
            Effect::StoreAckAt { at, agent, floor } => {
                // Built now, while the connection has its binding. A task of its own, because the connection may end
                // before `at`.
                let Some(cursor_move) = self.cursor_move(agent, 0, floor) else { return };
                let engine = engine.clone();
                spawn_isolated("connection", async move {
                    tokio::time::sleep_until(at).await;
                    engine.mailboxes().move_cursor(cursor_move);
                });
            }
            Effect::Heartbeat(beat) => engine.nodes().record_heartbeat(*beat),
            Effect::InvocationSent(sent) => engine.actions().record_invocation_sent(*sent),
            Effect::OutcomeSent(invocation) => engine.actions().record_outcome_sent(self.node.scope, invocation),
            Effect::OutcomeMissed(agent) => registry.mark_possibly_missed(self.node.scope, agent),
            Effect::MailboxChanged(agent) => engine.hints().mailbox_changed(self.node.scope, agent),
            Effect::CompareMailbox(agent) => engine.hints().compare_mailbox(self.node.scope, agent),
            Effect::AnswerProbe(answer, outcome) => {
                // Fails only if its receiver has ended: no answer counts as silence.
                let _ = answer.send(outcome);
            }
            Effect::Count(metric) => metrics::counter!(metric).increment(1),
        }
    }

    /// Writes a frame inside a span of its delivery, if the send was traced.
    fn deliver(&mut self, agent: AgentId, seq: Seq, frame: OutgoingFrame) {
        let OutgoingFrame { body, delivery_id, traceparent, .. } = frame;
        let body = body.encode();
        match (traceparent, self.routes.get_mut(&agent)) {
            (Some(traceparent), Some(route)) => {
                let outbound = &self.outbound;
                route.traces.in_delivery_span(seq, delivery_id.as_deref(), &traceparent, || outbound.send_text(body));
            }
            _ => self.outbound.send_text(body),
        }
    }

    fn on_registered(&self) {
        let Some(binding) = self.state.binding() else { return };
        tracing::info!(node.id = %binding.fence.node_id, node.provider = %binding.fence.provider, node.epoch = binding.fence.epoch, node.capabilities = binding.capabilities, "node registered");
        self.app.registry.bind_peer(&self.handle, &binding.fence);
    }

    fn start(&self, job: Job) {
        let job = match job {
            Job::Request(request) => {
                self.control_context().handle(request).map(|done| JobResult::Request(Box::new(done))).boxed()
            }
            Job::Result(request) => {
                self.control_context().handle(request).map(|done| JobResult::Result(done.reply)).boxed()
            }
            Job::Read(read) => jobs::read(self.app.engine.clone(), self.node.clone(), read).boxed(),
        };
        self.jobs.push(job);
    }

    fn control_context(&self) -> ControlContext {
        ControlContext {
            engine: self.app.engine.clone(),
            node: self.node.clone(),
            token: self.token,
            gateway_id: self.app.gateway_id,
            connection: self.name.clone(),
            binding: self.state.binding().cloned(),
            closed: self.closed.clone(),
        }
    }

    /// Routes an agent to this connection.
    fn route(&mut self, agent: AgentId) {
        let Some(binding) = self.state.binding() else { return };
        let next = Arc::new(AtomicI64::new(0));
        self.app.registry.route_agent(&self.handle, &binding.fence, agent, &next);
        self.routes.insert(agent, Route { next, traces: DeliveryTraces::default() });
    }

    /// Keeps the route of an agent that is served here, also after another connection has served it temporarily.
    fn reclaim_route(&self, agent: AgentId, is_assigned: bool) {
        let (Some(binding), Some(route)) = (self.state.binding(), self.routes.get(&agent)) else { return };
        match self.app.registry.find_route(self.node.scope, agent) {
            Some((handle, _)) if handle == self.handle.id => {}
            // Another connection of this node may serve an unassigned agent as well.
            Some((_, node)) if !is_assigned && node == binding.fence.node_id => {}
            _ => self.app.registry.route_agent(&self.handle, &binding.fence, agent, &route.next),
        }
    }

    fn move_cursor(&self, agent: AgentId, sent_seq: Seq, acked_seq: Seq) {
        if let Some(cursor_move) = self.cursor_move(agent, sent_seq, acked_seq) {
            self.app.engine.mailboxes().move_cursor(cursor_move);
        }
    }

    fn cursor_move(&self, agent: AgentId, sent_seq: Seq, acked_seq: Seq) -> Option<CursorMove> {
        let fence = &self.state.binding()?.fence;
        Some(CursorMove {
            scope: fence.scope,
            agent_id: agent,
            node_id: fence.node_id.clone(),
            provider: fence.provider.clone(),
            sent_seq,
            acked_seq,
            epoch: self.epoch,
        })
    }

    /// Shuts the connection down: finishes requests, sends the close frame, removes the routes, releases the provider.
    async fn shut_down(mut self, mut inbound: Inbound, writer: tokio::task::JoinHandle<()>) {
        // First, so that a registration stops its attempts: it must not take the provider for a peer that is closed.
        self.closed.cancel();
        // Requests received before the end still count, above all a deregistration.
        let finish = async {
            self.state.stop();
            self.perform_effects();
            while self.state.has_unfinished_requests()
                && let Some(done) = self.jobs.next().await
            {
                self.state.finish_request(done);
                self.perform_effects();
            }
        };
        let _ = tokio::time::timeout(FINISH_TIMEOUT, finish).await;
        if let Some((code, reason)) = self.state.closing() {
            if (code, reason) == NOT_REGISTERED {
                metrics::counter!(metric_names::CONNECTIONS_TIMED_OUT, "reason" => "registration").increment(1);
            }
            // Before the disconnect is recorded, which may take seconds while storage is unavailable.
            self.outbound.send_close(code, reason);
        }
        // Routes end before the provider is released: copies that arrive from now on cause a hint, instead of waiting
        // in a queue that is not read any more.
        self.state.drop_all_agents();
        self.perform_effects();
        self.app.registry.remove_peer(&self.handle, self.node.scope, &self.node.node_id);
        if let Some(binding) = self.state.binding() {
            jobs::disconnect_provider(&self.app.engine, &binding.fence).await;
        }
        if self.state.closing().is_some() {
            // Reading on lets the peer's frames and its close arrive. Dropping the socket now would reset it.
            let _ = tokio::time::timeout(CLOSE_LINGER, inbound.drain()).await;
        }
        // The last sender: without it the writer ends once the queue is written.
        drop(self.outbound);
        let _ = tokio::time::timeout(CLOSE_LINGER, writer).await;
    }
}

/// Returns the close code and reason for a message that the socket refused to read.
fn close_after_error(error: &axum::Error) -> Option<(u16, &'static str)> {
    use tokio_tungstenite::tungstenite::error::{CapacityError, Error};
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<Error>());
    match cause {
        Some(Error::Capacity(CapacityError::MessageTooLong { .. })) => Some(TOO_LARGE),
        Some(Error::Utf8(_)) => Some((1007, "text is not UTF-8")),
        _ => None,
    }
}
