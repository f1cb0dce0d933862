//! The world around a connection: it performs effects, checks that they may happen, and answers them.

use std::{collections::BTreeMap, time::Duration};

use axum::extract::ws::Message;
use relay_domain::{
    AgentId, NodeId, ProviderName, WorkspaceId, WorkspaceScope, mailboxes::stream::Seq, nodes::NodeKind,
    nodes::NodeRole,
};
use relay_engine::{
    EngineError,
    access::callers::NodeCaller,
    mailboxes::serving::{
        Fence, Heartbeat, LiveFrame, MailboxPosition, RepairRequest, RepairedMailbox, ReplayBody, ReplayFrame,
    },
};
use serde_json::Value;
use tokio::time::Instant;

use super::{Action, CopyChoice, RECOVERY_EPOCH, live};
use crate::node::{
    connection::{
        control::{Outcome, ProviderBinding, RequestEffect},
        effects::{Conditions, Effect, Input},
        jobs::{Job, JobResult, Read, ServeTarget},
        outbound::Room,
        pacing::BARRIER_AGENT,
        state::ConnectionState,
    },
    registry::Event,
};

/// Unconfirmed frames that a published broker survives (ADR 0002).
const PACING_WINDOW: usize = 128;
/// Rows that one repair returns.
const REPAIR_PAGE: Seq = 40;
/// Longer than any test takes.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(86_400);
const OTHER_NODE: &str = "elsewhere";

/// Kinds of peers, which differ in how their streams start and what limits them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    /// A broker that receives cursors in replies.
    Broker,
    /// A broker that is asked for its positions.
    BrokerWithoutCursors,
    Provider,
    Direct,
    /// A direct client that lists a delivery after acking it.
    Rereading,
}

impl Peer {
    pub(super) const ALL: [Self; 5] =
        [Self::Broker, Self::BrokerWithoutCursors, Self::Provider, Self::Direct, Self::Rereading];

    const fn is_direct(self) -> bool {
        matches!(self, Self::Direct | Self::Rereading)
    }

    const fn is_broker(self) -> bool {
        matches!(self, Self::Broker | Self::BrokerWithoutCursors)
    }
}

/// Mailbox of one agent, and what the connection did with it.
#[derive(Debug, Default)]
pub(super) struct Mailbox {
    is_elsewhere: bool,
    pub(super) head: Seq,
    pub(super) ack_floor: Seq,
    pub(super) sent: Seq,
    /// Live copies that have not arrived.
    copies: Vec<Seq>,
    pub(super) is_routed: bool,
    routed_at: Option<Instant>,
    /// Last frame since the agent was routed here.
    last_frame: Option<Seq>,
    /// A live copy named another location, and the located agents have not been read since.
    is_suspended: bool,
}

/// The world around a connection.
pub(super) struct World {
    peer: Peer,
    pub(super) state: ConnectionState,
    now: Instant,
    is_trusted: bool,
    room: usize,
    pub(super) mailboxes: BTreeMap<AgentId, Mailbox>,
    pub(super) jobs: Vec<(Instant, Job)>,
    /// Recorded heartbeats.
    pub(super) beats: Vec<Heartbeat>,
    /// Agent names of outstanding barriers and probes, oldest first.
    questions: Vec<String>,
    /// Frames that no barrier has confirmed, and those before each outstanding barrier.
    unconfirmed: usize,
    since_barrier: usize,
    barriers: Vec<usize>,
}

fn fence() -> Fence {
    let scope = WorkspaceScope::from_engine_row(WorkspaceId::new(1));
    Fence { scope, node_id: NodeId::new("here"), provider: ProviderName::new("default"), epoch: 7 }
}

fn name_of(agent: AgentId) -> String {
    format!("agent-{agent}")
}

