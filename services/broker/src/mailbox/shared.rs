//! [`SharedMailbox`]: one agent's mailbox between the engine link, which fills it, and the agent's task.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, PoisonError},
};

use relay_wire::nodes::engine_frame::Deliver;
use tokio::sync::Notify;
use tracing::{Span, field};

use super::{Mailbox, MailboxLength, Message, Verdict};
use crate::{clock, insight::count_dropped, metric_names};

/// Maximum number of read receipts that wait for the agent's task. Beyond it the oldest is evicted: a receipt only
/// confirms.
const MAX_READ: usize = 64;

/// Mailbox of one agent. The lock is held for one step of the state machine and never over an await.
#[derive(Debug, Default)]
pub(crate) struct SharedMailbox {
    content: Mutex<Content>,
    /// Notified when messages have arrived.
    pub(crate) arrived: Notify,
}

#[derive(Debug, Default)]
struct Content {
    mailbox: Mailbox,
    /// Messages that the agent's task has not fetched; bounded by the mailbox.
    arrived: VecDeque<Message>,
    /// Messages that the agent has read, as far as the task has not fetched them.
    read: VecDeque<String>,
    /// Spans from the frame to the ack, of messages above the acked position.
    spans: BTreeMap<u64, Span>,
}

/// Answer to a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FrameAnswer {
    /// This position is acknowledged.
    Ack(u64),
    /// This position is acknowledged; the frame is lost.
    Dropped(u64),
    /// Nothing now.
    Nothing,
}

impl SharedMailbox {
    pub(crate) fn new(mailbox: Mailbox) -> Self {
        Self { content: Mutex::new(Content { mailbox, ..Content::default() }), arrived: Notify::new() }
    }

    /// Continues in this order. No frame comes before it.
    pub(crate) fn begin(&self, mailbox: Mailbox) {
        self.with_content(|content| content.mailbox = mailbox);
    }

    /// Takes a frame of the engine.
    pub(crate) fn on_frame(&self, frame: Deliver, now_ms: i64) -> FrameAnswer {
        let (seq, agent) = (frame.seq, frame.agent.clone());
        // In one step, since the agent's task may settle messages at any moment.
        let (verdict, acked) = self.with_content(|content| {
            let verdict = content.mailbox.on_frame(frame, now_ms);
            if let Verdict::Taken { messages, .. } = &verdict {
                let spans = messages.iter().filter_map(|message| Some((message.seq?, delivery_span(&agent, message))));
                content.spans.extend(spans);
                content.arrived.extend(messages.iter().cloned());
            }
            (verdict, content.mailbox.acked())
        });
        let result = match &verdict {
            Verdict::Taken { .. } => "taken",
            Verdict::Repeated { .. } => "repeated",
            Verdict::Dropped { .. } => "dropped",
            Verdict::Early => "early",
            Verdict::Full => "full",
            Verdict::OtherAgent => "other_agent",
        };
        metrics::counter!(metric_names::FRAMES, "result" => result).increment(1);
        match verdict {
            Verdict::Taken { messages, acked: settled } => {
                // A permit is kept, so an agent's task that is busy does not miss it. Behind the lock, which the task
                // needs at once.
                if !messages.is_empty() {
                    self.arrived.notify_one();
                }
                if settled.is_some() { FrameAnswer::Ack(acked) } else { FrameAnswer::Nothing }
            }
            Verdict::Repeated { acked } => FrameAnswer::Ack(acked),
            Verdict::Dropped { acked } => FrameAnswer::Dropped(acked),
            Verdict::Early | Verdict::Full => FrameAnswer::Nothing,
            Verdict::OtherAgent => {
                tracing::warn!(seq, "a frame names another agent than the one hosted here, it is refused");
                FrameAnswer::Nothing
            }
        }
    }

    /// Takes the messages that have arrived, in order.
    pub(crate) fn fetch(&self) -> VecDeque<Message> {
        self.with_content(|content| std::mem::take(&mut content.arrived))
    }

    /// The engine says that the agent has read a message.
    pub(crate) fn on_read(&self, event_id: &str) {
        self.with_content(|content| {
            if content.read.len() == MAX_READ {
                content.read.pop_front();
                count_dropped("reads");
            }
            content.read.push_back(event_id.to_owned());
        });
        self.arrived.notify_one();
    }

    /// Takes the ids of messages that the agent has read.
    pub(crate) fn fetch_read(&self) -> VecDeque<String> {
        self.with_content(|content| std::mem::take(&mut content.read))
    }

    /// A message was typed. Returns `true` if refused frames can now be fetched again.
    pub(crate) fn on_typed(&self, message: &Message) -> bool {
        self.with_content(|content| {
            if let Some(span) = message.seq.and_then(|seq| content.spans.get(&seq)) {
                // A moment: the message is handed to the terminal.
                drop(tracing::info_span!(parent: span, "node.injection"));
            }
            content.mailbox.on_typed(message)
        })
    }

    /// A typed message waits again: its program has ended.
    pub(crate) fn on_requeued(&self, message: &Message) {
        self.with_content(|content| content.mailbox.on_requeued(message));
    }

    /// Notes in its trace how far a message is known to have got.
    pub(crate) fn note(&self, seq: u64, level: &str, method: &str) {
        self.with_content(|content| {
            if let Some(span) = content.spans.get(&seq) {
                span.record("delivery.level", level);
                span.record("delivery.method", method);
            }
        });
    }

    /// Settles a message. Returns the position to acknowledge, if it rises.
    pub(crate) fn settle(&self, seq: u64) -> Option<u64> {
        let (position, waits) = self.with_content(|content| {
            let position = content.mailbox.settle(seq);
            if let Some(acked) = position {
                content.spans = content.spans.split_off(&(acked + 1));
            }
            (position, content.mailbox.take_ack_waits(clock::unix_ms()))
        });
        for wait in waits {
            metrics::histogram!(metric_names::ACK_WAIT_SECONDS).record(wait.as_secs_f64());
        }
        position
    }

    /// Its entries now.
    pub(crate) fn length(&self) -> MailboxLength {
        self.with_content(|content| content.mailbox.length())
    }

    /// The acked position.
    pub(crate) fn acked(&self) -> u64 {
        self.with_content(|content| content.mailbox.acked())
    }

    /// A new connection begins.
    pub(crate) fn on_reconnected(&self) {
        self.with_content(|content| content.mailbox.on_reconnected());
    }

    /// Returns `true` while a predecessor of a frame is missing.
    pub(crate) fn has_gap(&self) -> bool {
        self.with_content(|content| content.mailbox.has_gap())
    }

    fn with_content<T>(&self, step: impl FnOnce(&mut Content) -> T) -> T {
        step(&mut self.content.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The trace of a message on this node: from its frame to the ack that covers it.
fn delivery_span(agent: &str, message: &Message) -> Span {
    tracing::info_span!(
        "node.delivery",
        agent.name = agent,
        message.id = message.event_id,
        delivery.id = message.delivery_id,
        delivery.level = field::Empty,
        delivery.method = field::Empty,
    )
}
