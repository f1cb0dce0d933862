//! Answers to what programs ask their terminal. Unknown queries get none.

use std::{fmt::Write as _, sync::Arc};

use vt100::{Callbacks, Screen};

use super::snapshot::cursor;
use crate::{Rgb, TerminalProfile};

/// Keyboard flags of the kitty protocol that a program can rely on: unambiguous escape codes. Its other flags would
/// make a terminal report key events that do not occur here, such as releases.
const KEYBOARD_FLAGS: u16 = 0b1;
/// Saved keyboard flags per screen. A full stack forgets the oldest, as the protocol asks.
const SAVED_KEYBOARD_FLAGS: usize = 16;
/// Answers to one piece of output. A program that asks faster than it reads loses the rest.
const ANSWER_BYTES: usize = 4 << 10;

/// Collects answers while the parser goes through output, so that a cursor position is the one at the query.
pub(super) struct Answers {
    profile: Arc<TerminalProfile>,
    pending: String,
    /// Keyboard flags of the main and of the alternate screen; the last of each is in force.
    keyboard: [Vec<u16>; 2],
}

impl Answers {
    pub(super) fn new(profile: Arc<TerminalProfile>) -> Self {
        Self { profile, pending: String::new(), keyboard: [Vec::new(), Vec::new()] }
    }

    pub(super) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.pending).into_bytes()
    }

    fn answer(&mut self, text: std::fmt::Arguments<'_>) {
        if self.pending.len() < ANSWER_BYTES {
            // Writing to a String cannot fail.
            let _ = self.pending.write_fmt(text);
        }
    }

    fn colour(&mut self, code: u16, Rgb(red, green, blue): Rgb) {
        // Four digits per channel, as X11 writes colours: the two digits repeated.
        self.answer(format_args!(
            "\x1b]{code};rgb:{red:02x}{red:02x}/{green:02x}{green:02x}/{blue:02x}{blue:02x}\x1b\\"
        ));
    }

    /// `CSI u` with a mark: query, push, pop and set of the keyboard flags.
    fn keyboard(&mut self, alternate_screen: bool, mark: u8, first: Option<u16>, second: Option<u16>) {
        let stack = &mut self.keyboard[usize::from(alternate_screen)];
        let current = stack.last().copied().unwrap_or(0);
        match mark {
            b'?' => self.answer(format_args!("\x1b[?{current}u")),
            b'>' => {
                if stack.len() == SAVED_KEYBOARD_FLAGS {
                    stack.remove(0);
                }
                stack.push(first.unwrap_or(0) & KEYBOARD_FLAGS);
            }
            b'<' => {
                let left = stack.len().saturating_sub(usize::from(first.unwrap_or(1).max(1)));
                stack.truncate(left);
            }
            b'=' => {
                let flags = first.unwrap_or(0) & KEYBOARD_FLAGS;
                let flags = match second.unwrap_or(1) {
                    2 => current | flags,
                    3 => current & !flags,
                    _ => flags,
                };
                stack.pop();
                stack.push(flags);
            }
            _ => {}
        }
    }
}

impl Callbacks for Answers {
    fn unhandled_csi(
        &mut self,
        screen: &mut Screen,
        mark: Option<u8>,
        second_mark: Option<u8>,
        params: &[&[u16]],
        end: char,
    ) {
        // For example `CSI ? 2026 $ p`, which asks for a mode: none of the queries below.
        if second_mark.is_some() {
            return;
        }
        let param = |index: usize| params.get(index).and_then(|values| values.first()).copied();
        let first = param(0).unwrap_or(0);
        match (mark, end, first) {
            // A VT220 (62) with colours (22).
            (None, 'c', 0) => self.answer(format_args!("\x1b[?62;22c")),
            // The answer itself has three parameters: a program that prints what it reads must not ask with it.
            (Some(b'>'), 'c', 0) if params.len() <= 1 => self.answer(format_args!("\x1b[>0;10;0c")),
            (Some(b'>'), 'q', 0) => {
                // A control character would end the answer early, and the rest would be typed as keys.
                let name: String = self.profile.name.chars().filter(|c| !c.is_control()).collect();
                self.answer(format_args!("\x1bP>|{name}\x1b\\"));
            }
            (None, 'n', 5) => self.answer(format_args!("\x1b[0n")),
            (None | Some(b'?'), 'n', 6) => {
                let (row, col) = cursor(screen);
                let mark = if mark.is_some() { "?" } else { "" };
                self.answer(format_args!("\x1b[{mark}{row};{col}R"));
            }
            // Sizes in characters only; there are no pixels here.
            (None, 't', 18 | 19) => {
                let (rows, cols) = screen.size();
                // The code of the answer is 8 for query 18, and 9 for 19.
                self.answer(format_args!("\x1b[{};{rows};{cols}t", first - 10));
            }
            (Some(mark @ (b'?' | b'>' | b'<' | b'=')), 'u', _) => {
                self.keyboard(screen.alternate_screen(), mark, param(0), param(1));
            }
            _ => {}
        }
    }

