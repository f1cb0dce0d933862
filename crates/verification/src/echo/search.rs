//! [`EchoSearch`]: the parts of one message in a growing text.

use memchr::memmem::Finder;
use serde::{Deserialize, Serialize};

use super::expected::ExpectedEcho;
use super::window::{TextWindow, WINDOW_BYTES};

/// Parts of a message that were found beside its event id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MatchDetail {
    /// The whole line as it was typed.
    Exact,
    /// The sender and the first words of the body.
    Tokens,
}

/// State of the search for one message.
#[derive(Debug)]
pub(super) struct EchoSearch {
    exact: Option<PartGroup>,
    tokens: Option<PartGroup>,
    /// A match that counts only if the character at this position, not read yet, may follow an id.
    pending: Option<(u64, MatchDetail)>,
}

/// Progress of a group of parts in one window.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    No,
    /// All parts, but the id ends where the text ends, at this position: the next character decides.
    IfDelimitedAt(u64),
    Yes,
}

impl EchoSearch {
    /// Looks for `expected` in text from position `begin` on.
    pub(super) fn new(expected: &ExpectedEcho, begin: u64) -> Self {
        let group = |parts: Vec<&str>| PartGroup::new(&parts, begin);
        Self { exact: expected.exact_parts().map(group), tokens: expected.token_parts().map(group), pending: None }
    }

    /// Takes the text that was appended to the window. To be called before text is dropped from it.
    pub(super) fn advance(&mut self, window: &TextWindow) -> Option<MatchDetail> {
        if let Some((position, detail)) = self.pending {
            match window.byte(position) {
                None => return None,
                Some(byte) if is_id_byte(byte) => self.pending = None,
                Some(_) => return Some(detail),
            }
        }
        for (group, detail) in [(&mut self.exact, MatchDetail::Exact), (&mut self.tokens, MatchDetail::Tokens)] {
            match group.as_mut().map_or(Found::No, |group| group.advance(window)) {
                Found::No => {}
                Found::Yes => return Some(detail),
                Found::IfDelimitedAt(position) => {
                    // The exact match is looked at first; a weaker one that is open as well must not replace it.
                    self.pending.get_or_insert((position, detail));
                }
            }
        }
        None
    }

    /// Returns the match that nothing but the end of the text has left open. Nothing behind an id delimits it.
    pub(super) fn finish(&self) -> Option<MatchDetail> {
        self.pending.map(|(_, detail)| detail)
    }
}

/// Parts that must lie in one window, the event id first.
#[derive(Debug)]
struct PartGroup {
    id: PartCursor,
    others: Vec<PartCursor>,
    begin: u64,
    /// No window that starts before this position can contain all parts.
    from: u64,
}

impl PartGroup {
    fn new(parts: &[&str], begin: u64) -> Self {
        let mut cursors = parts.iter().map(|part| PartCursor::new(part, begin));
        // An empty list of parts does not occur; an empty part would be found nowhere in an empty text.
        let id = cursors.next().unwrap_or_else(|| PartCursor::new("", begin));
        Self { id, others: cursors.collect(), begin, from: begin }
    }

    /// Finds the first window that contains all parts, or remembers from where on to look for it.
    ///
    /// For a window that starts at `from`, the first occurrences behind `from` are the best ones. If they span more
    /// than a window, the next candidate starts one window's length before the end of the last of them. So each
    /// occurrence is looked at once, and the outcome depends on the text only, not on the reads it came in.
    fn advance(&mut self, window: &TextWindow) -> Found {
        self.from = self.from.max(window.first_readable(self.begin));
        loop {
            let Some(id) = self.id.first_id(window, self.from, self.begin) else { return Found::No };
            let id_end = id + self.id.length;
            self.from = self.from.max(earliest_start(window, id_end));
            let (mut first, mut end) = (id, id_end);
            for part in &mut self.others {
                let Some(position) = part.first(window, self.from) else { return Found::No };
                first = first.min(position);
                end = end.max(position + part.length);
            }
            let earliest = earliest_start(window, end);
            if first >= earliest {
                return if window.byte(id_end).is_none() { Found::IfDelimitedAt(id_end) } else { Found::Yes };
            }
            self.from = earliest;
        }
    }
}

/// Returns the first position of a window that contains the byte before `end`.
fn earliest_start(window: &TextWindow, end: u64) -> u64 {
    window.first_within(window.distance_to_end(end - 1) + WINDOW_BYTES - 1)
}

/// The occurrences of one part, each found once.
#[derive(Debug)]
struct PartCursor {
    finder: Finder<'static>,
    length: u64,
    found: Option<u64>,
    /// No occurrence begins before this position, apart from those already passed.
    scanned: u64,
}

impl PartCursor {
    fn new(part: &str, begin: u64) -> Self {
        Self { finder: Finder::new(part).into_owned(), length: part.len() as u64, found: None, scanned: begin }
    }

    /// Returns the first occurrence at `from` or later.
    fn first(&mut self, window: &TextWindow, from: u64) -> Option<u64> {
        if let Some(found) = self.found.filter(|found| *found >= from) {
            return Some(found);
        }
        let from = from.max(self.scanned);
        self.found = window.find(&self.finder, from);
        // The last bytes may be the beginning of an occurrence: they are scanned again with the text that follows.
        self.scanned = self.found.unwrap_or_else(|| from.max((window.end() + 1).saturating_sub(self.length)));
        self.found
    }

    /// Returns the first occurrence at `from` or later that is no part of a longer id. One at the end of the text
    /// counts for now. Text before `begin` is not looked at.
    fn first_id(&mut self, window: &TextWindow, mut from: u64, begin: u64) -> Option<u64> {
        loop {
            let found = self.first(window, from)?;
            let follows_id = found > begin && window.byte(found - 1).is_some_and(is_id_byte);
            let precedes_id = window.byte(found + self.length).is_some_and(is_id_byte);
            if !follows_id && !precedes_id {
                return Some(found);
            }
            from = found + 1;
        }
    }
}

/// Returns `true` if a neighbour with this byte makes an id part of a longer one. Bytes of other alphabets do not.
fn is_id_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-')
}
