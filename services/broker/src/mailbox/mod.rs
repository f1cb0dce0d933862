//! Messages from the engine on their way to one agent: what a frame is ([`mod@classify`]), its place in the order
//! ([`Mailbox`]), and the queue between the engine link and the agent's task ([`SharedMailbox`]).

mod classify;
mod known_ids;
mod message;
mod order;
mod shared;

pub(crate) use classify::{FrameMeaning, classify, read_receipt};
pub(crate) use message::{Author, Message, Origin, Urgency};
pub(crate) use order::{Mailbox, MailboxLength, Verdict};
pub(crate) use shared::{FrameAnswer, SharedMailbox};
