//! A text that is typed on behalf of a sender, and the steps of writing it.

use std::time::Duration;

use bytes::{Bytes, BytesMut};

use super::Step;
use crate::InputModes;

/// Bytes of a line that the kernel keeps in canonical mode, besides its line feed.
const CANONICAL_LINE_BYTES: usize = 4095;
/// Bytes of the longest character in UTF-8: a shorter piece of a line might hold none.
const CHARACTER_BYTES: usize = 4;
/// Replacement for a tab where it would be a key press.
const TAB: &str = "    ";
const PASTE_BEGIN: &str = "\x1b[200~";
const PASTE_END: &str = "\x1b[201~";

/// A text with the Enter that submits it: one entry of the write queue, which nothing can get between.
///
/// The text must be free of control characters other than line feed and tab; the crate types what it is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Injection {
    /// Keys before the text.
    pub lead: Option<LeadKeys>,
    /// The text. Its line feeds are typed as such.
    pub text: String,
    /// Text in front of each further piece of a line that is too long for canonical mode, so that no piece of it passes
    /// for a line of its own. Shorter than such a line.
    pub continuation: &'static str,
    /// Use of bracketed paste for the text.
    pub paste: PasteStyle,
    /// Pause between text and Enter, for programs that would otherwise take Enter for a part of a paste. There is
    /// none in canonical mode, where the kernel collects the line.
    pub enter_gap: Duration,
    /// Keys that submit the text, normally a carriage return.
    pub enter: Bytes,
}

/// Keys that are pressed before an injected text, for example to interrupt the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeadKeys {
    /// The keys as bytes.
    pub keys: Bytes,
    /// Pause behind them.
    pub pause: Duration,
}

/// Use of bracketed paste.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PasteStyle {
    /// Whenever the program has switched it on.
    WhenEnabled,
    /// Never: the text arrives as key presses.
    Never,
}

impl Injection {
    /// Text with a carriage return 50 ms behind it, pasted where the program supports that.
    pub fn new(text: impl Into<String>) -> Self {
        Self {
            lead: None,
            text: text.into(),
            continuation: "",
            paste: PasteStyle::WhenEnabled,
            enter_gap: Duration::from_millis(50),
            enter: Bytes::from_static(b"\r"),
        }
    }

    /// Steps for a terminal in these modes. The modes are read when the entry's turn has come, not when it is queued.
    pub(crate) fn steps(&self, modes: InputModes) -> Vec<Step> {
        let mut steps = Vec::with_capacity(5);
        if let Some(lead) = &self.lead {
            steps.push(Step::Write(lead.keys.clone()));
            steps.push(Step::Pause(lead.pause));
        }
        let text = if modes.bracketed_paste && self.paste == PasteStyle::WhenEnabled {
            format!("{PASTE_BEGIN}{}{PASTE_END}", self.text)
        } else {
            self.text.replace('\t', TAB)
        };
        if modes.line.canonical {
            steps.push(Step::Write(break_lines(&text, self.continuation)));
        } else {
            steps.push(Step::Write(text.into()));
            steps.push(Step::Pause(self.enter_gap));
        }
        steps.push(Step::Write(self.enter.clone()));
        steps
    }

    /// Bytes that count towards the queue's bound.
    pub(crate) fn len(&self) -> usize {
        self.lead.as_ref().map_or(0, |lead| lead.keys.len()) + self.text.len() + self.enter.len()
    }
}

/// Breaks lines that are too long for canonical mode, between characters. Further pieces begin with `continuation`.
fn break_lines(text: &str, continuation: &str) -> Bytes {
    let room_behind = CANONICAL_LINE_BYTES.saturating_sub(continuation.len()).max(CHARACTER_BYTES);
    let mut broken = BytesMut::with_capacity(text.len() + text.len() / CANONICAL_LINE_BYTES * (1 + continuation.len()));
    for line in text.split_inclusive('\n') {
        let (mut rest, mut room) = (line, CANONICAL_LINE_BYTES);
        while rest.trim_end_matches('\n').len() > room {
            let (head, tail) = rest.split_at(rest.floor_char_boundary(room));
            broken.extend_from_slice(head.as_bytes());
            broken.extend_from_slice(b"\n");
            broken.extend_from_slice(continuation.as_bytes());
            (rest, room) = (tail, room_behind);
        }
        broken.extend_from_slice(rest.as_bytes());
    }
    broken.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LineMode;

    fn modes(canonical: bool, bracketed_paste: bool) -> InputModes {
        InputModes { line: LineMode { canonical, echo: true }, bracketed_paste, alternate_screen: false }
    }

    fn write(bytes: &'static str) -> Step {
        Step::Write(Bytes::from_static(bytes.as_bytes()))
    }

    #[test]
    fn the_steps_follow_the_modes() {
        let injection = Injection::new("a\tb\nc");
        let gap = Step::Pause(injection.enter_gap);
        assert_eq!(injection.steps(modes(false, false)), [write("a    b\nc"), gap.clone(), write("\r")]);
        assert_eq!(injection.steps(modes(false, true)), [write("\x1b[200~a\tb\nc\x1b[201~"), gap.clone(), write("\r")]);
        assert_eq!(injection.steps(modes(true, false)), [write("a    b\nc"), write("\r")]);
        let typed = Injection { paste: PasteStyle::Never, ..injection.clone() };
        assert_eq!(typed.steps(modes(false, true)), [write("a    b\nc"), gap, write("\r")]);
        let pause = Duration::from_millis(120);
        let steered = Injection { lead: Some(LeadKeys { keys: "\x1b\x1b".into(), pause }), ..injection };
        assert_eq!(steered.steps(modes(true, false))[..2], [write("\x1b\x1b"), Step::Pause(pause)]);
    }

    #[test]
    fn long_lines_are_broken_between_characters_in_canonical_mode_only() {
        let text = format!("{}\n{}é{}", "a".repeat(4095), "b".repeat(4094), "c".repeat(5000));
        let broken = break_lines(&text, "");
        let lines: Vec<&str> = std::str::from_utf8(&broken).expect("whole characters").split('\n').collect();
        let lengths: Vec<usize> = lines.iter().map(|line| line.len()).collect();
        assert_eq!(lengths, [4095, 4094, 4095, 907]);
        assert_eq!(lines.concat(), text.replace('\n', ""));
        assert_eq!(Injection::new(text.clone()).steps(modes(false, false))[0], Step::Write(text.into()));
    }

    #[test]
    fn pieces_of_a_long_line_begin_with_the_continuation() {
        // A character of two bytes stands across the first break, and one of four bytes across the second.
        let text = format!("{}é{}🦀{}\nnext", "a".repeat(4094), "b".repeat(4089), "c".repeat(4089));
        let broken = break_lines(&text, "> ");
        let lines: Vec<&str> = std::str::from_utf8(&broken).expect("whole characters").split('\n').collect();
        let lengths: Vec<usize> = lines.iter().map(|line| line.len()).collect();
        assert_eq!(lengths, [4094, 4093, 4095, 4]);
        let pieces = [lines[0], &lines[1][2..], &lines[2][2..], "\n", lines[3]];
        assert_eq!(pieces.concat(), text);
        assert!(lines[1].starts_with("> é") && lines[2].starts_with("> 🦀"), "{lines:?}");
        let injection = Injection { continuation: "> ", ..Injection::new(text.clone()) };
        assert_eq!(injection.steps(modes(true, false))[0], Step::Write(broken));
        assert_eq!(injection.steps(modes(false, false))[0], Step::Write(text.into()));
    }
}
