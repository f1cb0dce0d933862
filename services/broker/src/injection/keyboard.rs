//! [`Keyboard`]: a person who types into the same terminal. An injection must not be glued to an unfinished line.

use std::time::Duration;

use relay_verification::Timestamp;

/// Time after the last key of an unfinished line for which it delays injections.
const QUIET: Duration = Duration::from_secs(3);
/// Maximum delay of an injection. Our choice.
const LIMIT: Duration = Duration::from_secs(30);

/// State of the line that a person types.
#[derive(Debug, Clone, Default)]
pub(super) struct Keyboard {
    /// Last key of an unfinished line.
    unfinished_since: Option<Timestamp>,
}

impl Keyboard {
    /// Takes keys. Enter, Ctrl-C and Ctrl-U finish a line.
    pub(super) fn on_keys(&mut self, at: Timestamp, keys: &[u8]) {
        match keys.last() {
            Some(b'\r' | b'\n' | 0x03 | 0x15) => self.unfinished_since = None,
            Some(_) => self.unfinished_since = Some(at),
            None => {}
        }
    }

    /// Instant at which an injection that is ready since `ready_at` may start; `None` means at once.
    pub(super) fn opens_at(&self, now: Timestamp, ready_at: Timestamp) -> Option<Timestamp> {
        let opens_at = (self.unfinished_since? + QUIET).min(ready_at + LIMIT);
        (now < opens_at).then_some(opens_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unfinished_line_delays_and_a_finished_one_does_not() {
        let at = |seconds: i64| Timestamp::from_millis(seconds * 1000);
        let mut keyboard = Keyboard::default();
        assert_eq!(keyboard.opens_at(at(0), at(0)), None);
        keyboard.on_keys(at(1), b"ls");
        assert_eq!(keyboard.opens_at(at(2), at(0)), Some(at(4)));
        assert_eq!(keyboard.opens_at(at(4), at(0)), None);
        keyboard.on_keys(at(29), b"x");
        assert_eq!(keyboard.opens_at(at(29), at(0)), Some(at(30)));
        for end in [b"a\r".as_slice(), b"\x03", b"\x15"] {
            keyboard.on_keys(at(40), end);
            assert_eq!(keyboard.opens_at(at(40), at(40)), None);
        }
    }
}
