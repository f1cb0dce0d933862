//! One node's connection: a task around everything that can happen to it.
//!
//! Nothing here waits for storage: what needs it is a job, polled beside the socket, so that acks are
//! taken and agents delivered to while another agent registers.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    pin::Pin,
    time::{Duration, Instant},
};

use axum::extract::ws::{Message, WebSocket};
use futures::{
    FutureExt as _, Stream, StreamExt as _,
    future::BoxFuture,
    stream::{FuturesUnordered, SelectAll, SplitStream},
};
use relay_domain::{
    AgentId,
    names::{MAX_NOTE_BYTES, check_length},
    session::Seq,
    takeover::Proof,
};
use relay_engine::{
    EngineResult,
    auth::NodeCaller,
    mailbox::{Heartbeat, LiveFrame, Position, Repaired, Tail},
};
use relay_wire::frame::{self, Inbound};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::{
    control::{self, Bound, Effect, Outcome, Request},
    hosting::{self, StartRule},
    invoking::Invoked,
    outbound::Outbound,
    pacing::Pacing,
    registry::{Event, Handle},
    served::Served,
    upgrade::FRAME_LIMIT,
};
use crate::state::AppState;

/// Frames that may wait for the engine. Past it the socket is not read: its peer waits.
const CONTROL_QUEUE: usize = 64;
/// Results that are recorded side by side.
const RESULTS: usize = 64;
/// Inbound frames taken per [`RATE_WINDOW`]; past it the socket is not read until the window ends.
pub(super) const RATE: u32 = 2000;
const RATE_WINDOW: Duration = Duration::from_millis(250);
/// How long frames that came before the end may take.
const FINISH_WITHIN: Duration = Duration::from_secs(5);
/// How long closing may take, so that the peer can take the close frame.
const LINGER: Duration = Duration::from_secs(2);

pub(super) type TailStream = Pin<Box<dyn Stream<Item = (AgentId, LiveFrame)> + Send>>;

/// What a job brought.
pub(super) enum Done {
    Control(Box<Outcome>),
    /// The answer to a result, if it has one.
    Result(Option<String>),
    /// Agents with their tails already running, and how they start.
    Serve {
        start: StartRule,
        agents: Vec<(Position, Tail)>,
    },
    /// Who is located here, as of a moment.
    Relisted {
        asked: Instant,
        positions: Vec<Position>,
    },
    Repaired(EngineResult<Vec<Repaired>>),
    /// Where a mailbox stands whose broker has told a position above it.
    LookedInto {
        agent: AgentId,
        told: Seq,
        position: Option<Position>,
    },
    /// A held ack can be read in the store.
    Stored {
        agent: AgentId,
        floor: Seq,
    },
}

