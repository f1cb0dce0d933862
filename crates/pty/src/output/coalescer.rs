//! Pacing of output: the first bytes after a quiet moment at once, then one chunk per interval.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

/// Largest chunk. Fewer, larger chunks keep event histories of consumers useful under load.
pub(crate) const CHUNK_BYTES: usize = 32 << 10;
/// Interval between chunks that are not full: about one frame of a display.
const INTERVAL: Duration = Duration::from_millis(16);

/// Bytes that were read and not yet sent on. Holds no memory while the terminal is quiet.
#[derive(Debug, Default)]
pub(crate) struct Coalescer {
    pending: Vec<u8>,
    /// When the first of the pending bytes was read.
    read_at: Option<Instant>,
    sent_at: Option<Instant>,
}

/// Bytes for one chunk, and the instant at which the first of them was read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PacedBytes {
    pub(crate) bytes: Bytes,
    pub(crate) read_at: Instant,
}

impl Coalescer {
    pub(crate) fn push(&mut self, bytes: &[u8], now: Instant) {
        self.pending.extend_from_slice(bytes);
        self.read_at.get_or_insert(now);
    }

    pub(crate) fn len(&self) -> usize {
        self.pending.len()
    }

    /// Instant at which the next chunk is due, if there is a whole character to send.
    pub(crate) fn due_at(&self) -> Option<Instant> {
        let read_at = self.read_at?;
        if complete_length(&self.pending) == 0 {
            return None;
        }
        match self.sent_at {
            Some(sent_at) if self.pending.len() < CHUNK_BYTES => Some((sent_at + INTERVAL).max(read_at)),
            _ => Some(read_at),
        }
    }

    /// Takes the next chunk if it is due.
    pub(crate) fn take_due(&mut self, now: Instant) -> Option<PacedBytes> {
        self.due_at().filter(|due_at| *due_at <= now)?;
        self.take_complete(now)
    }

    /// Takes up to one chunk of whole characters, due or not.
    pub(crate) fn take_complete(&mut self, now: Instant) -> Option<PacedBytes> {
        let most = self.pending.len().min(CHUNK_BYTES);
        self.take(complete_length(&self.pending[..most]), now)
    }

    /// Takes up to one chunk of the rest after the last byte was read; it may end with an unfinished character.
    pub(crate) fn take_rest(&mut self, now: Instant) -> Option<PacedBytes> {
        self.take_complete(now).or_else(|| self.take(self.pending.len(), now))
    }

    fn take(&mut self, length: usize, now: Instant) -> Option<PacedBytes> {
        let read_at = self.read_at?;
        if length == 0 {
            return None;
        }
        let rest = self.pending[length..].to_vec();
        let mut taken = std::mem::replace(&mut self.pending, rest);
        taken.truncate(length);
        // Growing by doubling leaves room that would live as long as the chunk.
        taken.shrink_to_fit();
        self.read_at = (!self.pending.is_empty()).then_some(now);
        self.sent_at = Some(now);
        Some(PacedBytes { bytes: taken.into(), read_at })
    }
}

/// Length without the beginning of a character that may still be completed. Invalid bytes count as complete.
fn complete_length(bytes: &[u8]) -> usize {
    // A character has four bytes at most, so an unfinished one began within the last three.
    for start in (bytes.len().saturating_sub(3)..bytes.len()).rev() {
        let is_continuation = bytes[start] & 0b1100_0000 == 0b1000_0000;
        if !is_continuation {
            let unfinished = std::str::from_utf8(&bytes[start..]).is_err_and(|error| error.error_len().is_none());
            return if unfinished { start } else { bytes.len() };
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_first_bytes_go_at_once_and_the_next_after_the_interval() {
        let start = Instant::now();
        let mut coalescer = Coalescer::default();
        coalescer.push(b"a", start);
        assert_eq!(coalescer.take_due(start).map(|paced| paced.bytes), Some(Bytes::from("a")));
        coalescer.push(b"b", start + INTERVAL / 4);
        assert_eq!(coalescer.take_due(start + INTERVAL / 2), None);
        coalescer.push(b"c", start + INTERVAL / 2);
        let second = coalescer.take_due(start + INTERVAL);
        assert_eq!(second, Some(PacedBytes { bytes: Bytes::from("bc"), read_at: start + INTERVAL / 4 }));
        assert_eq!(coalescer.due_at(), None);
    }

    #[test]
    fn a_full_chunk_is_due_at_once() {
        let start = Instant::now();
        let mut coalescer = Coalescer::default();
        coalescer.push(b"a", start);
        assert!(coalescer.take_due(start).is_some());
        coalescer.push(&vec![b'x'; CHUNK_BYTES + 1], start);
        assert_eq!(coalescer.take_due(start).map(|paced| paced.bytes.len()), Some(CHUNK_BYTES));
        assert_eq!(coalescer.take_due(start), None);
    }

    #[test]
    fn an_unfinished_character_waits_and_is_not_lost_at_the_end() {
        let start = Instant::now();
        let mut coalescer = Coalescer::default();
        coalescer.push(&"é".as_bytes()[..1], start);
        assert_eq!(coalescer.due_at(), None);
        assert_eq!(coalescer.take_complete(start), None);
        assert_eq!(coalescer.take_rest(start).map(|paced| paced.bytes.len()), Some(1));
    }

    proptest! {
        #[test]
        fn chunks_joined_are_the_whole_output(
            pieces in prop::collection::vec(
                prop_oneof![
                    prop::collection::vec(any::<u8>(), 0..8),
                    ".{0,4}".prop_map(String::into_bytes),
                    "[é漢😀]{0,3}".prop_map(|text| text.as_bytes()[..text.len().saturating_sub(1)].to_vec()),
                ],
                0..40,
            )
        ) {
            let start = Instant::now();
            let mut coalescer = Coalescer::default();
            let (mut bytes, mut text) = (Vec::new(), String::new());
            let mut keep = |paced: PacedBytes| {
                bytes.extend_from_slice(&paced.bytes);
                text.push_str(&String::from_utf8_lossy(&paced.bytes));
            };
            for (index, piece) in (0..).zip(&pieces) {
                let now = start + INTERVAL * index;
                coalescer.push(piece, now);
                coalescer.take_due(now).map(&mut keep);
            }
            while let Some(paced) = coalescer.take_rest(start) {
                keep(paced);
            }
            let whole = pieces.concat();
            prop_assert_eq!(&bytes, &whole);
            prop_assert_eq!(text, String::from_utf8_lossy(&whole));
        }
    }
}
