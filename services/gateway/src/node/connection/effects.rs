//! Inputs and effects of a connection.

use std::time::Duration;

use axum::extract::ws::{Message, Utf8Bytes};
use relay_domain::{AgentId, InvocationId, mailboxes::stream::Seq, nodes::takeover::ProbeOutcome};
use relay_engine::{
    actions::SentInvocation,
    mailboxes::serving::{Heartbeat, LiveFrame},
};
use tokio::{sync::oneshot, time::Instant};

use super::{
    jobs::{Job, JobResult},
    outbound::{OutgoingFrame, Room},
};

use crate::{connections::FrameMemory, node::registry::Event};

/// Close code and reason.
pub(super) type Close = (u16, &'static str);

pub(super) enum Input {
    /// From the node.
    /// With the memory that it takes until it was handled, if it is large.
    Message(Message, Option<FrameMemory>),
    /// From elsewhere in this gateway.
    Event(Event),
    Job(JobResult),
    /// Live copies. Of those for agents that this connection does not serve, only the seqs are kept for a while.
    Live(Vec<(AgentId, LiveFrame)>),
    /// Time has passed, or the outbound queue has drained.
    Wake,
}

/// Facts that a step may read beyond its input.
#[derive(Debug, Clone, Copy)]
pub(super) struct Conditions {
    pub(super) now: Instant,
    /// The same time in milliseconds of Unix time.
    pub(super) unix_ms: i64,
    /// This gateway certainly holds its lease, so deliveries may leave.
    pub(super) is_trusted: bool,
    /// The database was restored recently: brokers may have received more than it knows.
    pub(super) was_restored: bool,
    /// Room for deliveries in the outbound queue.
    pub(super) room: Room,
    /// So many replies are unwritten that the socket is not read.
    pub(super) is_crowded: bool,
}

impl Conditions {
    /// Returns conditions under which nothing leaves.
    pub(super) fn before_first_step(now: Instant) -> Self {
        Self { now, unix_ms: 0, is_trusted: false, was_restored: false, room: Room::default(), is_crowded: false }
    }
}

/// Effect of a step, performed by the task. Frames leave in the order of their effects.
pub(super) enum Effect {
    Send(Utf8Bytes),
    Ping,
    /// Ask the broker for its position of an agent.
    ProbePosition {
        agent: AgentId,
        name: String,
    },
    Deliver {
        agent: AgentId,
        seq: Seq,
        frame: OutgoingFrame,
    },
    Start(Job),
    /// Enter the provider of [`super::state::ConnectionState::binding`] into the registry.
    Register,
    /// Route an agent to this connection, and with it its live copies.
    Route(AgentId),
    /// Route an agent here again if another connection has taken its route.
    ReclaimRoute {
        agent: AgentId,
        /// False if any provider of the node may serve the agent.
        is_assigned: bool,
    },
    Unroute(AgentId),
    /// The seq that leaves next has changed.
    NextSeq {
        agent: AgentId,
        next: Seq,
    },
    /// `count` frames up to a seq have left.
    Sent {
        agent: AgentId,
        up_to: Seq,
        count: u64,
    },
    /// The node has acknowledged everything up to a floor; `latency` of one of the frames.
    Acked {
        agent: AgentId,
        floor: Seq,
        latency: Option<Duration>,
    },
    StoreAck {
        agent: AgentId,
        floor: Seq,
    },
    /// Store an ack later, whatever becomes of the connection.
    StoreAckAt {
        at: Instant,
        agent: AgentId,
        floor: Seq,
    },
    Heartbeat(Box<Heartbeat>),
    InvocationSent(Box<SentInvocation>),
    OutcomeSent(InvocationId),
    /// An outcome did not reach its caller's socket.
    OutcomeMissed(AgentId),
    /// Let all gateways compare a mailbox with what they have sent.
    MailboxChanged(AgentId),
    /// Compare a mailbox with what this gateway has sent.
    CompareMailbox(AgentId),
    AnswerProbe(oneshot::Sender<ProbeOutcome>, ProbeOutcome),
    /// Count one in this metric.
    Count(&'static str),
}
