//! [`ExitLine`]: an agent that prints `/exit` on a line of its own ends on purpose.

use relay_verification::Timestamp;

use super::echo_guard::EchoGuard;
use crate::injection::EXIT_WORD;

/// Maximum bytes of a line that is compared.
const MAX_BYTES: usize = 256;

/// Looks for the line in the visible output.
#[derive(Debug, Default)]
pub(super) struct ExitLine {
    line: String,
    is_too_long: bool,
    echoes: EchoGuard,
}

impl ExitLine {
    /// Notes that a text was typed whose echo may hold the line.
    pub(super) fn on_typed(&mut self, at: Timestamp) {
        self.echoes.on_typed(at);
    }

    /// Takes visible output; returns whether it completes the line.
    pub(super) fn on_text(&mut self, at: Timestamp, text: &str) -> bool {
        let mut found = false;
        for character in text.chars() {
            match character {
                '\n' => {
                    found |= !self.is_too_long && self.line.trim() == EXIT_WORD;
                    self.line.clear();
                    self.is_too_long = false;
                }
                _ if self.line.len() < MAX_BYTES => self.line.push(character),
                _ => self.is_too_long = true,
            }
        }
        found && !self.echoes.is_echo_possible(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_line_of_its_own_that_is_no_echo_counts() {
        let at = |seconds: i64| Timestamp::from_millis(seconds * 1000);
        let mut exit = ExitLine::default();
        assert!(!exit.on_text(at(0), "say /exit\n /ex"));
        assert!(exit.on_text(at(0), "it \r\n"));
        exit.on_typed(at(1));
        assert!(!exit.on_text(at(60), "/exit\n"));
        assert!(exit.on_text(at(61), "/exit\n"));
        assert!(!exit.on_text(at(70), &format!("{}\n", "x".repeat(300))));
    }
}
