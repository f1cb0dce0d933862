//! One node's connection: a task around everything that can happen to it.
//!
//! Nothing here waits for storage: what needs it is a job, polled beside the socket, so that acks are
//! taken and agents delivered to while another agent registers.

use std::{
    collections::{HashMap, VecDeque},
    pin::Pin,
    time::{Duration, Instant},
};

use axum::extract::ws::{Message, Utf8Bytes, WebSocket};
use futures::{
    FutureExt as _, Stream, StreamExt as _,
    future::BoxFuture,
    stream::{AbortHandle, Abortable, FuturesUnordered, SelectAll, SplitStream},
};
use relay_domain::{AgentId, MessageId, metric_names, session::Arrival, takeover::Proof};
use relay_engine::{
    EngineResult,
    auth::NodeCaller,
    mailbox::{CursorMove, Heartbeat, LiveFrame, Position, Repaired, Tail, Want},
};
use relay_wire::frame::{self, Inbound};
use serde_json::json;
use tokio::sync::{mpsc, oneshot};

use super::{
    control::{self, Bound, Effect, Outcome, Request},
    outbound::Outbound,
    pacing::{BARRIER_AGENT, Pacing, position_probe},
    registry::{Event, Handle},
    served::{Outgoing, Served, Start},
    upgrade::FRAME_LIMIT,
};
use crate::state::AppState;

/// Frames that may wait for the engine. Past it the socket is not read: its peer waits.
const CONTROL_QUEUE: usize = 64;
/// Mailboxes repaired by one read.
const REPAIRED_AT_ONCE: usize = 100;
/// Frames that one agent sends before the next has its turn.
const TURN: usize = 16;
/// Inbound frames taken per [`RATE_WINDOW`]; past it the socket is not read until the window ends.
const RATE: u32 = 2000;
const RATE_WINDOW: Duration = Duration::from_millis(250);
/// A socket without any inbound frame is pinged, and later given up. The slowest clients heartbeat each
/// 30 s.
const PING_AFTER: Duration = Duration::from_secs(25);
const DEAD_AFTER: Duration = Duration::from_secs(75);
/// How long a peer has to answer the ping that proves it alive.
const PROOF_WAIT: Duration = Duration::from_secs(1);
/// How long closing may take, so that the peer can take the close frame.
const LINGER: Duration = Duration::from_secs(2);

type TailStream = Pin<Box<dyn Stream<Item = (AgentId, LiveFrame)> + Send>>;

/// What a job brought.
enum Done {
    Control(Box<Outcome>),
    /// Agents with their tails already running, and how they start.
    Serve {
        start: StartRule,
        agents: EngineResult<Vec<(Position, Tail)>>,
    },
    Relisted(EngineResult<Vec<Position>>),
    Repaired(EngineResult<Vec<Repaired>>),
}

/// How agents that come to be served start.
#[derive(Clone, Copy)]
enum StartRule {
    /// Wait until this connection names them.
    Gated,
    Open(Start),
}

struct Connection {
    state: AppState,
    node: NodeCaller,
    direct: bool,
    name: String,
    handle: Handle,
    outbound: Outbound,
    bound: Option<Bound>,
    agents: HashMap<AgentId, (Served, std::sync::Arc<std::sync::atomic::AtomicI64>)>,
    names: HashMap<String, AgentId>,
    tails: SelectAll<TailStream>,
    jobs: FuturesUnordered<BoxFuture<'static, Done>>,
    waiting: VecDeque<Request>,
    control_busy: bool,
    repair_busy: bool,
    /// Agents that may have something to send or to ask for.
    queued: VecDeque<AgentId>,
    pacing: Option<Pacing>,
    started: Instant,
    last_inbound: Instant,
    rate: (Instant, u32),
    provers: Vec<(Instant, oneshot::Sender<Proof>)>,
    taken_by: Option<i64>,
    closing: Option<(u16, &'static str)>,
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
        repair_busy: false,
        queued: VecDeque::new(),
        pacing: None,
        started: now,
        last_inbound: now,
        rate: (now, 0),
        provers: Vec::new(),
        taken_by: None,
        closing: None,
    };
    connection.run(&mut inbound, &mut events).await;
    connection.end(inbound, writer).await;
}

