//! Connection of one node: the task that owns the socket and reacts to frames, events, jobs and timers.
//!
//! The task never waits for storage. Work that needs storage is a job, polled beside the socket, so that acks are
//! accepted and deliveries are sent while another agent registers.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    pin::Pin,
    time::Duration,
};

use axum::extract::ws::{Message, WebSocket};
use futures::{
    FutureExt as _, Stream, StreamExt as _,
    future::BoxFuture,
    stream::{FuturesUnordered, SelectAll, SplitStream},
};
use relay_domain::{
    AgentId,
    mailboxes::stream::Seq,
    names::{MAX_NOTE_BYTES, check_length},
    nodes::takeover::ProbeOutcome,
};
use relay_engine::{
    EngineResult,
    access::authentication::NodeCaller,
    mailboxes::serving::{Heartbeat, LiveFrame, MailboxPosition, RepairedMailbox, Tail},
};
use relay_tasks::{isolate, spawn_isolated};
use relay_wire::nodes::frame::{self, InboundFrame};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    control::{self, ControlContext, Effect, Outcome, ProviderBinding, Request},
    hosting::{self, StartMode},
    invocations::SentInvocations,
    outbound::Outbound,
    pacing::Pacing,
    registration::INTERNAL,
    registry::{Event, Handle},
    served_agent::ServedAgent,
    upgrade::FRAME_LIMIT,
};
use crate::state::AppState;

/// Requests that may wait for the engine. Beyond it the socket is not read, which slows the sender down.
const MAX_QUEUED_REQUESTS: usize = 64;
/// Results recorded concurrently.
const MAX_CONCURRENT_RESULTS: usize = 64;
/// Inbound frames accepted per [`RATE_WINDOW`]. Beyond it the socket is not read until the window ends.
pub(super) const MAX_FRAMES_PER_WINDOW: u32 = 2000;
const RATE_WINDOW: Duration = Duration::from_millis(250);
/// Time that frames received before the end may take.
const FINISH_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that the peer has to receive the close frame.
const CLOSE_LINGER: Duration = Duration::from_secs(2);

pub(super) type TailStream = Pin<Box<dyn Stream<Item = (AgentId, LiveFrame)> + Send>>;

/// Outcome of a job.
pub(super) enum JobResult {
    Control(Box<Outcome>),
    /// Reply to an action result, if it has one.
    Result(Option<String>),
    /// Agents whose live tails are open, and how their streams start.
    Serve {
        start: StartMode,
        agents: Vec<(MailboxPosition, Tail)>,
    },
    /// Agents located on this provider, read at or after `asked`.
    Relisted {
        asked: Instant,
        positions: Vec<MailboxPosition>,
    },
    Repaired(EngineResult<Vec<RepairedMailbox>>),
    /// Position of a mailbox whose broker reported a seq above its head.
    PositionVerified {
        agent: AgentId,
        reported: Seq,
        position: Option<MailboxPosition>,
    },
    /// A delayed ack is visible in storage.
    AckStored {
        agent: AgentId,
        floor: Seq,
    },
}