pub(super) struct Connection {
    pub(super) state: AppState,
    pub(super) node: NodeCaller,
    pub(super) direct: bool,
    pub(super) name: String,
    pub(super) handle: Handle,
    pub(super) outbound: Outbound,
    pub(super) bound: Option<Bound>,
    pub(super) agents: HashMap<AgentId, (Served, std::sync::Arc<std::sync::atomic::AtomicI64>)>,
    pub(super) names: HashMap<String, AgentId>,
    pub(super) tails: SelectAll<TailStream>,
    pub(super) jobs: FuturesUnordered<BoxFuture<'static, Done>>,
    pub(super) waiting: VecDeque<Request>,
    pub(super) control_busy: bool,
    /// The answer to a direct node's registration, until its agent is served.
    registered: Option<String>,
    /// Results that are being recorded. They may go side by side; what comes after them waits.
    pub(super) results: usize,
    pub(super) repair_busy: bool,
    pub(super) relist_busy: bool,
    pub(super) relist_again: bool,
    /// No repair before this: storage has just failed one.
    pub(super) repair_after: Instant,
    /// Agents that a reply or an inventory of this connection has named as running.
    pub(super) named: HashSet<AgentId>,
    /// Agents whose broker has been asked for their position.
    pub(super) probing: usize,
    /// Agents that may have something to send or to ask for.
    pub(super) queued: VecDeque<AgentId>,
    pub(super) pacing: Option<Pacing>,
    pub(super) started: Instant,
    pub(super) last_inbound: Instant,
    /// When the clock was looked at last, and when the peer was last pinged for its silence.
    pub(super) ticked: Instant,
    pub(super) pinged: Instant,
    pub(super) rate: (Instant, u32),
    /// What this connection was told to do lately.
    pub(super) invoked: Invoked,
    pub(super) provers: Vec<(Instant, oneshot::Sender<Proof>)>,
    pub(super) taken_by: Option<i64>,
    pub(super) closing: Option<(u16, &'static str)>,
    /// Cancelled when the connection ends: nothing is tried again for a peer that has gone.
    gone: CancellationToken,
}

/// Serves a node's socket until it ends.
pub(super) async fn serve(socket: WebSocket, state: AppState, node: NodeCaller, direct: bool) {
    let (sink, mut inbound) = socket.split();
    let (outbound, writer) = Outbound::new(sink);
    let writer = tokio::spawn(writer);
    let (handle, mut events) = state.registry.enter(node.scope, &node.node_id);
    let now = Instant::now();
    let mut connection = Connection {
        name: uuid::Uuid::new_v4().to_string(),
        state,
        node,
        direct,
        handle,
        outbound,
        bound: None,
        agents: HashMap::new(),
        names: HashMap::new(),
        tails: SelectAll::new(),
        jobs: FuturesUnordered::new(),
        waiting: VecDeque::new(),
        control_busy: false,
        registered: None,
        results: 0,
        repair_busy: false,
        relist_busy: false,
        relist_again: false,
        repair_after: now,
        named: HashSet::new(),
        probing: 0,
        queued: VecDeque::new(),
        pacing: None,
        started: now,
        last_inbound: now,
        ticked: now,
        pinged: now,
        rate: (now, 0),
        invoked: Invoked::default(),
        provers: Vec::new(),
        taken_by: None,
        closing: None,
        gone: CancellationToken::new(),
    };
    connection.run(&mut inbound, &mut events).await;
    connection.end(inbound, writer).await;
}

impl Connection {
    async fn run(&mut self, inbound: &mut SplitStream<WebSocket>, events: &mut mpsc::Receiver<Event>) {
        while self.closing.is_none() && !self.outbound.is_over() {
            self.store_due_acks();
            self.pump();
            let wakes_at = self.wakes_at();
            tokio::select! {
                // What says that an agent has moved goes before what would still be sent to it.
                biased;
                Some(event) = events.recv() => self.on_event(event),
                Some(done) = self.jobs.next(), if !self.jobs.is_empty() => self.on_done(done),
                frame = inbound.next(), if self.takes_input() => match frame {
                    Some(Ok(message)) => self.on_message(message),
                    Some(Err(error)) => { self.on_socket_error(&error); return }
                    None => return,
                },
                Some((agent, live)) = self.tails.next(), if !self.tails.is_empty() => self.on_live(agent, live),
                () = self.outbound.drained() => {}
                () = tokio::time::sleep_until(wakes_at.into()) => {}
            }
            self.tick_if_due();
        }
    }

    /// Whether the socket is read: not while requests pile up or frames come in too fast.
    pub(super) fn takes_input(&self) -> bool {
        self.waiting.len() < CONTROL_QUEUE
            && !self.outbound.is_crowded()
            && (self.rate.1 < RATE || self.rate.0.elapsed() >= RATE_WINDOW)
    }

    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(super) fn on_message(&mut self, message: Message) {
        self.last_inbound = Instant::now();
        for (_, proof) in self.provers.drain(..) {
            let _ = proof.send(Proof::Alive);
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
                self.send(frame::error(None, "invalid_message", "frames are text"));
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
                self.send(frame::error(refusal.id.as_deref(), "invalid_message", &refusal.message));
                return;
            }
        };
        match decoded.frame {
            Inbound::Ack(ack) => self.on_ack(&ack.agent, i64::try_from(ack.up_to_seq).unwrap_or(i64::MAX)),
            Inbound::Heartbeat(beat) => self.on_heartbeat(decoded.id.as_deref(), *beat),
            Inbound::Ignored => {}
            frame => {
                self.waiting.push_back(Request { id: decoded.id, frame });
                self.next_control();
            }
        }
    }

    /// Hands the next waiting frame to the engine, one at a time.
    pub(super) fn next_control(&mut self) {
        while !self.control_busy
            && self.results < RESULTS
            && matches!(self.waiting.front(), Some(Request { frame: Inbound::ActionResult(_), .. }))
        {
            let Some(request) = self.waiting.pop_front() else { return };
            self.results += 1;
            self.jobs.push(self.control().handle(request).map(|outcome| Done::Result(outcome.reply)).boxed());
        }
        if self.control_busy || self.results > 0 {
            return;
        }
        let Some(request) = self.waiting.pop_front() else { return };
        self.control_busy = true;
        let connection = self.control();
        self.jobs.push(connection.handle(request).map(|outcome| Done::Control(Box::new(outcome))).boxed());
    }

    fn control(&self) -> control::Connection {
        control::Connection {
            engine: self.state.engine.clone(),
            scope: self.node.scope,
            node_id: self.node.node_id.clone(),
            direct: self.direct,
            gateway_id: self.state.gateway_id,
            connection: self.name.clone(),
            bound: self.bound.clone(),
            gone: self.gone.clone(),
        }
    }