impl World {
    pub(super) fn new(peer: Peer, agents: &[(Seq, Seq)]) -> Self {
        let (role, kind) = (if peer.is_direct() { NodeRole::Direct } else { NodeRole::Broker }, NodeKind::Ws);
        let node = NodeCaller { scope: fence().scope, node_id: fence().node_id, role, kind };
        let agents = &agents[..if peer.is_direct() { 1 } else { agents.len() }];
        let mailboxes = agents.iter().zip(1..).map(|((acked, more), id)| {
            let (ack_floor, head) = (*acked, acked + more);
            (AgentId::new(id), Mailbox { head, ack_floor, sent: ack_floor, ..Mailbox::default() })
        });
        let now = Instant::now();
        let mut world = Self {
            peer,
            state: ConnectionState::new(node, Some(RECOVERY_EPOCH), now, now + REGISTRATION_TIMEOUT),
            now,
            is_trusted: true,
            room: 30,
            mailboxes: mailboxes.collect(),
            jobs: Vec::new(),
            beats: Vec::new(),
            questions: Vec::new(),
            unconfirmed: 0,
            since_barrier: 0,
            barriers: Vec::new(),
        };
        world.receive(
            r#"{"v":1,"type":"node.register","node_id":"here","name":"here","capabilities":[],"max_agents":9,"tags":[],"version":"1"}"#,
        );
        world
    }

    fn agent(&self, index: usize) -> AgentId {
        *self.mailboxes.keys().nth(index % self.mailboxes.len()).unwrap()
    }

    fn mailbox(&mut self, agent: AgentId) -> &mut Mailbox {
        self.mailboxes.get_mut(&agent).unwrap()
    }

    pub(super) fn receive(&mut self, frame: &str) {
        self.step(Input::Message(Message::Text(frame.into()), None));
    }

    fn ack(&mut self, name: &str, up_to: Seq) {
        self.receive(&format!(r#"{{"v":1,"type":"delivery.ack","agent":"{name}","up_to_seq":{up_to}}}"#));
    }

    fn conditions(&self) -> Conditions {
        Conditions {
            now: self.now,
            unix_ms: 0,
            is_trusted: self.is_trusted,
            was_restored: false,
            room: Room { bytes: 1 << 20, frames: self.room },
            is_crowded: false,
        }
    }

    pub(super) fn step(&mut self, input: Input) {
        let was_closing = self.state.closing().is_some();
        self.state.step(input, self.conditions());
        let mut written = 0;
        while let Some(effect) = self.state.next_effect() {
            written += usize::from(matches!(effect, Effect::Deliver { .. }));
            assert!(!was_closing || !matches!(effect, Effect::Deliver { .. }), "a frame after the end");
            self.perform(effect);
        }
        assert!(written <= self.room, "{written} frames into room for {}", self.room);
    }

    /// Performs an effect, and checks that it may happen.
    pub(super) fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Send(text) => self.on_text(&text),
            Effect::ProbePosition { agent, name } => {
                assert_eq!((self.peer.is_broker(), &name), (true, &name_of(agent)));
                self.questions.push(name);
                self.count_frame();
            }
            Effect::Deliver { agent, seq, frame } => {
                assert!(self.is_trusted, "a frame without a lease");
                assert!(!frame.is_outdated(self.now, 0), "its delivery may be settled by now");
                assert_eq!(frame.body.encode().as_str(), format!("{agent}/{seq}"));
                let mailbox = self.mailbox(agent);
                assert!(mailbox.is_routed && !mailbox.is_suspended, "a frame for an agent that may have moved");
                assert!(seq <= mailbox.head);
                match mailbox.last_frame {
                    Some(last) => assert_eq!(seq, last + 1, "frames leave in order and once"),
                    None => assert!(seq <= mailbox.ack_floor + 1, "{seq} leaves a gap after {}", mailbox.ack_floor),
                }
                mailbox.last_frame = Some(seq);
                self.count_frame();
            }
            Effect::Start(job) => {
                let is_same = |(_, other): &(Instant, Job)| match (&job, other) {
                    (Job::Read(Read::Relist(_)), Job::Read(Read::Relist(_)))
                    | (Job::Read(Read::Repair(_)), Job::Read(Read::Repair(_)))
                    | (Job::Request(_), Job::Request(_)) => true,
                    (Job::Read(Read::StoredAck { agent, .. }), Job::Read(Read::StoredAck { agent: other, .. })) => {
                        agent == other
                    }
                    _ => false,
                };
                assert!(!self.jobs.iter().any(is_same), "one of a kind at a time");
                self.jobs.push((self.now, job));
            }
            Effect::Route(agent) => {
                let now = self.now;
                let mailbox = self.mailbox(agent);
                assert!(!std::mem::replace(&mut mailbox.is_routed, true), "routed twice");
                mailbox.routed_at = Some(now);
                (mailbox.last_frame, mailbox.is_suspended) = (None, false);
            }
            Effect::Unroute(agent) => {
                assert!(std::mem::replace(&mut self.mailbox(agent).is_routed, false), "not routed");
            }
            Effect::Sent { agent, up_to, .. } => {
                let mailbox = self.mailbox(agent);
                assert_eq!(Some(up_to), mailbox.last_frame);
                mailbox.sent = mailbox.sent.max(up_to);
            }
            Effect::StoreAck { agent, floor } => {
                let mailbox = self.mailbox(agent);
                assert!(floor <= mailbox.sent, "an ack above the sent position");
                mailbox.ack_floor = mailbox.ack_floor.max(floor);
            }
            Effect::StoreAckAt { agent, floor, .. } => assert!(floor <= self.mailbox(agent).sent),
            Effect::Acked { agent, floor, .. } => assert!(floor <= self.mailbox(agent).sent),
            Effect::Heartbeat(beat) => self.beats.push(*beat),
            Effect::NextSeq { agent, next } => {
                assert!(self.mailbox(agent).last_frame.is_none_or(|last| next == last + 1));
            }
            Effect::Ping
            | Effect::Register
            | Effect::ReclaimRoute { .. }
            | Effect::InvocationSent(_)
            | Effect::OutcomeSent(_)
            | Effect::OutcomeMissed(_)
            | Effect::MailboxChanged(_)
            | Effect::CompareMailbox(_)
            | Effect::AnswerProbe(..)
            | Effect::Count(_) => {}
        }
    }

