//! State of one node's connection: inputs in, effects out.
//!
//! [`ConnectionState`] is pure: it reads no clock, socket or storage. The facts that it needs of them
//! come with every step as [`Conditions`]; [`Effect`]s leave it, which the task performs in order. Other files hold the
//! rules of one subject: `hosting` for the served agents, `flow` for their deliveries, `heartbeats`, `requests` and
//! `invocations`.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::Duration,
};

use axum::extract::ws::{Message, Utf8Bytes};
use relay_domain::{
    AgentId,
    mailboxes::stream::Seq,
    nodes::{tags::check_repo_tag, takeover::ProbeOutcome},
};
use relay_engine::access::callers::NodeCaller;
use relay_wire::nodes::frame::{self, InboundFrame};
use tokio::time::Instant;

use super::inbound::TOO_LARGE;
use super::{
    control::{Outcome, ProviderBinding, Request, RequestEffect},
    effects::{Close, Conditions, Effect, Input},
    heartbeats::DeclaredChanges,
    invocations::SentInvocations,
    jobs::{Job, JobResult, Read},
    outbound::BufferCount,
    pacing::Pacing,
    peer_liveness::{PeerLiveness, Silence},
    registration::declared_tags,
    requests::RequestQueue,
    served_agent::ServedAgent,
};
use crate::{
    connections::FrameMemory,
    node::{registry::Event, upgrade::FRAME_LIMIT},
};

/// Inbound frames accepted per [`RATE_WINDOW`]. Beyond it the socket is not read until the window ends.
const MAX_FRAMES_PER_WINDOW: u32 = 2000;
const RATE_WINDOW: Duration = Duration::from_millis(250);
/// Close of a connection whose node does not register. Clients reconnect after it with increasing delays.
pub(super) const NOT_REGISTERED: Close = (1013, "not registered in time");
/// Added to the time to register while a request is in progress: a registration is tried for 8 s.
const REQUEST_GRACE: Duration = Duration::from_secs(10);

/// Reading of the agents located on the provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Relisting {
    Idle,
    Busy,
    /// Another change was reported since the reading began.
    Again,
}

pub(super) struct ConnectionState {
    pub(super) node: NodeCaller,
    /// Recovery epoch under which the socket was opened.
    pub(super) recovery_epoch: Option<i64>,
    /// Conditions of the current step.
    pub(super) conditions: Conditions,
    effects: VecDeque<Effect>,
    started: Instant,
    /// The provider that the connection registered as; `None` before its registration.
    pub(super) binding: Option<ProviderBinding>,
    /// Boxed, since the table of a direct node has four places.
    pub(super) agents: HashMap<AgentId, Box<ServedAgent>>,
    pub(super) names: HashMap<String, AgentId>,
    /// Agents that a reply or an inventory of this connection has named as running.
    pub(super) named_agents: HashSet<AgentId>,
    /// Agents that may have frames to send or a repair to request.
    pub(super) queued: VecDeque<AgentId>,
    /// Number of agents whose broker has been asked for their position.
    pub(super) probing: usize,
    pub(super) requests: RequestQueue,
    pub(super) changes: DeclaredChanges,
    /// Reply to a direct node's registration, sent once its agent is served.
    registration_reply: Option<Utf8Bytes>,
    pub(super) relisting: Relisting,
    pub(super) is_repairing: bool,
    /// Earliest time of the next repair; set after storage has failed one.
    pub(super) repair_after: Instant,
    /// Highest seqs of live copies for agents that are not served here, and may be adopted soon. Their number is
    /// bounded.
    pub(super) unserved: HashMap<AgentId, Seq>,
    /// Live copies, and rows read from storage, that wait to be sent.
    pub(super) live_bytes: BufferCount,
    pub(super) row_bytes: BufferCount,
    /// Time of the last frame sent, or of the rows read since.
    pub(super) rows_moved: Instant,
    /// Present for published brokers, which lock up when too many frames are unconfirmed.
    pub(super) pacing: Option<Pacing>,
    liveness: PeerLiveness,
    /// Start of the rate window, and inbound frames since.
    rate: (Instant, u32),
    /// Start of a second, and agents named in context updates since.
    pub(super) updates: (Instant, usize),
    ticked: Instant,
    pub(super) sent_invocations: SentInvocations,
    /// Highest epoch under which another connection took the provider.
    superseded_by: Option<i64>,
    /// Time by which the node must have registered.
    registration_due: Instant,
    /// Once set, the connection ends.
    closing: Option<Close>,
}

