//! [`Readiness`]: the moment from which a program takes its first message.

use std::time::Duration;

use relay_verification::Timestamp;

use crate::harness::ReadyRule;

/// Text by which a program says that it is ready.
const READY_MARK: &str = "->pty:ready";
/// Ends of a prompt. Without the blank the characters of the shells also end other text, such as `50%`.
const PROMPTS: [&str; 8] = ["$ ", "> ", "# ", "% ", "›", "› ", "❯", "❯ "];
/// Programs without an entry are ready after so much output.
const ENOUGH_OUTPUT: u64 = 500;
/// Output silence after which programs without an entry count as ready; `cat` says nothing at all.
const SILENCE: Duration = Duration::from_millis(1500);
/// Time after which a program without any sign counts as ready.
const LIMIT: Duration = Duration::from_secs(25);

/// Evidence of readiness.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadySign {
    /// The program said so, shows its prompt, or waits.
    Shown,
    /// Nothing was recognised in time.
    GaveUp,
}

/// Follows the start of one program.
#[derive(Debug, Clone)]
pub(crate) struct Readiness {
    started_at: Timestamp,
    last_output_at: Timestamp,
    output_bytes: u64,
    rule: Option<ReadyRule>,
    tail: String,
    has_mark: bool,
}

impl Readiness {
    /// Begins when the program is started. Without a rule any prompt counts, and silence does.
    pub(crate) fn new(started_at: Timestamp, rule: Option<ReadyRule>) -> Self {
        Self { started_at, last_output_at: started_at, output_bytes: 0, rule, tail: String::new(), has_mark: false }
    }

    pub(crate) fn on_output(&mut self, at: Timestamp, text: &str) {
        self.last_output_at = at;
        self.output_bytes += text.len() as u64;
        self.tail.push_str(text);
        self.has_mark |= self.tail.contains(READY_MARK);
        // A mark may be split between two reads.
        let keep = self.tail.len().saturating_sub(READY_MARK.len());
        self.tail.drain(..self.tail.ceil_char_boundary(keep));
    }

    /// Judges by the screen: its text, and the cursor's row up to the cursor.
    pub(crate) fn evaluate(&self, now: Timestamp, screen: &str, before_cursor: &str) -> Option<ReadySign> {
        let is_shown = match &self.rule {
            _ if self.has_mark => true,
            Some(rule) => rule.holds(screen, before_cursor),
            None => {
                ends_in_prompt(before_cursor)
                    || self.output_bytes >= ENOUGH_OUTPUT
                    || now >= self.last_output_at + SILENCE
            }
        };
        if is_shown {
            Some(ReadySign::Shown)
        } else if now >= self.started_at + LIMIT {
            Some(ReadySign::GaveUp)
        } else {
            None
        }
    }

    /// Instant of the next evaluation, if there is no output before.
    pub(crate) fn next_evaluation(&self) -> Timestamp {
        match &self.rule {
            Some(_) => self.started_at + LIMIT,
            None => (self.last_output_at + SILENCE).min(self.started_at + LIMIT),
        }
    }
}

/// Returns whether the text up to the cursor ends in a prompt. The row is not trimmed: `$ ` is one.
pub(crate) fn ends_in_prompt(before_cursor: &str) -> bool {
    PROMPTS.iter().any(|prompt| before_cursor.ends_with(prompt))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    #[test]
    fn a_program_without_an_entry_is_ready_at_a_prompt_or_in_silence() {
        let rows = [
            ("user@host:~$ ", true),
            (">>> ", true),
            ("~> ", true),
            ("root# ", true),
            ("zsh% ", true),
            ("❯", true),
            ("› ", true),
            ("loading", false),
            ("load 50%", false),
            ("cost 5$", false),
            ("a>", false),
            ("issue #", false),
            ("", false),
        ];
        for (row, ready) in rows {
            let readiness = Readiness::new(at(0), None);
            assert_eq!(readiness.evaluate(at(10), "", row).is_some(), ready, "{row:?}");
        }
        let mut silent = Readiness::new(at(0), None);
        silent.on_output(at(100), "x");
        assert_eq!((silent.evaluate(at(1599), "", "x"), silent.next_evaluation()), (None, at(1600)));
        assert_eq!(silent.evaluate(at(1600), "", "x"), Some(ReadySign::Shown));
        silent.on_output(at(1600), &"y".repeat(500));
        assert_eq!(silent.evaluate(at(1600), "", "y"), Some(ReadySign::Shown));
    }

    #[test]
    fn a_harness_is_ready_by_its_rule_by_its_word_or_in_the_end() {
        let rule = ReadyRule { screen: vec!["Welcome".into()], prompt: vec!["❯".into()], blocked_by: vec![] };
        let mut readiness = Readiness::new(at(0), Some(rule));
        assert_eq!(readiness.evaluate(at(5000), "Loading", "$ "), None);
        assert_eq!(readiness.evaluate(at(5000), "Welcome back", "❯ "), Some(ReadySign::Shown));
        assert_eq!(readiness.evaluate(at(25_000), "", ""), Some(ReadySign::GaveUp));
        readiness.on_output(at(1), "->pty:");
        assert_eq!(readiness.evaluate(at(1), "", ""), None);
        readiness.on_output(at(2), "ready\n");
        assert_eq!(readiness.evaluate(at(2), "", ""), Some(ReadySign::Shown));
    }
}