    fn on_text(&mut self, text: &str) {
        let frame: Value = serde_json::from_str(text).unwrap();
        assert_ne!(frame["type"], "error", "{text}");
        if frame["agent"] == BARRIER_AGENT {
            self.questions.push(BARRIER_AGENT.to_owned());
            self.barriers.push(std::mem::take(&mut self.since_barrier));
        }
    }

    fn count_frame(&mut self) {
        self.unconfirmed += usize::from(self.peer.is_broker());
        self.since_barrier += 1;
        assert!(self.unconfirmed <= PACING_WINDOW, "a broker would lock up");
    }

    pub(super) fn position(&self, agent: AgentId) -> MailboxPosition {
        let mailbox = &self.mailboxes[&agent];
        let fence = fence();
        MailboxPosition {
            scope: fence.scope,
            agent_id: agent,
            agent_name: name_of(agent),
            node_id: if mailbox.is_elsewhere { NodeId::new(OTHER_NODE) } else { fence.node_id },
            provider: Some(fence.provider),
            next_seq: mailbox.head + 1,
            sent_seq: mailbox.sent,
            ack_floor: mailbox.ack_floor,
            settled_floor: mailbox.ack_floor,
        }
    }

    pub(super) fn located(&self) -> Vec<AgentId> {
        self.mailboxes.iter().filter(|(_, mailbox)| !mailbox.is_elsewhere).map(|(agent, _)| *agent).collect()
    }

    fn repair(&self, request: &RepairRequest) -> RepairedMailbox {
        let agent = request.agent_id;
        let last = self.mailboxes[&agent].head.min(request.from + REPAIR_PAGE - 1);
        let row = |seq| ReplayFrame { seq, body: ReplayBody::Tombstone(format!("{agent}/{seq}").into()) };
        RepairedMailbox { agent_id: agent, frames: (request.from..=last).map(row).collect() }
    }