impl Connection {
    async fn run(&mut self, inbound: &mut SplitStream<WebSocket>, events: &mut mpsc::Receiver<Event>) {
        while self.closing.is_none() && !self.outbound.is_over() {
            self.pump();
            let pause = self.pause();
            tokio::select! {
                frame = inbound.next(), if self.takes_input() => match frame {
                    Some(Ok(message)) => self.on_message(message),
                    Some(Err(error)) => { self.on_socket_error(&error); return }
                    None => return,
                },
                Some(event) = events.recv() => self.on_event(event),
                Some(done) = self.jobs.next(), if !self.jobs.is_empty() => self.on_done(done),
                Some((agent, live)) = self.tails.next(), if !self.tails.is_empty() => self.on_live(agent, live),
                () = self.outbound.drained() => {}
                () = tokio::time::sleep(pause) => self.on_tick(),
            }
        }
    }

    /// Whether the socket is read: not while requests pile up or frames come in too fast.
    fn takes_input(&self) -> bool {
        self.waiting.len() < CONTROL_QUEUE && (self.rate.1 < RATE || self.rate.0.elapsed() >= RATE_WINDOW)
    }

    /// How long the task may sleep if nothing happens.
    fn pause(&self) -> Duration {
        let behind = !self.repair_busy && self.agents.values().any(|(served, _)| served.session.is_behind());
        if behind && !self.outbound.is_full() || self.rate.1 >= RATE {
            Duration::from_millis(10)
        } else if !self.provers.is_empty() || self.agents.values().any(|(served, _)| served.is_probing()) {
            Duration::from_millis(100)
        } else {
            Duration::from_secs(5)
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn on_message(&mut self, message: Message) {
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

    fn on_socket_error(&mut self, error: &axum::Error) {
        use tokio_tungstenite::tungstenite::error::{CapacityError, Error};
        let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<Error>());
        if let Some(Error::Capacity(CapacityError::MessageTooLong { .. })) = cause {
            self.closing = Some((1009, "frame too large"));
        }
    }

    fn on_text(&mut self, text: &str) {
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
    fn next_control(&mut self) {
        if self.control_busy {
            return;
        }
        let Some(request) = self.waiting.pop_front() else { return };
        self.control_busy = true;
        let connection = control::Connection {
            engine: self.state.engine.clone(),
            scope: self.node.scope,
            node_id: self.node.node_id.clone(),
            direct: self.direct,
            gateway_id: self.state.gateway_id,
            connection: self.name.clone(),
            bound: self.bound.clone(),
        };
        self.jobs.push(connection.handle(request).map(|outcome| Done::Control(Box::new(outcome))).boxed());
    }

    fn on_heartbeat(&mut self, id: Option<&str>, beat: frame::Heartbeat) {
        if beat.node_id.as_ref().is_some_and(|node| *node != self.node.node_id.as_str()) {
            self.send(frame::error(id, "node_id_mismatch", "node_id is not this connection's node"));
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
            active_agents: i32::try_from(beat.active_agents).unwrap_or(i32::MAX),
            handlers_live: beat.handlers_live,
            capabilities: beat.capabilities.as_deref().map(control::stored_capabilities),
        });
    }

    fn on_ack(&mut self, name: &str, up_to: i64) {
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
        if served.probe_answered(up_to) {
            self.queue(agent);
        }
        let Some((served, _)) = self.agents.get_mut(&agent) else { return };
        let Some(ack) = served.session.on_ack(up_to) else { return };
        if ack.clamped {
            metrics::counter!(metric_names::ACKS_CLAMPED).increment(1);
        }
        if let Some(took) = served.timed_until(ack.floor) {
            metrics::histogram!(metric_names::ACK_LATENCY_SECONDS).record(took.as_secs_f64());
        }
        self.cursor_moved(agent, 0, ack.floor);
    }

    fn cursor_moved(&self, agent: AgentId, sent_seq: i64, acked_seq: i64) {
        let Some(bound) = &self.bound else { return };
        self.state.engine.cursor_moved(CursorMove {
            scope: bound.fence.scope,
            agent_id: agent,
            node_id: bound.fence.node_id.clone(),
            provider: bound.fence.provider.clone(),
            sent_seq,
            acked_seq,
        });
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Positions(positions) => positions.iter().for_each(|position| self.on_position(position)),
            Event::Relist => self.relist(),
            Event::Context { agents, frame } => {
                let flows = |agent| self.agents.get(agent).is_some_and(|(served, _)| served.session.is_open());
                if agents.iter().any(flows) && !self.outbound.is_full() {
                    self.send(frame);
                }
            }
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
    fn close_if_taken(&mut self) {
        let ours = self.bound.as_ref().map(|bound| bound.fence.epoch);
        if !self.control_busy && ours.is_some() && self.taken_by > ours {
            // Some clients come straight back after 1000, so a direct node gets another code.
            self.closing = Some((if self.direct { 4001 } else { 1000 }, "superseded"));
        }
    }

    fn on_position(&mut self, position: &Position) {
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

    fn on_live(&mut self, agent: AgentId, live: LiveFrame) {
        let Some(bound) = &self.bound else { return };
        let Some((served, _)) = self.agents.get_mut(&agent) else { return };
        let fence = &bound.fence;
        let here = live.location.split_once('/').is_some_and(|(node, provider)| {
            node == fence.node_id.as_str() && (provider.is_empty() || provider == fence.provider.as_str())
        });
        if !here {
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

    fn on_done(&mut self, done: Done) {
        match done {
            Done::Control(outcome) => {
                self.control_busy = false;
                if let Some(reply) = outcome.reply {
                    self.send(reply);
                }
                self.apply(outcome.effect);
                self.close_if_taken();
                self.next_control();
            }
            Done::Serve { start, agents: Ok(agents) } => {
                for (position, tail) in agents {
                    self.adopt(position, tail, start);
                }
            }
            Done::Relisted(Ok(positions)) => self.on_relisted(positions),
            Done::Repaired(repaired) => self.on_repaired(repaired),
            Done::Serve { agents: Err(error), .. } | Done::Relisted(Err(error)) => {
                // The store is away. A provider whose agents cannot be read must register again.
                tracing::warn!(error = &error as &dyn std::error::Error, node.id = %self.node.node_id, "agents could not be read");
                self.closing = Some((1012, "storage unavailable"));
            }
        }
    }

    fn apply(&mut self, effect: Effect) {
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
    const fn start_of(&self, bound: &Bound) -> Start {
        if bound.is_broker { Start::Probe } else { Start::AckFloor }
    }

    /// Serves all agents that are located here, tails first, so that nothing falls between.
    fn serve_located(&mut self, start: StartRule) {
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

    fn name_agents(&mut self, positions: Vec<Position>, start: Start) {
        let engine = self.state.engine.clone();
        let tails =
            async move { Done::Serve { start: StartRule::Open(start), agents: tailed(&engine, positions).await } };
        self.jobs.push(tails.boxed());
    }

    /// Reads again which agents are located here.
    fn relist(&mut self) {
        let Some(bound) = &self.bound else { return };
        let (engine, fence) = (self.state.engine.clone(), bound.fence.clone());
        self.jobs.push(
            async move {
                Done::Relisted(engine.positions_of_provider(fence.scope, &fence.node_id, &fence.provider).await)
            }
            .boxed(),
        );
    }

    fn on_relisted(&mut self, positions: Vec<Position>) {
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
    fn adopt(&mut self, position: Position, tail: Tail, start: StartRule) {
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
            let probe =
                position_probe(&position.agent_name, &agent.to_string(), &format!("position_{}", uuid::Uuid::new_v4()));
            self.send(probe);
        }
        self.queue(agent);
    }

    fn drop_agent(&mut self, agent: AgentId) {
        if let Some((served, _)) = self.agents.remove(&agent) {
            self.names.remove(&served.name);
            self.state.registry.unserve(&self.handle, self.node.scope, agent);
        }
    }

    fn queue(&mut self, agent: AgentId) {
        if let Some((served, _)) = self.agents.get_mut(&agent)
            && !served.queued
        {
            served.queued = true;
            self.queued.push_back(agent);
        }
    }

    /// Sends what may leave, a turn per agent, and asks for what is missing.
    fn pump(&mut self) {
        let mut wants = Vec::new();
        let mut turns = self.queued.len();
        while turns > 0 {
            turns -= 1;
            let Some(agent) = self.queued.pop_front() else { break };
            let left = self.turn(agent);
            let now = self.now_ms();
            let Some((served, _)) = self.agents.get_mut(&agent) else { continue };
            served.queued = false;
            if !self.repair_busy
                && wants.len() < REPAIRED_AT_ONCE
                && let Some(from) = served.session.wants_repair(now)
            {
                let agent_name = served.name.clone();
                wants.push(Want { agent_id: agent, agent_name, from, settled_below: served.floor });
            } else if left || served.session.is_behind() {
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
    fn turn(&mut self, agent: AgentId) -> bool {
        let Some((served, next)) = self.agents.get_mut(&agent) else { return false };
        let mut last = 0;
        for _ in 0..TURN {
            if self.outbound.is_full() || self.pacing.as_ref().is_some_and(|pacing| !pacing.has_room()) {
                break;
            }
            let Some((seq, out)) = served.session.take() else { break };
            last = seq;
            if self.direct
                && seq > served.sent_before
                && let Some(id) = &out.delivery_id
            {
                self.outbound.text(accepted(agent, id).into());
            }
            let span = out.traceparent.as_deref().map(|traceparent| {
                let span =
                    tracing::info_span!("node.deliver", delivery.seq = seq, delivery.id = out.delivery_id.as_deref());
                relay_runtime::trace::set_parent(&span, traceparent);
                span
            });
            let entered = span.as_ref().map(tracing::Span::enter);
            self.outbound.text(out.body);
            drop(entered);
            if !out.live {
                metrics::counter!(metric_names::DELIVERIES_REPLAYED).increment(1);
            }
            served.time(seq);
            if let Some(barrier) = self.pacing.as_mut().and_then(Pacing::sent) {
                self.outbound.text(barrier.into());
            }
        }
        let left =
            served.session.has_ready() && !self.outbound.is_full() && self.pacing.as_ref().is_none_or(Pacing::has_room);
        next.store(served.session.next(), std::sync::atomic::Ordering::Relaxed);
        if last > 0 {
            metrics::counter!(metric_names::DELIVERIES_SENT).increment(1);
            self.cursor_moved(agent, last, 0);
        }
        left
    }

    fn on_repaired(&mut self, repaired: EngineResult<Vec<Repaired>>) {
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
                for (served, _) in self.agents.values_mut() {
                    served.session.on_repair_failed();
                }
            }
        }
        let behind: Vec<_> =
            self.agents.iter().filter(|(_, (served, _))| served.session.is_behind()).map(|(agent, _)| *agent).collect();
        behind.into_iter().for_each(|agent| self.queue(agent));
    }

    fn on_tick(&mut self) {
        let late: Vec<_> =
            self.agents.iter().filter(|(_, (served, _))| served.probe_is_late()).map(|(agent, _)| *agent).collect();
        for agent in late {
            if let Some((served, _)) = self.agents.get_mut(&agent) {
                served.probe_answered(0);
            }
            self.queue(agent);
        }
        let (waiting, silent): (Vec<_>, Vec<_>) =
            self.provers.drain(..).partition(|(since, _)| since.elapsed() < PROOF_WAIT);
        self.provers = waiting;
        for (_, proof) in silent {
            let _ = proof.send(Proof::Silent);
        }
        let quiet = self.last_inbound.elapsed();
        if quiet > DEAD_AFTER || self.pacing.as_ref().is_some_and(Pacing::is_silent) {
            self.closing = Some((1011, "no sign of life"));
        } else if quiet > PING_AFTER {
            self.outbound.ping();
        }
    }

    fn send(&self, text: String) {
        self.outbound.text(text.into());
    }

    /// Leaves everything in order: the close frame, the registry, the provider's row, the acks.
    async fn end(mut self, mut inbound: SplitStream<WebSocket>, writer: tokio::task::JoinHandle<()>) {
        if let Some((code, reason)) = self.closing {
            self.outbound.close(code, reason);
        }
        let agents: Vec<_> = self.agents.keys().copied().collect();
        for agent in agents {
            self.drop_agent(agent);
        }
        self.state.registry.leave(&self.handle, self.node.scope, &self.node.node_id);
        if let Some(bound) = &self.bound
            && let Err(error) = self.state.engine.disconnect_provider(&bound.fence).await
        {
            tracing::debug!(error = &error as &dyn std::error::Error, "the worker will notice the disconnect");
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

/// `delivery.accepted`, written right before the first `deliver` of a row to a direct node.
fn accepted(agent: AgentId, delivery_id: &str) -> String {
    let message = delivery_id.split('_').nth(1).and_then(|id| id.parse::<MessageId>().ok());
    let data = json!({ "delivery_id": delivery_id, "message_id": message });
    frame::context_update("agent", "delivery.accepted", &[agent.to_string()], &data)
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
