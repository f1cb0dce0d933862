//! [`Effect`]: the work that the pipeline leaves to the agent's task.

use std::time::Duration;

use relay_verification::{Level, delivery::FailureReason, strategy::DeliveryRecord};

use crate::{api::types::Event, mailbox::Message};

/// Consequence of a message, of output, or of time.
#[derive(Debug)]
pub(crate) enum Effect {
    /// Hand a text to the terminal.
    Type(TypeRequest),
    /// Ask the terminal to give back the injection with this key.
    Withdraw(u64),
    /// A message has left the queue: there is room for another.
    Dequeued(Box<Message>),
    /// Tell the subscribers.
    Publish(Box<Event>),
    /// A message may be acknowledged.
    Settle(Box<Settlement>),
    /// All signals of a delivery are in: what they say about the program is kept.
    Record(DeliveryRecord),
    /// A message without a signal is not typed again, for this reason.
    Suppressed(&'static str),
    /// Report a failure to the engine, then settle.
    Fail(Box<Failure>),
    /// The agent's task was typed.
    TaskTyped,
    /// Time for which the output rate has held a message back.
    Held(Duration),
}

/// Text for the terminal.
#[derive(Debug)]
pub(crate) struct TypeRequest {
    /// Names the injection in [`super::Pipeline::on_began`] and [`super::Pipeline::on_written`].
    pub(crate) key: u64,
    pub(crate) text: String,
    pub(crate) lead: Lead,
    pub(crate) attempt: u32,
    /// Its echo may look like the line by which an agent ends itself.
    pub(crate) may_echo_exit: bool,
}

/// Keys in front of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lead {
    Nothing,
    /// Two escapes, which interrupt the program.
    Interrupt,
    /// One escape, which takes a suggestion out of the input line.
    Dismiss,
}

/// Outcome that lets the engine's floor pass a message.
#[derive(Debug)]
pub(crate) struct Settlement {
    /// Without its body: settlements may wait for the disk.
    pub(crate) message: Message,
    pub(crate) level: Level,
    pub(crate) method: &'static str,
    pub(crate) confidence: &'static str,
    pub(crate) is_verified: bool,
    /// From the first byte to the signal, in milliseconds.
    pub(crate) latency_ms: u64,
    pub(crate) attempts: u32,
}

/// Delivery that failed for good.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) message: Message,
    pub(crate) reason: FailureReason,
    pub(crate) attempts: u32,
}
