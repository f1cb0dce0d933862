//! [`TextWindow`]: the last text of an agent, squashed, with the distances between its characters before squashing.

use memchr::memmem::Finder;

use super::squash::is_kept;

/// All parts of an echo must lie within this many bytes of cleaned text. Far more than a screen, so that a redraw or
/// a burst of output between two parts does no harm. Our choice.
pub const WINDOW_BYTES: u64 = 65_536;

/// Text is taken in pieces of at most this many bytes, and dropped in portions of at least as many: each byte is
/// moved a few times at most, and the memory stays below `WINDOW_BYTES` + 2 pieces, five bytes for each.
pub(super) const PIECE_BYTES: usize = 16 * 1024;

/// Squashed text. *Positions* count bytes of squashed text since the window was created; *distances* count bytes of
/// cleaned text, so that removed white space and borders still keep two parts apart.
#[derive(Debug, Default)]
pub(super) struct TextWindow {
    text: Vec<u8>,
    /// For each byte of `text`, the low half of the length of the cleaned text before it. Differences are exact, as
    /// the window never spans 4 GiB.
    offsets: Vec<u32>,
    /// Position of the first byte of `text`.
    start: u64,
    cleaned_length: u64,
}

impl TextWindow {
    /// Position after the last byte.
    pub(super) fn end(&self) -> u64 {
        self.start + self.text.len() as u64
    }

    /// The first position of which the byte before is known, for a reader of the text from `begin` on.
    pub(super) fn first_readable(&self, begin: u64) -> u64 {
        if self.start <= begin { begin } else { self.start + 1 }
    }

    /// Appends at most [`PIECE_BYTES`] of cleaned text.
    pub(super) fn push(&mut self, piece: &str) {
        debug_assert!(piece.len() <= PIECE_BYTES);
        for (index, character) in piece.char_indices().filter(|(_, character)| is_kept(*character)) {
            let mut buffer = [0; 4];
            for (within, byte) in character.encode_utf8(&mut buffer).bytes().enumerate() {
                self.text.push(byte);
                self.offsets.push(low_half(self.cleaned_length + (index + within) as u64));
            }
        }
        self.cleaned_length += piece.len() as u64;
    }

    /// Drops text that is too far back to be in one window with anything that follows.
    pub(super) fn trim(&mut self) {
        // One byte more stays: it decides whether an id at the front is a part of a longer one.
        let stale = self.index_within(WINDOW_BYTES).saturating_sub(1);
        if stale >= PIECE_BYTES {
            self.drop_front(stale);
        }
    }

    /// Drops all text and the memory for it.
    pub(super) fn clear(&mut self) {
        self.start = self.end();
        self.text = Vec::new();
        self.offsets = Vec::new();
    }

    fn drop_front(&mut self, bytes: usize) {
        self.text.drain(..bytes);
        self.offsets.drain(..bytes);
        self.start += bytes as u64;
    }

    /// Position of the first occurrence that begins at `from` or later.
    pub(super) fn find(&self, finder: &Finder<'_>, from: u64) -> Option<u64> {
        let skipped = from.saturating_sub(self.start);
        let text = self.text.get(usize::try_from(skipped).ok()?..)?;
        finder.find(text).map(|index| self.start + skipped + index as u64)
    }

    /// The byte at a position, if it is in the window.
    pub(super) fn byte(&self, position: u64) -> Option<u8> {
        let index = usize::try_from(position.checked_sub(self.start)?).ok()?;
        self.text.get(index).copied()
    }

    /// Bytes of cleaned text from the byte at `position` (which is in the window) to the end.
    pub(super) fn distance_to_end(&self, position: u64) -> u64 {
        usize::try_from(position.saturating_sub(self.start))
            .ok()
            .and_then(|index| self.offsets.get(index))
            .map_or(0, |offset| self.distance(*offset))
    }

    /// The first position at most `reach` bytes of cleaned text before the end.
    pub(super) fn first_within(&self, reach: u64) -> u64 {
        self.start + self.index_within(reach) as u64
    }

    /// Index of [`Self::first_within`] in `text`.
    fn index_within(&self, reach: u64) -> usize {
        self.offsets.partition_point(|offset| self.distance(*offset) > reach)
    }

    fn distance(&self, offset: u32) -> u64 {
        u64::from(low_half(self.cleaned_length).wrapping_sub(offset))
    }
}

fn low_half(length: u64) -> u32 {
    (length & 0xFFFF_FFFF) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_count_squashed_text_and_distances_cleaned_text() {
        let mut window = TextWindow::default();
        window.push("ab   │c");
        assert_eq!(window.end(), 3);
        assert_eq!(window.distance_to_end(0), 9);
        assert_eq!(window.distance_to_end(2), 1);
        assert_eq!(window.first_within(8), 1);
        assert_eq!(window.find(&Finder::new("bc"), 0), Some(1));
        assert_eq!(window.find(&Finder::new("bc"), 2), None);
    }

    #[test]
    fn memory_is_bounded_for_any_amount_of_text() {
        let mut window = TextWindow::default();
        for _ in 0..1000 {
            window.push(&"x".repeat(10_000));
            window.trim();
            assert!(window.text.len() as u64 <= WINDOW_BYTES + PIECE_BYTES as u64);
        }
        window.push("y");
        assert_eq!(window.end(), 10_000_001);
        assert_eq!(window.byte(10_000_000), Some(b'y'));
        window.clear();
        assert_eq!((window.end(), window.text.capacity()), (10_000_001, 0));
    }
}