pub(super) struct Connection {
    pub(super) state: AppState,
    pub(super) node: NodeCaller,
    /// The node is one agent's own connection.
    pub(super) direct: bool,
    /// Instance name for clients that give none; unique per connection.
    pub(super) name: String,
    /// Address of this task in the registry.
    pub(super) handle: Handle,
    pub(super) outbound: Outbound,
    /// The provider that the connection registered as; `None` before its registration.
    pub(super) binding: Option<ProviderBinding>,
    /// Served agents. The number is the seq that leaves next, which the registry's silence check reads.
    pub(super) agents: HashMap<AgentId, (ServedAgent, std::sync::Arc<std::sync::atomic::AtomicI64>)>,
    pub(super) names: HashMap<String, AgentId>,
    pub(super) tails: SelectAll<TailStream>,
    pub(super) jobs: FuturesUnordered<BoxFuture<'static, JobResult>>,
    /// Requests that have not started; `control_busy` while one is in progress.
    pub(super) waiting: VecDeque<Request>,
    pub(super) control_busy: bool,
    /// Reply to a direct node's registration, sent once its agent is served.
    registration_reply: Option<String>,
    /// Results being recorded concurrently. Later requests wait for them.
    pub(super) results: usize,
    pub(super) repair_busy: bool,
    /// The located agents are being read; `relist_again` if another change was reported since.
    pub(super) relist_busy: bool,
    pub(super) relist_again: bool,
    /// Earliest time of the next repair; set after storage has failed one.
    pub(super) repair_after: Instant,
    /// Agents that a reply or an inventory of this connection has named as running.
    pub(super) named_agents: HashSet<AgentId>,
    /// Number of agents whose broker has been asked for their position.
    pub(super) probing: usize,
    /// Agents that may have frames to send or a repair to request.
    pub(super) queued: VecDeque<AgentId>,
    /// Present for published brokers, which lock up when too many frames are unconfirmed.
    pub(super) pacing: Option<Pacing>,
    pub(super) started: Instant,
    pub(super) last_inbound: Instant,
    /// Time of the last tick, and of the last ping to a silent peer.
    pub(super) ticked: Instant,
    pub(super) pinged: Instant,
    pub(super) rate: (Instant, u32),
    /// Invocations recently written to this connection.
    pub(super) sent_invocations: SentInvocations,
    pub(super) pending_proofs: Vec<(Instant, oneshot::Sender<ProbeOutcome>)>,
    /// Highest epoch under which another connection took the provider.
    pub(super) superseded_by: Option<i64>,
    /// Close code and reason. Once set, the task ends.
    pub(super) closing: Option<(u16, &'static str)>,
    /// Cancelled when the connection ends, so that jobs stop retrying for a closed peer.
    closed: CancellationToken,
}

/// Serves a node's socket until it ends.
pub(super) async fn serve_socket(socket: WebSocket, state: AppState, node: NodeCaller, direct: bool) {
    let (sink, mut inbound) = socket.split();
    let (outbound, writer) = Outbound::new(sink);
    let writer = spawn_isolated("connection", writer);
    let (handle, mut events) = state.registry.add_peer(node.scope, &node.node_id);
    let now = Instant::now();
    let mut connection = Connection {
        name: uuid::Uuid::new_v4().to_string(),
        state,
        node,
        direct,
        handle,
        outbound,
        binding: None,
        agents: HashMap::new(),
        names: HashMap::new(),
        tails: SelectAll::new(),
        jobs: FuturesUnordered::new(),
        waiting: VecDeque::new(),
        control_busy: false,
        registration_reply: None,
        results: 0,
        repair_busy: false,
        relist_busy: false,
        relist_again: false,
        repair_after: now,
        named_agents: HashSet::new(),
        probing: 0,
        queued: VecDeque::new(),
        pacing: None,
        started: now,
        last_inbound: now,
        ticked: now,
        pinged: now,
        rate: (now, 0),
        sent_invocations: SentInvocations::default(),
        pending_proofs: Vec::new(),
        superseded_by: None,
        closing: None,
        closed: CancellationToken::new(),
    };
    // After a panic as well, the routes and the provider are released: the client reconnects and resumes.
    if isolate("connection", connection.run(&mut inbound, &mut events)).await.is_none() {
        connection.closing = Some(INTERNAL);
    }
    connection.shut_down(inbound, writer).await;
}

impl Connection {
    async fn run(&mut self, inbound: &mut SplitStream<WebSocket>, events: &mut mpsc::Receiver<Event>) {
        while self.closing.is_none() && !self.outbound.is_closed() {
            self.store_due_acks();
            self.pump_deliveries();
            let next_wake = self.next_wake();
            tokio::select! {
                // Events come first: one may say that an agent has moved, and nothing may be sent to it after that.
                biased;
                Some(event) = events.recv() => self.on_event(event),
                Some(done) = self.jobs.next(), if !self.jobs.is_empty() => self.on_job_result(done),
                frame = inbound.next(), if self.accepts_input() => match frame {
                    Some(Ok(message)) => self.on_message(message),
                    Some(Err(error)) => { self.on_socket_error(&error); return }
                    None => return,
                },
                Some((agent, live)) = self.tails.next(), if !self.tails.is_empty() => self.on_live(agent, live),
                () = self.outbound.drained() => {}
                () = tokio::time::sleep_until(next_wake) => {}
            }
            self.tick_if_due();
        }
    }

    /// Returns whether the socket may be read: not while requests queue up or frames arrive too fast.
    pub(super) fn accepts_input(&self) -> bool {
        self.waiting.len() < MAX_QUEUED_REQUESTS
            && !self.outbound.is_crowded()
            && (self.rate.1 < MAX_FRAMES_PER_WINDOW || self.rate.0.elapsed() >= RATE_WINDOW)
    }

    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(super) fn on_message(&mut self, message: Message) {
        self.last_inbound = Instant::now();
        for (_, proof) in self.pending_proofs.drain(..) {
            let _ = proof.send(ProbeOutcome::Alive);
        }
        if self.rate.0.elapsed() >= RATE_WINDOW {
            self.rate = (Instant::now(), 0);
        }
        self.rate.1 += 1;
        match message {
            Message::Text(text) if text.len() > FRAME_LIMIT => self.closing = Some((1009, "frame too large")),
            Message::Binary(bytes) if bytes.len() > FRAME_LIMIT => self.closing = Some((1009, "frame too large")),
            Message::Text(text) => self.on_text(&text),
            Message::Binary(_) => {
                self.send_text(frame::encode_error(None, "invalid_message", "frames are text"));
            }
            Message::Ping(_) | Message::Pong(_) => {}
            Message::Close(_) => self.closing = Some((1000, "")),
        }
    }

