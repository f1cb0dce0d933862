//! [`ActivitySearch`]: signs in an agent's output that it works.

use memchr::memmem;

/// Longest pattern in bytes; longer ones are not looked for. Patterns are words such as `Thinking...`. Our choice.
const MAX_PATTERN_BYTES: usize = 256;

/// Looks for the activity patterns of a harness in cleaned text, from the ack of one message on.
///
/// Patterns that stand in the message itself are left out: its echo may follow the ack, and is no activity. Programs
/// without patterns have no such signal: any output would do, so it says nothing.
#[derive(Debug, Clone)]
pub struct ActivitySearch {
    patterns: Vec<String>,
    /// The end of the text so far, in which a pattern may have begun. At most [`MAX_PATTERN_BYTES`].
    tail: String,
}

impl ActivitySearch {
    /// Begins a search behind the ack of the message that was typed as `line`.
    pub fn new<'a>(patterns: impl IntoIterator<Item = &'a str>, line: &str) -> Self {
        let is_usable = |pattern: &&str| (1..=MAX_PATTERN_BYTES).contains(&pattern.len()) && !line.contains(*pattern);
        Self { patterns: patterns.into_iter().filter(is_usable).map(str::to_owned).collect(), tail: String::new() }
    }

    /// Takes the text that follows and returns a pattern that it completes.
    pub fn on_text(&mut self, text: &str) -> Option<&str> {
        let longest = self.patterns.iter().map(String::len).max()?;
        // A pattern that began in the tail ends within the first bytes of the text.
        let head = &text[..text.ceil_char_boundary(longest)];
        self.tail.push_str(head);
        let places = [self.tail.as_str(), text];
        let found = self.patterns.iter().find(|pattern| places.iter().any(|place| contains(place, pattern)));
        // The end of the text alone suffices then: it is at least as long as every pattern.
        if text.len() > head.len() {
            self.tail.clear();
            self.tail.push_str(&text[text.floor_char_boundary(text.len().saturating_sub(longest))..]);
        } else {
            self.tail.drain(..self.tail.ceil_char_boundary(self.tail.len().saturating_sub(longest)));
        }
        found.map(String::as_str)
    }
}

fn contains(text: &str, pattern: &str) -> bool {
    memmem::find(text.as_bytes(), pattern.as_bytes()).is_some()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn patterns_of_the_message_itself_are_no_activity() {
        let mut search = ActivitySearch::new(["Tool:", "Read(", ""], "Relay message from A [e]: use Tool: x");
        assert_eq!(search.on_text("Tool: x and Rea"), None);
        assert_eq!(search.on_text("d(file)"), Some("Read("));
        assert_eq!(ActivitySearch::new([], "line").on_text("anything"), None);
    }

    proptest! {
        #[test]
        fn any_split_finds_the_same(text in "[ab⠋]{0,40}", size in 1usize..6) {
            let patterns = ["abba", "b⠋b", "⠋⠋⠋a"];
            let characters: Vec<char> = text.chars().collect();
            let mut search = ActivitySearch::new(patterns, "");
            let reads = characters.chunks(size);
            let is_found = reads.filter(|read| search.on_text(&read.iter().collect::<String>()).is_some()).count() > 0;
            prop_assert_eq!(is_found, patterns.iter().any(|pattern| text.contains(pattern)));
        }
    }
}