    pub(super) fn on_heartbeat(&mut self, id: Option<&str>, beat: frame::Heartbeat) {
        if beat.node_id.as_ref().is_some_and(|node| *node != self.node.node_id.as_str()) {
            self.send(frame::error(id, "node_id_mismatch", "node_id is not this connection's node"));
            return;
        }
        if let Err(error) = control::check_capabilities(beat.capabilities.as_deref().unwrap_or_default()) {
            self.send(frame::error(id, "invalid_message", &error.to_string()));
            return;
        }
        let version = beat.version.as_deref().unwrap_or_default();
        if let Err(error) = check_length("version", version, MAX_NOTE_BYTES) {
            self.send(frame::error(id, "invalid_message", &error.to_string()));
            return;
        }
        // Before the register has been handled a heartbeat is early, not wrong.
        let Some(bound) = &self.bound else { return };
        let fence = &bound.fence;
        self.state.engine.heartbeat(Heartbeat {
            scope: fence.scope,
            node_id: fence.node_id.clone(),
            provider: fence.provider.clone(),
            epoch: fence.epoch,
            load: beat.load.unwrap_or_default().clamp(0.0, 1.0),
            // Who does not measure says 0.
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
            Event::Taken { epoch } => {
                self.taken_by = self.taken_by.max(Some(epoch));
                self.close_if_taken();
            }
            Event::Close { code, reason } => self.closing = Some((code, reason)),
            Event::Prove(proof) => {
                self.outbound.ping();
                self.provers.push((Instant::now(), proof));
            }
        }
    }

    /// A newer epoch than ours holds the provider, unless a register of our own is just taking it.
    pub(super) fn close_if_taken(&mut self) {
        let ours = self.bound.as_ref().map(|bound| bound.fence.epoch);
        if !self.control_busy && ours.is_some() && self.taken_by > ours {
            // Some clients come straight back after 1000, so a direct node gets another code.
            self.closing = Some((if self.direct { 4001 } else { 1000 }, "superseded"));
        }
    }

    pub(super) fn on_done(&mut self, done: Done) {
        match done {
            Done::Control(outcome) => {
                if self.direct && outcome.reply.is_some() && matches!(outcome.effect, Effect::Registered(_)) {
                    // Answered once its agent is served: what happens after the answer is told to it.
                    self.registered = outcome.reply;
                    self.apply(outcome.effect);
                    return;
                }
                if let Some(reply) = outcome.reply {
                    self.send(reply);
                }
                self.apply(outcome.effect);
                self.control_done();
            }
            Done::Result(reply) => {
                self.results -= 1;
                if let Some(reply) = reply {
                    self.send(reply);
                }
                self.next_control();
            }
            Done::Serve { start, agents } => {
                let registered = self.registered.take();
                let is_answer = registered.is_some();
                // Before any delivery.
                registered.into_iter().for_each(|reply| self.send(reply));
                for (position, tail) in agents {
                    self.adopt(position, tail, start);
                }
                if is_answer {
                    self.control_done();
                }
            }
            Done::Relisted { asked, positions } => self.on_relisted(asked, positions),
            Done::Repaired(repaired) => self.on_repaired(repaired),
            Done::LookedInto { agent, told, position } => self.on_looked_into(agent, told, position.as_ref()),
            Done::Stored { agent, floor } => self.on_stored(agent, floor),
        }
    }

    fn control_done(&mut self) {
        self.control_busy = false;
        self.close_if_taken();
        self.next_control();
    }

    pub(super) fn send(&self, text: String) {
        self.outbound.text(text.into());
    }

    /// Leaves everything in order: the close frame, the registry, the provider's row, the acks.
    async fn end(mut self, mut inbound: SplitStream<WebSocket>, writer: tokio::task::JoinHandle<()>) {
        self.gone.cancel();
        // What the node has asked for before it left still counts: its deregistration above all.
        let finish = async {
            while self.control_busy || self.results > 0 || !self.waiting.is_empty() {
                self.next_control();
                match self.jobs.next().await {
                    None => break,
                    Some(Done::Result(_)) => self.results -= 1,
                    Some(Done::Control(outcome)) => {
                        self.control_busy = false;
                        match outcome.effect {
                            Effect::Registered(bound) | Effect::Unregistered { held: Some(bound), .. } => {
                                self.bound = Some(bound);
                            }
                            _ => {}
                        }
                    }
                    Some(_) => {}
                }
            }
        };
        let _ = tokio::time::timeout(FINISH_WITHIN, finish).await;
        if let Some((code, reason)) = self.closing {
            self.outbound.close(code, reason);
        }
        let agents: Vec<_> = self.agents.keys().copied().collect();
        for agent in agents {
            self.drop_agent(agent);
        }
        self.state.registry.leave(&self.handle, self.node.scope, &self.node.node_id);
        if let Some(bound) = &self.bound {
            hosting::disconnect(&self.state.engine, &bound.fence).await;
        }
        if self.closing.is_some() {
            // Reading on lets the peer's frames and its close arrive, instead of a reset.
            let rest = async { while let Some(Ok(_)) = inbound.next().await {} };
            let _ = tokio::time::timeout(LINGER, rest).await;
        }
        drop(self.outbound);
        let _ = tokio::time::timeout(LINGER, writer).await;
    }
}