    pub(super) fn on_socket_error(&mut self, error: &axum::Error) {
        use tokio_tungstenite::tungstenite::error::{CapacityError, Error};
        let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<Error>());
        self.closing = match cause {
            Some(Error::Capacity(CapacityError::MessageTooLong { .. })) => Some((1009, "frame too large")),
            Some(Error::Utf8(_)) => Some((1007, "text is not UTF-8")),
            _ => return,
        };
    }

    pub(super) fn on_text(&mut self, text: &str) {
        let decoded = match frame::decode(text) {
            Ok(decoded) => decoded,
            Err(refusal) => {
                self.send_text(frame::encode_error(refusal.id.as_deref(), "invalid_message", &refusal.message));
                return;
            }
        };
        match decoded.frame {
            InboundFrame::Ack(ack) => self.on_ack(&ack.agent, i64::try_from(ack.up_to_seq).unwrap_or(i64::MAX)),
            InboundFrame::Heartbeat(beat) => self.on_heartbeat(decoded.id.as_deref(), *beat),
            InboundFrame::Ignored => {}
            frame @ (InboundFrame::Register(_)
            | InboundFrame::Deregister
            | InboundFrame::AgentRegister(_)
            | InboundFrame::AgentRecover(_)
            | InboundFrame::AgentDeregister(_)
            | InboundFrame::Inventory(_)
            | InboundFrame::ActionResult(_)
            | InboundFrame::ActionAccept(_)
            | InboundFrame::Spawn(_)) => {
                self.waiting.push_back(Request { id: decoded.id, frame });
                self.start_next_request();
            }
        }
    }

    /// Starts the next queued request. Requests run one at a time, except for consecutive action results.
    pub(super) fn start_next_request(&mut self) {
        while !self.control_busy
            && self.results < MAX_CONCURRENT_RESULTS
            && matches!(self.waiting.front(), Some(Request { frame: InboundFrame::ActionResult(_), .. }))
        {
            let Some(request) = self.waiting.pop_front() else { return };
            self.results += 1;
            self.jobs
                .push(self.control_context().handle(request).map(|outcome| JobResult::Result(outcome.reply)).boxed());
        }
        if self.control_busy || self.results > 0 {
            return;
        }
        let Some(request) = self.waiting.pop_front() else { return };
        self.control_busy = true;
        let connection = self.control_context();
        self.jobs.push(connection.handle(request).map(|outcome| JobResult::Control(Box::new(outcome))).boxed());
    }

    fn control_context(&self) -> ControlContext {
        ControlContext {
            engine: self.state.engine.clone(),
            scope: self.node.scope,
            node_id: self.node.node_id.clone(),
            direct: self.direct,
            gateway_id: self.state.gateway_id,
            connection: self.name.clone(),
            binding: self.binding.clone(),
            closed: self.closed.clone(),
        }
    }

    pub(super) fn on_heartbeat(&mut self, id: Option<&str>, beat: frame::Heartbeat) {
        if beat.node_id.as_ref().is_some_and(|node| *node != self.node.node_id.as_str()) {
            self.send_text(frame::encode_error(id, "node_id_mismatch", "node_id is not this connection's node"));
            return;
        }
        if let Err(error) = control::check_capabilities(beat.capabilities.as_deref().unwrap_or_default()) {
            self.send_text(frame::encode_error(id, "invalid_message", &error.to_string()));
            return;
        }
        let version = beat.version.as_deref().unwrap_or_default();
        if let Err(error) = check_length("version", version, MAX_NOTE_BYTES) {
            self.send_text(frame::encode_error(id, "invalid_message", &error.to_string()));
            return;
        }
        // A heartbeat before the registration has been handled is early, not invalid.
        let Some(binding) = &self.binding else { return };
        let fence = &binding.fence;
        self.state.engine.record_heartbeat(Heartbeat {
            scope: fence.scope,
            node_id: fence.node_id.clone(),
            provider: fence.provider.clone(),
            epoch: fence.epoch,
            load: beat.load.unwrap_or_default().clamp(0.0, 1.0),
            // Providers that do not measure their load send 0.
            load_measured: beat.load_reported.unwrap_or(beat.load.is_some_and(|load| load > 0.0)),
            active_agents: i32::try_from(beat.active_agents).unwrap_or(i32::MAX),
            max_agents: beat.max_agents.map(|most| i32::try_from(most).unwrap_or(i32::MAX)),
            version: beat.version,
            handlers_live: beat.handlers_live,
            capabilities: beat.capabilities.as_deref().map(control::stored_capabilities),
        });
    }

