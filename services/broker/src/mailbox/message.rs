//! [`Message`]: a text for one agent, whichever way it came.

use serde::{Deserialize, Serialize};

/// Text that is to be typed into an agent's terminal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) delivery_id: String,
    /// The engine's message id, or an id of the broker with a prefix.
    pub(crate) event_id: String,
    /// Place in the mailbox; `None` outside of it.
    pub(crate) seq: Option<u64>,
    pub(crate) author: Author,
    /// `#channel`, or the agent's name.
    pub(crate) target: String,
    pub(crate) body: String,
    pub(crate) thread_id: Option<String>,
    /// 1 (low) to 4 (urgent).
    pub(crate) priority: u8,
    pub(crate) urgency: Urgency,
    pub(crate) origin: Origin,
    /// Unix time in milliseconds.
    pub(crate) queued_at_ms: i64,
}

#[cfg(test)]
impl Message {
    /// Returns a message of the engine to `ada`.
    pub(crate) fn example(body: &str) -> Self {
        Self {
            delivery_id: "del_1".into(),
            event_id: "evt_1".into(),
            seq: None,
            author: Author::default(),
            target: "ada".into(),
            body: body.into(),
            thread_id: None,
            priority: 2,
            urgency: Urgency::Wait,
            origin: Origin::Engine,
            queued_at_ms: 0,
        }
    }
}

/// Sender of a message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Author {
    pub(crate) name: String,
    pub(crate) agent_id: Option<String>,
}

/// Moment at which a message is typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Urgency {
    /// In its turn.
    Wait,
    /// With two escapes in front, whatever the agent does.
    Steer,
}

impl Urgency {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Wait => "wait",
            Self::Steer => "steer",
        }
    }
}

/// Source of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A message of the engine.
    Engine,
    /// The outcome of an action, which has no read receipt.
    ActionResult,
    /// The first task of the agent. It does not wait in manual mode.
    Task,
    /// Notes of an earlier session. Like a task they do not wait in manual mode.
    Continuity,
    /// A message that failed, typed again on a driver's wish. It has left the mailbox.
    Redelivered,
}

impl Message {
    /// Bytes that count towards the bound of a queue.
    pub(crate) fn len(&self) -> usize {
        self.body.len() + self.delivery_id.len() + self.event_id.len() + self.target.len() + self.author.name.len()
    }

    /// Facts about it, without its text.
    pub(crate) fn without_body(&self) -> Self {
        Self {
            delivery_id: self.delivery_id.clone(),
            event_id: self.event_id.clone(),
            seq: self.seq,
            author: self.author.clone(),
            target: self.target.clone(),
            body: String::new(),
            thread_id: self.thread_id.clone(),
            priority: self.priority,
            urgency: self.urgency,
            origin: self.origin,
            queued_at_ms: self.queued_at_ms,
        }
    }

    /// Returns whether it takes room in the mailbox until it is typed.
    pub(crate) fn is_in_mailbox(&self) -> bool {
        match self.origin {
            Origin::Engine | Origin::ActionResult => true,
            Origin::Task | Origin::Continuity | Origin::Redelivered => false,
        }
    }

    /// Returns whether the engine keeps a read receipt for it.
    pub(crate) fn has_receipt(&self) -> bool {
        match self.origin {
            Origin::Engine | Origin::Redelivered => true,
            Origin::ActionResult | Origin::Task | Origin::Continuity => false,
        }
    }
}