impl ConnectionState {
    /// Begins a connection under a recovery epoch, whose node must register until `registration_due`.
    pub(super) fn new(node: NodeCaller, recovery_epoch: Option<i64>, now: Instant, registration_due: Instant) -> Self {
        Self {
            node,
            recovery_epoch,
            conditions: Conditions::before_first_step(now),
            effects: VecDeque::new(),
            started: now,
            binding: None,
            agents: HashMap::new(),
            names: HashMap::new(),
            named_agents: HashSet::new(),
            queued: VecDeque::new(),
            probing: 0,
            requests: RequestQueue::default(),
            changes: DeclaredChanges::default(),
            registration_reply: None,
            relisting: Relisting::Idle,
            is_repairing: false,
            repair_after: now,
            unserved: HashMap::new(),
            live_bytes: BufferCount::default(),
            row_bytes: BufferCount::default(),
            rows_moved: now,
            pacing: None,
            liveness: PeerLiveness::new(now),
            rate: (now, 0),
            updates: (now, 0),
            ticked: now,
            sent_invocations: SentInvocations::default(),
            superseded_by: None,
            registration_due,
            closing: None,
        }
    }

    /// Handles one input. Effects are taken with [`Self::next_effect`].
    pub(super) fn step(&mut self, input: Input, conditions: Conditions) {
        self.conditions = conditions;
        match input {
            Input::Message(message, memory) => self.on_message(message, memory),
            Input::Event(event) => self.on_event(event),
            Input::Job(done) => self.on_job_result(done),
            Input::Live(copies) => copies.into_iter().for_each(|(agent, live)| {
                if self.is_current(&live) { self.on_live(agent, live) } else { self.on_outdated(agent) }
            }),
            Input::Wake => {}
        }
        // A busy connection must not postpone its tick.
        self.tick_if_due();
        self.close_if_unregistered();
        // Once the end is decided no delivery leaves: the agents may be served elsewhere by now.
        if self.closing.is_none() {
            self.store_due_acks();
            self.pump_deliveries();
        }
    }

    pub(super) fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    pub(super) fn emit(&mut self, effect: Effect) {
        self.effects.push_back(effect);
    }

    pub(super) fn send_text(&mut self, text: impl Into<Utf8Bytes>) {
        let text = text.into();
        self.conditions.room.take(text.len());
        self.emit(Effect::Send(text));
    }

    pub(super) fn start_read(&mut self, read: Read) {
        self.emit(Effect::Start(Job::Read(read)));
    }

    pub(super) const fn now(&self) -> Instant {
        self.conditions.now
    }