    fn finish_job(&mut self, index: usize) {
        if self.jobs.is_empty() {
            return;
        }
        let (asked, job) = self.jobs.remove(index % self.jobs.len());
        let done = match job {
            Job::Request(_) if self.state.binding().is_none() => {
                let binding = ProviderBinding {
                    fence: fence(),
                    cursor_granted: self.peer == Peer::Broker,
                    posts_granted: false,
                    is_broker: self.peer.is_broker(),
                    rereads_after_ack: self.peer == Peer::Rereading,
                    capabilities: 0,
                    declared_name: String::new(),
                };
                let effect = RequestEffect::Registered(binding);
                JobResult::Request(Box::new(Outcome { reply: Some(r#"{"type":"reply"}"#.into()), effect }))
            }
            Job::Request(_) => {
                let effect = RequestEffect::Listed(self.located());
                JobResult::Request(Box::new(Outcome { reply: None, effect }))
            }
            Job::Result(_) => JobResult::Result(None),
            Job::Read(Read::Serve { target, start }) => {
                let agents = match target {
                    ServeTarget::Agents(agents) => agents,
                    ServeTarget::Provider { .. } => self.located(),
                };
                JobResult::Serve { start, agents: agents.into_iter().map(|agent| self.position(agent)).collect() }
            }
            Job::Read(Read::Relist(_)) => {
                let located = self.located();
                located.iter().for_each(|agent| self.mailbox(*agent).is_suspended = false);
                let positions = located.into_iter().map(|agent| self.position(agent)).collect();
                self.step(Input::Job(JobResult::Relisted { asked, positions }));
                let known_before = |mailbox: &&Mailbox| mailbox.routed_at.is_some_and(|at| at < asked);
                let mut known = self.mailboxes.values().filter(known_before);
                assert!(known.all(|mailbox| !mailbox.is_routed || !mailbox.is_elsewhere), "an agent that has left");
                return;
            }
            Job::Read(Read::Repair(requests)) => {
                JobResult::Repaired(Ok(requests.iter().map(|request| self.repair(request)).collect()))
            }
            Job::Read(Read::VerifyPosition { agent, reported, .. }) => {
                JobResult::PositionVerified { agent, reported, position: Some(self.position(agent)) }
            }
            Job::Read(Read::StoredAck { agent, floor }) => JobResult::AckStored { agent, floor },
        };
        self.step(Input::Job(done));
    }

    fn fail_repair(&mut self) {
        let is_repair = |(_, job): &(Instant, Job)| matches!(job, Job::Read(Read::Repair(_)));
        if let Some(index) = self.jobs.iter().position(is_repair) {
            self.jobs.remove(index);
            let error = EngineError::invalid_request("storage failed");
            self.step(Input::Job(JobResult::Repaired(Err(error))));
        }
    }

    /// Answers the oldest barrier or probe as a broker does: with its position.
    fn answer(&mut self, is_restarted: bool) {
        if self.questions.is_empty() {
            return;
        }
        let name = self.questions.remove(0);
        if name == BARRIER_AGENT {
            self.unconfirmed -= self.barriers.remove(0);
            return self.ack(&name, 0);
        }
        let known = self.mailboxes.iter().find(|(agent, _)| name_of(**agent) == name);
        let received = known.filter(|_| !is_restarted).map_or(0, |(_, mailbox)| mailbox.sent);
        self.ack(&name, received);
    }

    pub(super) fn act(&mut self, action: Action) {
        match action {
            Action::Post(index) => {
                let mailbox = self.mailbox(self.agent(index));
                mailbox.head += 1;
                mailbox.copies.push(mailbox.head);
            }
            Action::Live(choices) => self.receive_copies(&choices),
            Action::LoseLive(index) => {
                self.mailbox(self.agent(index)).copies.pop();
            }
            Action::LostLive(index) => {
                let agent = self.agent(index);
                let mailbox = self.mailbox(agent);
                if mailbox.is_routed {
                    let next = live(agent, mailbox.head + 1, OTHER_NODE);
                    let lost = LiveFrame { body: Some("lost".into()), epoch: Some(RECOVERY_EPOCH - 1), ..next };
                    self.step(Input::Live(vec![(agent, lost)]));
                }
            }
            Action::MovedLive(index) => {
                let agent = self.agent(index);
                let mailbox = self.mailbox(agent);
                if mailbox.is_routed {
                    mailbox.head += 1;
                    // Only an open stream sends, so only that one is stopped.
                    mailbox.is_suspended = mailbox.last_frame.is_some();
                    let seq = mailbox.head;
                    self.step(Input::Live(vec![(agent, live(agent, seq, OTHER_NODE))]));
                }
            }
            Action::Move(index) => {
                let mailbox = self.mailbox(self.agent(index));
                mailbox.is_elsewhere = !mailbox.is_elsewhere;
            }
            Action::Ack(index, more) => {
                let agent = self.agent(index);
                let up_to = self.mailboxes[&agent].ack_floor + more;
                self.ack(&name_of(agent), up_to);
            }
            Action::Answer { is_restarted } => self.answer(is_restarted),
            Action::Inventory if self.peer == Peer::Broker => {
                self.receive(r#"{"v":1,"type":"inventory.sync","agents":[]}"#);
            }
            Action::FinishJob(index) => self.finish_job(index),
            Action::FailRepair => self.fail_repair(),
            Action::Relist => self.step(Input::Event(Event::Relist)),
            Action::Positions => self.report_positions(),
            Action::Advance(ms) => {
                self.now += Duration::from_millis(ms);
                self.step(Input::Wake);
            }
            Action::Room(frames) => self.room = frames,
            Action::Trust(is_trusted) => self.is_trusted = is_trusted,
            // Of an older connection: it must not end this one.
            Action::TakenOver => self.step(Input::Event(Event::ProviderTaken { epoch: fence().epoch - 1 })),
            Action::Inventory => {}
        }
    }

    fn receive_copies(&mut self, choices: &[CopyChoice]) {
        let mut received = Vec::new();
        for choice in choices {
            let agent = self.agent(choice.agent);
            let copies = &mut self.mailbox(agent).copies;
            let Some(index) = choice.copy.checked_rem(copies.len()) else { continue };
            let seq = if choice.again { copies[index] } else { copies.remove(index) };
            received.push((agent, live(agent, seq, "here")));
        }
        self.step(Input::Live(received));
    }

    fn report_positions(&mut self) {
        let routed = self.mailboxes.iter().filter(|(_, mailbox)| mailbox.is_routed).map(|(agent, _)| *agent);
        let positions = routed.map(|agent| self.position(agent)).collect();
        self.step(Input::Event(Event::Positions(positions)));
    }

    /// Sends until the broker has to confirm frames, which it does not.
    pub(super) fn exhaust_window(&mut self) {
        self.room = 500;
        for _ in 0..40 {
            self.now += Duration::from_millis(100);
            while !self.jobs.is_empty() {
                self.finish_job(0);
            }
            while self.questions.first().is_some_and(|name| name != BARRIER_AGENT) {
                self.answer(false);
            }
            self.step(Input::Wake);
        }
        assert_eq!(self.unconfirmed, PACING_WINDOW);
    }

    pub(super) fn time_to_wake(&self) -> Duration {
        self.state.next_wake().saturating_duration_since(self.now)
    }

    /// Lets everything succeed until nothing is left to do.
    pub(super) fn settle(&mut self) {
        (self.is_trusted, self.room) = (true, 500);
        self.mailboxes.values_mut().for_each(|mailbox| mailbox.is_elsewhere = false);
        for round in 0..200 {
            self.now += Duration::from_millis(500);
            while !self.jobs.is_empty() {
                self.finish_job(0);
            }
            // Every agent is known after these; from then on the deliveries go on by themselves.
            if round < 3 {
                self.act(Action::Relist);
                self.act(Action::Inventory);
                self.report_positions();
            }
            while !self.questions.is_empty() {
                self.answer(false);
            }
            for agent in self.located() {
                let sent = self.mailboxes[&agent].sent;
                self.ack(&name_of(agent), sent);
            }
            self.step(Input::Wake);
            if self.mailboxes.values().all(|mailbox| mailbox.ack_floor == mailbox.head) {
                return;
            }
        }
    }
}
