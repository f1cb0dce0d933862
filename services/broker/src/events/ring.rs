//! The durable events that are kept: the newest 1000, fewer above 16 MiB.

use std::{collections::VecDeque, sync::Arc};

const MAX_EVENTS: usize = 1000;
const MAX_BYTES: usize = 16 << 20;

/// Encoded events by `seq`, oldest first and without holes.
#[derive(Debug, Default)]
pub(super) struct Ring {
    events: VecDeque<Arc<str>>,
    bytes: usize,
    /// `seq` of the newest event; 0 before the first.
    newest: u64,
}

impl Ring {
    /// Adds an event, encoded with the `seq` it gets, and returns that.
    pub(super) fn push(&mut self, encode: impl FnOnce(u64) -> String) -> u64 {
        self.newest += 1;
        let event: Arc<str> = encode(self.newest).into();
        self.bytes += event.len();
        self.events.push_back(event);
        // A single event larger than `MAX_BYTES` is kept, since readers must get the newest.
        while self.events.len() > MAX_EVENTS || (self.bytes > MAX_BYTES && self.events.len() > 1) {
            self.bytes -= self.events.pop_front().map_or(0, |oldest| oldest.len());
        }
        self.newest
    }

    /// `seq` of the newest event.
    pub(super) fn newest(&self) -> u64 {
        self.newest
    }

    /// `seq` of the oldest event that is kept; 0 if there is none.
    pub(super) fn oldest(&self) -> u64 {
        if self.events.is_empty() { 0 } else { self.newest + 1 - self.events.len() as u64 }
    }

    /// Returns `true` if an event behind `seq` is not kept any more.
    pub(super) fn has_gap(&self, seq: u64) -> bool {
        seq.saturating_add(1) < self.oldest()
    }

    /// The events behind `seq`, oldest first, at most `limit`.
    pub(super) fn events_after(&self, seq: u64, limit: usize) -> Vec<Arc<str>> {
        let skipped = seq.saturating_add(1).saturating_sub(self.oldest().max(1));
        self.events.iter().skip(usize::try_from(skipped).unwrap_or(usize::MAX)).take(limit).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_events_are_kept_and_a_gap_is_known() {
        let mut ring = Ring::default();
        assert_eq!((ring.oldest(), ring.has_gap(0), ring.events_after(0, 10).len()), (0, false, 0));
        for _ in 0..1001 {
            ring.push(|seq| seq.to_string());
        }
        assert_eq!((ring.oldest(), ring.newest()), (2, 1001));
        assert!(ring.has_gap(0) && !ring.has_gap(1) && !ring.has_gap(5000) && !ring.has_gap(u64::MAX));
        assert!(ring.events_after(u64::MAX, 10).is_empty());
        let texts = |seq, limit| ring.events_after(seq, limit).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(texts(999, 10), ["1000", "1001"]);
        assert_eq!(texts(0, 2), ["2", "3"]);
        assert!(texts(1001, 10).is_empty() && texts(2000, 10).is_empty());
        ring.push(|_| "x".repeat(MAX_BYTES));
        assert_eq!(ring.oldest(), 1002);
    }
}