    /// Time since the connection began, in milliseconds.
    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(self.now().duration_since(self.started).as_millis()).unwrap_or(u64::MAX)
    }

    pub(super) const fn binding(&self) -> Option<&ProviderBinding> {
        self.binding.as_ref()
    }

    /// Returns why the connection ends, if it does.
    pub(super) const fn closing(&self) -> Option<Close> {
        self.closing
    }

    pub(super) const fn close(&mut self, close: Close) {
        self.closing = Some(close);
    }

    /// Returns whether the socket may be read: not while requests queue up or frames arrive too fast.
    pub(super) fn accepts_input(&self, now: Instant) -> bool {
        !self.requests.is_full() && (self.rate.1 < MAX_FRAMES_PER_WINDOW || now - self.rate.0 >= RATE_WINDOW)
    }

    /// Returns whether agents are queued that the outbound queue had no room for.
    pub(super) fn waits_for_room(&self) -> bool {
        !self.queued.is_empty() && self.conditions.room.is_empty()
    }

    fn on_message(&mut self, message: Message, memory: Option<FrameMemory>) {
        let now = self.now();
        for proof in self.liveness.on_inbound(now) {
            self.effects.push_back(Effect::AnswerProbe(proof, ProbeOutcome::Alive));
        }
        if now - self.rate.0 >= RATE_WINDOW {
            self.rate = (now, 0);
        }
        self.rate.1 += 1;
        match message {
            Message::Text(text) if text.len() > FRAME_LIMIT => self.close(TOO_LARGE),
            Message::Binary(bytes) if bytes.len() > FRAME_LIMIT => self.close(TOO_LARGE),
            Message::Text(text) => self.on_text(&text, memory),
            Message::Binary(_) => self.refuse(None, "invalid_message", "frames are text"),
            Message::Ping(_) | Message::Pong(_) => {}
            Message::Close(_) => self.close((1000, "")),
        }
    }

    pub(super) fn refuse(&mut self, id: Option<&str>, code: &str, message: &str) {
        self.send_text(frame::encode_error(id, code, message));
    }

    fn on_text(&mut self, text: &str, memory: Option<FrameMemory>) {
        let decoded = match frame::decode(text) {
            Ok(decoded) => decoded,
            Err(refusal) => return self.refuse(refusal.id.as_deref(), "invalid_message", &refusal.message),
        };
        match decoded.frame {
            // Never queued behind requests: acks make room for deliveries and need no storage to be accepted. A number
            // that does not fit is clamped to the highest seq sent, as any other.
            InboundFrame::Ack(ack) => self.on_ack(&ack.agent, i64::try_from(ack.up_to_seq).unwrap_or(i64::MAX)),
            InboundFrame::Heartbeat(beat) => self.on_heartbeat(decoded.id.as_deref(), *beat, memory),
            InboundFrame::Ignored => {}
            // Here and not with the other checks, because on sockets its code is `invalid_message`.
            InboundFrame::Register(register)
                if let Some(refusal) = declared_tags(&register).iter().find_map(|tag| check_repo_tag(tag).err()) =>
            {
                self.refuse(decoded.id.as_deref(), "invalid_message", &refusal.to_string());
            }
            frame @ (InboundFrame::Register(_)
            | InboundFrame::Deregister
            | InboundFrame::AgentRegister(_)
            | InboundFrame::AgentRecover(_)
            | InboundFrame::AgentDeregister(_)
            | InboundFrame::Inventory(_)
            | InboundFrame::ActionResult(_)
            | InboundFrame::ActionAccept(_)
            | InboundFrame::Spawn(_)
            | InboundFrame::MessageSend(_)) => {
                self.requests.push(Request { id: decoded.id, frame, memory });
                self.start_requests();
            }
        }
    }

    pub(super) fn start_requests(&mut self) {
        while let Some(job) = self.requests.start_next() {
            self.emit(Effect::Start(job));
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Positions(positions) => positions.iter().for_each(|position| self.on_position(position)),
            Event::Relist => self.relist(),
            Event::Notice { agents, notice } if notice.event_id.is_none() => self.on_context_update(&agents, &notice),
            Event::Notice { agents, notice } => agents.iter().for_each(|agent| self.on_notice(*agent, &notice)),
            Event::WorkspaceNotice(notice) => {
                let agents: Vec<AgentId> = self.agents.keys().copied().collect();
                self.on_context_update(&agents, &notice);
            }
            Event::Invoke(invocation) => self.on_invoke(&invocation),
            Event::ProviderTaken { epoch } => {
                self.superseded_by = self.superseded_by.max(Some(epoch));
                self.close_if_superseded();
            }
            Event::Close { code, reason } => self.close((code, reason)),
            Event::ProveLiveness(proof) => {
                // Any frame is a proof; the ping causes one at once.
                self.emit(Effect::Ping);
                self.liveness.add_proof(self.now(), proof);
            }
        }
    }

    /// Closes the connection if a newer epoch holds its provider. Waits while a registration is in progress: it may be
    /// the one that takes the provider.
    fn close_if_superseded(&mut self) {
        let ours = self.binding.as_ref().map(|binding| binding.fence.epoch);
        if !self.requests.is_busy() && ours.is_some() && self.superseded_by > ours {
            // Some clients reconnect at once after 1000, so a direct node gets another code.
            self.close((if self.node.is_direct() { 4001 } else { 1000 }, "superseded"));
        }
    }

    fn on_job_result(&mut self, done: JobResult) {
        match done {
            JobResult::Request(outcome) => self.on_request_done(*outcome),
            JobResult::Result(reply) => {
                self.requests.on_result_done();
                if let Some(reply) = reply {
                    self.send_text(reply);
                }
                self.start_requests();
            }
            JobResult::Serve { start, agents } => {
                agents.iter().for_each(|position| self.adopt_agent(position, start));
                // The agent is routed by now, so that the client receives every later event, and nothing has been
                // delivered, so that the reply comes first.
                if let Some(reply) = self.registration_reply.take() {
                    self.send_text(reply);
                    self.end_request();
                }
            }
            JobResult::Relisted { asked, positions } => self.on_relisted(asked, positions),
            JobResult::Repaired(repaired) => self.on_repaired(repaired),
            JobResult::PositionVerified { agent, reported, position } => {
                self.on_position_verified(agent, reported, position.as_ref());
            }
            JobResult::AckStored { agent, floor } => self.on_ack_stored(agent, floor),
        }
    }

    fn on_request_done(&mut self, outcome: Outcome) {
        let Outcome { reply, effect } = outcome;
        if self.node.is_direct() && reply.is_some() && matches!(effect, RequestEffect::Registered(_)) {
            // The reply is sent once the agent is served, so that the client receives every later event.
            self.registration_reply = reply;
            self.apply_request_effect(effect);
            return;
        }
        if let Some(reply) = reply {
            self.send_text(reply);
        }
        self.apply_request_effect(effect);
        self.end_request();
    }

    fn end_request(&mut self) {
        self.requests.on_request_done();
        self.close_if_superseded();
        self.start_requests();
    }

    /// Prepares the end: requests that were received before it still run.
    pub(super) fn stop(&mut self) {
        // The registration is done; only its reply waited for the agent.
        if self.registration_reply.take().is_some() {
            self.requests.on_request_done();
        }
        self.start_requests();
    }

    /// Returns whether requests received before the end are not finished.
    pub(super) fn has_unfinished_requests(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Handles a job that ends after [`Self::stop`]. Its reply is not sent.
    pub(super) fn finish_request(&mut self, done: JobResult) {
        match done {
            JobResult::Request(outcome) => {
                self.requests.on_request_done();
                match outcome.effect {
                    // The provider is taken, so the end of the connection has to release it.
                    RequestEffect::Registered(binding)
                    | RequestEffect::RegistrationFailed { held: Some(binding), .. } => self.binding = Some(binding),
                    // Clients declare a change once, so it is recorded although the connection ends.
                    RequestEffect::ChangeChecked(beat) => self.on_change_checked(*beat),
                    RequestEffect::None
                    | RequestEffect::ChangeUnchecked(_)
                    | RequestEffect::Hosted { .. }
                    | RequestEffect::Listed(_)
                    | RequestEffect::AgentLeft(_)
                    | RequestEffect::Deregistered
                    | RequestEffect::Refused { .. }
                    | RequestEffect::RegistrationFailed { held: None, .. } => {}
                }
            }
            JobResult::Result(_) => self.requests.on_result_done(),
            JobResult::Serve { .. }
            | JobResult::Relisted { .. }
            | JobResult::Repaired(_)
            | JobResult::PositionVerified { .. }
            | JobResult::AckStored { .. } => {}
        }
        self.start_requests();
    }

    /// Closes the connection of a node that does not register.
    fn close_if_unregistered(&mut self) {
        if self.closing.is_none() && self.registration_deadline().is_some_and(|deadline| deadline <= self.now()) {
            self.close(NOT_REGISTERED);
        }
    }

    /// Returns the time at which the connection ends unless it registers; `None` once it has.
    fn registration_deadline(&self) -> Option<Instant> {
        let grace = if self.requests.is_busy() { REQUEST_GRACE } else { Duration::ZERO };
        self.binding.is_none().then(|| self.registration_due + grace)
    }

    /// Time of the next tick, due ack, return of memory or end of the time to register.
    pub(super) fn next_wake(&self) -> Instant {
        let tick = self.ticked + self.tick_interval();
        let others = [self.next_due_ack(), self.next_return(), self.registration_deadline()];
        others.into_iter().flatten().fold(tick, Instant::min)
    }

    /// Interval until the next tick; shorter while something waits for it.
    fn tick_interval(&self) -> Duration {
        // A broker without room for paced frames wakes the task when it confirms some.
        let retry = !self.queued.is_empty() && self.has_room();
        if retry && !self.conditions.is_trusted {
            // The renewal of the lease, once a second, brings the trust back.
            return Duration::from_millis(200);
        }
        if retry || self.rate.1 >= MAX_FRAMES_PER_WINDOW {
            // Half of the shortest time after which a gap is read from storage.
            Duration::from_millis(10)
        } else if self.liveness.awaits_proof() || self.probing > 0 {
            // A tenth of the time that a peer has for its proof.
            Duration::from_millis(100)
        } else {
            Duration::from_secs(5)
        }
    }

    fn tick_if_due(&mut self) {
        let now = self.now();
        if self.closing.is_some() || now - self.ticked < self.tick_interval() {
            return;
        }
        self.ticked = now;
        // Most connections are idle after their registration. Busy ones allocate again once in a while.
        self.effects.shrink_to_fit();
        self.queued.shrink_to_fit();
        self.requests.shrink_to_fit();
        if self.probing > 0 {
            self.expire_late_probes();
        }
        for proof in self.liveness.take_late_proofs(now) {
            self.emit(Effect::AnswerProbe(proof, ProbeOutcome::Silent));
        }
        if self.conditions.is_crowded || !self.accepts_input(now) {
            // The socket is not being read, so the peer's silence proves nothing.
            self.liveness.restart(now);
            if let Some(pacing) = &mut self.pacing {
                pacing.restart_silence_timer(now);
            }
        }
        let is_unconfirmed = self.pacing.as_ref().is_some_and(|pacing| pacing.is_silent(now));
        match self.liveness.check(now) {
            Some(Silence::Close) => self.close((1011, "no sign of life")),
            _ if is_unconfirmed => self.close((1011, "no sign of life")),
            Some(Silence::Ping) => self.emit(Effect::Ping),
            None => {}
        }
    }
}
