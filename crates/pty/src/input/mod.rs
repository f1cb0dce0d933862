//! Input of a terminal: one ordered queue, in which an injection is one entry.

mod injection;
mod queue;

use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

pub use injection::{Injection, LeadKeys, PasteStyle};
pub(crate) use queue::{EntryTicket, InputQueue, NextWrite};
pub use queue::{WriteId, WriteTicket};

/// A step of writing one entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    Write(Bytes),
    /// Nothing is written for this long.
    Pause(Duration),
}

/// Proof that the terminal has taken an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteReceipt {
    /// Instant before the first byte was written. An echo cannot have been read earlier.
    pub began_at: Instant,
    /// Instant after the last byte was written.
    pub finished_at: Instant,
    /// Bytes written, marks and Enter included.
    pub bytes: usize,
}
