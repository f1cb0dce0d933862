//! [`ContextBudget`]: how much of its context an agent says is left.

use std::sync::LazyLock;

use regex::Regex;
use relay_verification::Timestamp;

use super::echo_guard::EchoGuard;

/// Such as `Context left until auto-compact: 7%` and `context window 8% left`.
static LEFT: LazyLock<Option<Regex>> = LazyLock::new(|| {
    // A constant, which the tests below compile. Without it the feature is off.
    Regex::new(r"(?i)context[^\n%]{0,60}?\b(\d{1,3})% ?(?:left|remaining)|context left[^\n%]{0,40}?\b(\d{1,3})%").ok()
});
/// Text kept between two reads, so that a statement that is split is found.
const TAIL_BYTES: usize = 160;
/// A share from which on it is low, in per cent.
const LOW_PERCENT: u8 = 10;

/// Looks for statements in the visible output.
#[derive(Debug, Default)]
pub(super) struct ContextBudget {
    tail: String,
    left: Option<u8>,
    echoes: EchoGuard,
}

impl ContextBudget {
    /// Notes that a text was typed, which is going to be echoed.
    pub(super) fn on_typed(&mut self, at: Timestamp, text: &str) {
        // Other texts cannot pass for a statement, and each guard hides the agent's own statements for a minute.
        if text.as_bytes().windows(2).any(|pair| pair[0].is_ascii_digit() && pair[1] == b'%') {
            self.echoes.on_typed(at);
        }
    }

    /// Takes output. Returns the share that is left if it has changed.
    pub(super) fn on_text(&mut self, at: Timestamp, text: &str) -> Option<u8> {
        if self.echoes.is_echo_possible(at) {
            // Half an echo must not become a statement with the output after it.
            self.tail.clear();
            return None;
        }
        self.tail.push_str(text);
        let statements = LEFT.as_ref().into_iter().flat_map(|pattern| pattern.captures_iter(&self.tail));
        let found = statements.filter_map(|found| found.get(1).or(found.get(2))?.as_str().parse().ok()).last();
        let found = found.filter(|percent: &u8| *percent <= 100);
        let keep = self.tail.len().saturating_sub(TAIL_BYTES);
        self.tail.drain(..self.tail.ceil_char_boundary(keep));
        // The tail still holds the last statement, which is found again.
        let changed = found.filter(|percent| self.left != Some(*percent));
        self.left = found.or(self.left);
        changed
    }

    /// Returns whether a share is low.
    pub(super) fn is_low(percent: u8) -> bool {
        percent <= LOW_PERCENT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_is_found_once_also_when_it_is_split() {
        let mut budget = ContextBudget::default();
        let mut read = |text: &str| budget.on_text(Timestamp::from_millis(0), text);
        assert_eq!(read("building: 7% left\n"), None);
        assert_eq!(read("Context window: 4"), None);
        assert_eq!(read("2% left\n"), Some(42));
        assert_eq!(read("Context left until auto-compact: 9%\n"), Some(9));
        assert_eq!(read("Context left until auto-compact: 9%\n"), None, "it is known");
        assert!(ContextBudget::is_low(9) && !ContextBudget::is_low(42));
    }

    #[test]
    fn the_echo_of_a_message_says_nothing_about_the_agent() {
        let at = |seconds: i64| Timestamp::from_millis(seconds * 1000);
        let mut budget = ContextBudget::default();
        budget.on_typed(at(0), "100 % of the context is left");
        assert_eq!(budget.on_text(at(0), "context window 42% left\n"), Some(42));
        budget.on_typed(at(1), "only 5% left");
        assert_eq!(budget.on_text(at(1), "context: only 5% left\n"), None);
        assert_eq!(budget.on_text(at(60), "context window 7% left\n"), None);
        assert_eq!(budget.on_text(at(61), "context window 7% left\n"), Some(7));
    }
}
