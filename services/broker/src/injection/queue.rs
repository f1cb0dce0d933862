//! [`MessageQueue`]: the messages of one agent that wait to be typed.

use std::collections::VecDeque;

use relay_verification::Timestamp;
use serde::{Deserialize, Serialize};

use crate::mailbox::{Message, Origin};

/// Treatment of messages of the engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DeliveryMode {
    /// Typed in their turn.
    #[default]
    AutoInject,
    /// Held until a driver asks for them.
    ManualFlush,
}

impl DeliveryMode {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::AutoInject => "auto_inject",
            Self::ManualFlush => "manual_flush",
        }
    }
}

/// Messages that wait, those of the broker itself first.
#[derive(Debug, Default)]
pub(super) struct MessageQueue {
    mode: DeliveryMode,
    /// Messages of the broker itself, which wait for readiness only.
    own: VecDeque<WaitingMessage>,
    waiting: VecDeque<WaitingMessage>,
    /// Number of `waiting` messages that may be typed in manual mode.
    released: usize,
    /// Nothing more is typed: the agent has asked for its end.
    is_closed: bool,
}

#[derive(Debug)]
pub(super) struct WaitingMessage {
    pub(super) message: Message,
    /// First instant at which it could have been typed but for the agent's output or a person's keys.
    ready_at: Option<Timestamp>,
    /// Its text as echoes are searched; made when it is to be typed.
    pub(super) squashed: Option<String>,
}

impl MessageQueue {
    /// Queues a message behind the others of its kind.
    pub(super) fn enqueue(&mut self, message: Message) {
        let waiting = WaitingMessage { message, ready_at: None, squashed: None };
        match waiting.message.origin {
            Origin::Task | Origin::Continuity => self.own.push_back(waiting),
            Origin::Engine | Origin::ActionResult | Origin::Redelivered => self.waiting.push_back(waiting),
        }
    }

    /// Returns whether notes of an earlier session wait.
    pub(super) fn has_notes(&self) -> bool {
        self.own.iter().any(|waiting| waiting.message.origin == Origin::Continuity)
    }

    /// Messages of the engine, oldest first.
    pub(super) fn pending(&self) -> impl ExactSizeIterator<Item = &Message> {
        self.waiting.iter().map(|waiting| &waiting.message)
    }

    pub(super) fn mode(&self) -> DeliveryMode {
        self.mode
    }

    /// Sets the mode and returns the former one and the number of messages that this lets through.
    pub(super) fn set_mode(&mut self, mode: DeliveryMode) -> (DeliveryMode, usize) {
        let before = std::mem::replace(&mut self.mode, mode);
        let drained = match (before, mode) {
            (DeliveryMode::ManualFlush, DeliveryMode::AutoInject) => self.waiting.len() - self.released,
            _ => 0,
        };
        // Also from manual to manual: everything that waits is held again.
        self.released = 0;
        (before, drained)
    }

    /// Lets the messages through that wait now, and returns their number.
    pub(super) fn flush(&mut self) -> usize {
        match self.mode {
            DeliveryMode::AutoInject => 0,
            DeliveryMode::ManualFlush => {
                let drained = self.waiting.len() - self.released;
                self.released = self.waiting.len();
                drained
            }
        }
    }

    /// Returns whether the next message was let through by a flush.
    pub(super) fn is_flushing(&self) -> bool {
        self.released > 0 && self.own.is_empty()
    }

    /// Nothing more is to be typed; the messages stay.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// The message that is typed next.
    pub(super) fn head(&self) -> Option<&Message> {
        if self.is_closed {
            return None;
        }
        let may_type = self.mode == DeliveryMode::AutoInject || self.released > 0;
        let head = self.own.front().or_else(|| self.waiting.front().filter(|_| may_type));
        head.map(|waiting| &waiting.message)
    }

    /// The message that is typed next, if any may be.
    pub(super) fn head_mut(&mut self) -> Option<&mut WaitingMessage> {
        if self.own.is_empty() { self.waiting.front_mut() } else { self.own.front_mut() }
    }

    /// First instant at which the head could have been typed but for the agent's output or a person's keys.
    pub(super) fn head_ready_at(&mut self, now: Timestamp) -> Timestamp {
        self.head_mut().map_or(now, |head| *head.ready_at.get_or_insert(now))
    }

    /// Takes the head out.
    pub(super) fn take_head(&mut self) -> Option<Message> {
        let taken = self.own.pop_front().or_else(|| {
            // Own messages do not count, and in `auto_inject` it is 0.
            self.released = self.released.saturating_sub(1);
            self.waiting.pop_front()
        });
        taken.map(|waiting| waiting.message)
    }

    /// All messages, in the order in which they would be typed.
    pub(super) fn into_messages(self) -> Vec<Message> {
        self.own.into_iter().chain(self.waiting).map(|waiting| waiting.message).collect()
    }
}