    fn unhandled_osc(&mut self, _: &mut Screen, params: &[&[u8]]) {
        let Some((code, values)) = params.split_first() else { return };
        let Some(code) = std::str::from_utf8(code).ok().and_then(|code| code.parse::<u16>().ok()) else { return };
        // `OSC 10 ; ? ; ?` asks for colour 10 and the following one.
        let colours = [(10, self.profile.foreground), (11, self.profile.background)];
        let asked = colours.into_iter().skip_while(|(first, _)| *first != code);
        for ((code, colour), _) in asked.zip(values).filter(|(_, value)| **value == b"?") {
            self.colour(code, colour);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use super::*;

    fn answers(output: &str) -> String {
        let profile = TerminalProfile { name: "name\x1b 1".into(), ..TerminalProfile::default() };
        let rows = NonZeroU16::new(24).expect("rows");
        let cols = NonZeroU16::new(80).expect("cols");
        let mut parser = vt100::Parser::new_with_callbacks(rows, cols, 0, Answers::new(Arc::new(profile)));
        parser.process(output.as_bytes());
        String::from_utf8(parser.callbacks_mut().take()).expect("answers are text")
    }

    #[test]
    fn each_query_has_its_answer() {
        for (query, answer) in [
            ("\x1b[>0;10;0c\x1b[?62;22c\x1b[0n\x1b[1;1R", ""),
            ("\x1b[c", "\x1b[?62;22c"),
            ("\x1b[0c", "\x1b[?62;22c"),
            ("\x1b[>c", "\x1b[>0;10;0c"),
            ("\x1b[>q", "\x1bP>|name 1\x1b\\"),
            ("\x1b[5n", "\x1b[0n"),
            ("ab\r\ncd\x1b[6n", "\x1b[2;3R"),
            ("\x1b[3;4H\x1b[?6n", "\x1b[?3;4R"),
            ("\x1b[6nabc\x1b[6n", "\x1b[1;1R\x1b[1;4R"),
            ("\x1b[1;80Hx\x1b[6n", "\x1b[1;80R"),
            ("\x1b[18t", "\x1b[8;24;80t"),
            ("\x1b[19t", "\x1b[9;24;80t"),
            ("\x1b]10;?\x07", "\x1b]10;rgb:e5e5/e5e5/e5e5\x1b\\"),
            ("\x1b]11;?\x1b\\", "\x1b]11;rgb:0000/0000/0000\x1b\\"),
            ("\x1b]10;?;?\x1b\\", "\x1b]10;rgb:e5e5/e5e5/e5e5\x1b\\\x1b]11;rgb:0000/0000/0000\x1b\\"),
            ("\x1b[?u", "\x1b[?0u"),
            ("\x1b[>7u\x1b[?u\x1b[<u\x1b[?u", "\x1b[?1u\x1b[?0u"),
            ("\x1b[=1;2u\x1b[?u\x1b[=1;3u\x1b[?u", "\x1b[?1u\x1b[?0u"),
            ("\x1b[>1u\x1b[?1049h\x1b[?u\x1b[?1049l\x1b[?u", "\x1b[?0u\x1b[?1u"),
            // Answers, unknown queries and settings get no answer.
            ("\x1b[?62;22c\x1b[0n\x1b[14t\x1b[=c\x1b]10;#fff\x07\x1b]12;?\x07\x1b[?2026$p\x1b[7n", ""),
        ] {
            assert_eq!(answers(query), answer, "{query:?}");
        }
    }

    #[test]
    fn a_flood_of_queries_has_a_bounded_answer() {
        assert!(answers(&"\x1b[6n".repeat(100_000)).len() < ANSWER_BYTES + 64);
        assert_eq!(answers(&format!("{}\x1b[?u", "\x1b[>1u".repeat(100_000))), "\x1b[?1u");
    }
}
