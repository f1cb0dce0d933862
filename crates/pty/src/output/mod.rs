//! Output of a terminal, delivered to its consumer in whole characters, paced and counted.

mod budget;
mod coalescer;

use std::borrow::Cow;

use bytes::Bytes;
use tokio::time::Instant;

pub(crate) use budget::{BudgetShare, OutputBudget};
pub(crate) use coalescer::{CHUNK_BYTES, Coalescer, PacedBytes};

/// A piece of a terminal's output. It never ends inside a character; it may end inside an escape sequence.
///
/// Its bytes count towards the host's bound for undelivered output until it is dropped, so consumers should share it
/// (`Arc<OutputChunk>`) instead of copying its bytes.
#[derive(Debug)]
pub struct OutputChunk {
    bytes: Bytes,
    offset: u64,
    read_at: Instant,
    _share: BudgetShare,
}

impl OutputChunk {
    pub(crate) fn new(bytes: Bytes, offset: u64, read_at: Instant, budget: &OutputBudget) -> Self {
        let share = budget.share(bytes.len());
        Self { bytes, offset, read_at, _share: share }
    }

    /// The bytes as the program wrote them.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// The output as text, with U+FFFD for bytes that are no UTF-8. The texts of all chunks joined are the text of the
    /// whole output.
    pub fn text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.bytes)
    }

    /// Bytes of output before this chunk.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Instant at which its first byte was read from the terminal.
    pub fn read_at(&self) -> Instant {
        self.read_at
    }
}