    pub(super) fn on_event(&mut self, event: Event) {
        match event {
            Event::Positions(positions) => positions.iter().for_each(|position| self.on_position(position)),
            Event::Relist => self.relist(),
            Event::Notice { agents, notice } => agents.iter().for_each(|agent| self.on_notice(*agent, &notice)),
            Event::Invoke(invocation) => self.on_invoke(&invocation),
            Event::ProviderTaken { epoch } => {
                self.superseded_by = self.superseded_by.max(Some(epoch));
                self.close_if_superseded();
            }
            Event::Close { code, reason } => self.closing = Some((code, reason)),
            Event::ProveLiveness(proof) => {
                self.outbound.send_ping();
                self.pending_proofs.push((Instant::now(), proof));
            }
        }
    }

    /// Closes the connection if a newer epoch holds its provider. Waits while a registration is in progress: it may be
    /// the one that takes the provider.
    pub(super) fn close_if_superseded(&mut self) {
        let ours = self.binding.as_ref().map(|binding| binding.fence.epoch);
        if !self.control_busy && ours.is_some() && self.superseded_by > ours {
            // Some clients reconnect at once after 1000, so a direct node gets another code.
            self.closing = Some((if self.direct { 4001 } else { 1000 }, "superseded"));
        }
    }

    pub(super) fn on_job_result(&mut self, done: JobResult) {
        match done {
            JobResult::Control(outcome) => {
                if self.direct && outcome.reply.is_some() && matches!(outcome.effect, Effect::Registered(_)) {
                    // The reply is sent once the agent is served, so that the client receives every later event.
                    self.registration_reply = outcome.reply;
                    self.apply_effect(outcome.effect);
                    return;
                }
                if let Some(reply) = outcome.reply {
                    self.send_text(reply);
                }
                self.apply_effect(outcome.effect);
                self.finish_request();
            }
            JobResult::Result(reply) => {
                self.results -= 1;
                if let Some(reply) = reply {
                    self.send_text(reply);
                }
                self.start_next_request();
            }
            JobResult::Serve { start, agents } => {
                let registration_reply = self.registration_reply.take();
                let is_answer = registration_reply.is_some();
                // The reply precedes every delivery.
                registration_reply.into_iter().for_each(|reply| self.send_text(reply));
                for (position, tail) in agents {
                    self.adopt_agent(position, tail, start);
                }
                if is_answer {
                    self.finish_request();
                }
            }
            JobResult::Relisted { asked, positions } => self.on_relisted(asked, positions),
            JobResult::Repaired(repaired) => self.on_repaired(repaired),
            JobResult::PositionVerified { agent, reported, position } => {
                self.on_position_verified(agent, reported, position.as_ref())
            }
            JobResult::AckStored { agent, floor } => self.on_ack_stored(agent, floor),
        }
    }

    fn finish_request(&mut self) {
        self.control_busy = false;
        self.close_if_superseded();
        self.start_next_request();
    }

    pub(super) fn send_text(&self, text: String) {
        self.outbound.send_text(text.into());
    }

    /// Shuts the connection down: finishes requests, sends the close frame, removes the routes, releases the provider.
    async fn shut_down(mut self, mut inbound: SplitStream<WebSocket>, writer: tokio::task::JoinHandle<()>) {
        self.closed.cancel();
        // Requests received before the end still count, above all a deregistration.
        let finish = async {
            while self.control_busy || self.results > 0 || !self.waiting.is_empty() {
                self.start_next_request();
                match self.jobs.next().await {
                    None => break,
                    Some(JobResult::Result(_)) => self.results -= 1,
                    Some(JobResult::Control(outcome)) => {
                        self.control_busy = false;
                        if let Effect::Registered(binding) | Effect::RegistrationFailed { held: Some(binding), .. } =
                            outcome.effect
                        {
                            self.binding = Some(binding);
                        }
                    }
                    Some(_) => {}
                }
            }
        };
        let _ = tokio::time::timeout(FINISH_TIMEOUT, finish).await;
        if let Some((code, reason)) = self.closing {
            self.outbound.send_close(code, reason);
        }
        let agents: Vec<_> = self.agents.keys().copied().collect();
        for agent in agents {
            self.drop_agent(agent);
        }
        self.state.registry.remove_peer(&self.handle, self.node.scope, &self.node.node_id);
        if let Some(binding) = &self.binding {
            hosting::disconnect_provider(&self.state.engine, &binding.fence).await;
        }
        if self.closing.is_some() {
            // Reading on lets the peer's frames and its close arrive. Dropping the socket now would reset it.
            let rest = async { while let Some(Ok(_)) = inbound.next().await {} };
            let _ = tokio::time::timeout(CLOSE_LINGER, rest).await;
        }
        drop(self.outbound);
        let _ = tokio::time::timeout(CLOSE_LINGER, writer).await;
    }
}
