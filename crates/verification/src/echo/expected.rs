//! [`ExpectedEcho`]: the parts of a message that its echo must contain.

use super::squash::squash;
use super::window::WINDOW_BYTES;

/// Words of the body that must appear beside the id and the sender. Enough to tell messages apart, few enough that
/// a log line in the middle of a long message does no harm. Our choice.
const KEY_WORDS: usize = 5;

/// The parts of one message to look for, as they were typed (after [`sanitise`](crate::sanitise)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedEcho {
    /// Squashed event id. Never empty in a part list.
    event_id: String,
    line: String,
    sender: String,
    words: Vec<String>,
}

impl ExpectedEcho {
    /// Describes the echo of `line`, which carries `body` from `sender` under `event_id`. An event id without any
    /// character that [`squash`] keeps never matches.
    pub fn new(sender: &str, event_id: &str, body: &str, line: &str) -> Self {
        Self {
            event_id: squash(event_id),
            line: squash(line),
            sender: squash(sender),
            words: body.split_whitespace().take(KEY_WORDS).map(squash).collect(),
        }
    }

    /// Id and line, the stronger match. `None` if it cannot match.
    pub(super) fn exact_parts(&self) -> Option<Vec<&str>> {
        if self.line.is_empty() {
            return None;
        }
        self.parts([self.line.as_str()].into_iter())
    }

    /// Id, sender and the first words. `None` if it cannot match.
    pub(super) fn token_parts(&self) -> Option<Vec<&str>> {
        self.parts([self.sender.as_str()].into_iter().chain(self.words.iter().map(String::as_str)))
    }

    /// The id and the other parts that are not empty. `None` if there is no id, or if a part is longer than the
    /// window, so that nothing can match.
    fn parts<'a>(&'a self, others: impl Iterator<Item = &'a str>) -> Option<Vec<&'a str>> {
        if self.event_id.is_empty() {
            return None;
        }
        // A word of layout characters only, such as `>`, has nothing left to look for.
        let others = others.filter(|part| !part.is_empty());
        let parts: Vec<&str> = [self.event_id.as_str()].into_iter().chain(others).collect();
        parts.iter().all(|part| part.len() as u64 <= WINDOW_BYTES).then_some(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_words_and_the_sender_are_key_parts() {
        let expected = ExpectedEcho::new("Al ice", "evt_1", "one | two three\nfour five six", "the line");
        assert_eq!(expected.token_parts().unwrap(), ["evt_1", "Alice", "one", "two", "three", "four"]);
        assert_eq!(expected.exact_parts().unwrap(), ["evt_1", "theline"]);
    }

    #[test]
    fn an_unmatchable_message_has_no_parts() {
        assert_eq!(ExpectedEcho::new("a", " | ", "b", "c").token_parts(), None);
        assert_eq!(ExpectedEcho::new("a", "id", "b", "  ").exact_parts(), None);
        let long = "x".repeat(70_000);
        assert_eq!(ExpectedEcho::new("a", "id", &long, &long).token_parts(), None);
        assert_eq!(ExpectedEcho::new("a", "id", "", "l").token_parts().unwrap(), ["id", "a"]);
    }
}
