//! [`EchoMonitor`]: the echoes that one agent is expected to show.

use super::expected::ExpectedEcho;
use super::search::{EchoSearch, MatchDetail};
use super::window::{PIECE_BYTES, TextWindow};
use crate::Timestamp;

/// Watches of one agent at the same time. The next injection waits when there are as many. Our choice; at the pace
/// of injections it is never reached by agents that take their messages.
pub const MAX_WATCHES: usize = 64;

/// Names one watch of one [`EchoMonitor`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WatchId(u64);

/// An echo that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EchoMatch {
    /// The watch that it belongs to, which has ended.
    pub watch: WatchId,
    /// Parts that were found beside the event id.
    pub detail: MatchDetail,
    /// Instant at which the output that completed the echo was read.
    pub at: Timestamp,
}

/// Looks for the echoes of an agent's outstanding messages in its cleaned output.
///
/// The text is shared by all watches and kept only while there are any: at most 96 KiB of text and four times as much
/// for its layout. Each watch adds its parts, at most 64 KiB each.
#[derive(Debug, Default)]
pub struct EchoMonitor {
    window: TextWindow,
    watches: Vec<Watch>,
    next_id: u64,
}

#[derive(Debug)]
struct Watch {
    id: WatchId,
    search: EchoSearch,
    deadline: Timestamp,
    last_output_at: Timestamp,
}

impl EchoMonitor {
    /// Creates a monitor without watches.
    pub fn new() -> Self {
        Self::default()
    }

    /// Begins to look for an echo in the output that follows, before `deadline`. To be called when the first byte of
    /// the injection is handed to the terminal (an echo can come before the write is confirmed), after the output that
    /// was read before. `None` if there are [`MAX_WATCHES`] already.
    pub fn begin(&mut self, expected: &ExpectedEcho, at: Timestamp, deadline: Timestamp) -> Option<WatchId> {
        if self.watches.len() >= MAX_WATCHES {
            return None;
        }
        let id = WatchId(self.next_id);
        self.next_id += 1;
        let search = EchoSearch::new(expected, self.window.end());
        self.watches.push(Watch { id, search, deadline, last_output_at: at });
        Some(id)
    }

    /// Takes cleaned text that was read at `at` and returns the echoes that it completes. Watches whose deadline has
    /// passed end before the text is looked at, as with [`end`](Self::end).
    pub fn on_text(&mut self, text: &str, at: Timestamp) -> Vec<EchoMatch> {
        let mut matches = self.end_overdue(at);
        let mut rest = text;
        while !rest.is_empty() && !self.watches.is_empty() {
            let (piece, after) = rest.split_at(rest.floor_char_boundary(PIECE_BYTES));
            self.window.push(piece);
            self.watches.retain_mut(|watch| match watch.search.advance(&self.window) {
                Some(detail) => {
                    matches.push(EchoMatch { watch: watch.id, detail, at });
                    false
                }
                None => {
                    watch.last_output_at = at;
                    true
                }
            });
            self.window.trim();
            rest = after;
        }
        self.forget_unwatched_text();
        matches
    }

    /// Moves the deadline of a watch that has not ended.
    pub fn set_deadline(&mut self, watch: WatchId, deadline: Timestamp) {
        if let Some(watch) = self.watches.iter_mut().find(|candidate| candidate.id == watch) {
            watch.deadline = deadline;
        }
    }

    /// Ends a watch, at the end of its attempt or when a stronger signal made it needless. Returns the echo whose
    /// event id is the very last text that was read: nothing behind it delimits it. To be taken into account before
    /// the attempt is judged.
    pub fn end(&mut self, watch: WatchId) -> Option<EchoMatch> {
        let index = self.watches.iter().position(|candidate| candidate.id == watch)?;
        let ended = self.watches.remove(index).finish();
        self.forget_unwatched_text();
        ended
    }

    /// Like [`end`](Self::end), at the end of an attempt after which an echo still raises the level: without an echo
    /// the watch goes on.
    pub fn end_if_found(&mut self, watch: WatchId) -> Option<EchoMatch> {
        self.watches.iter().find(|candidate| candidate.id == watch)?.finish()?;
        self.end(watch)
    }

    /// Returns the number of watches that have not ended.
    pub fn watch_count(&self) -> usize {
        self.watches.len()
    }

    fn end_overdue(&mut self, at: Timestamp) -> Vec<EchoMatch> {
        let overdue = self.watches.extract_if(.., |watch| watch.deadline <= at);
        overdue.filter_map(|watch| watch.finish()).collect()
    }

    fn forget_unwatched_text(&mut self) {
        if self.watches.is_empty() {
            self.window.clear();
        }
    }
}

impl Watch {
    fn finish(&self) -> Option<EchoMatch> {
        let detail = self.search.finish()?;
        Some(EchoMatch { watch: self.id, detail, at: self.last_output_at })
    }
}
