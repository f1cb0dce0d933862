//! [`Cleaner`]: raw terminal output to visible text, for an agent's whole life.
//!
//! Escape sequences are parsed by `vte`. Three things that it does not do are added in front of it: decoding that
//! does not depend on how the output was split into reads (`utf8`), control functions in their 8-bit form, and
//! control strings (`control_string`) that give their text back to the screen if they never end.

mod control_string;
mod utf8;

use vte::{Params, Parser, Perform};

use control_string::{ControlStrings, Next};
use utf8::Utf8Decoder;

const CANCEL: u8 = 0x18;
const SUBSTITUTE: u8 = 0x1A;
const ESCAPE: char = '\x1B';

/// Removes control functions (ECMA-48) from the output of a terminal program, whatever the reads were.
///
/// - Invalid UTF-8 becomes U+FFFD; a character that is split between two reads is whole.
/// - Escape sequences vanish in both of their forms (`ESC [` and U+009B), control strings together with their text.
///   Any ESC begins a new sequence, also in the middle of another one.
/// - A cursor movement becomes one space, however far it goes.
/// - C0 controls such as line feeds stay: they separate lines for readers of the text, and matching ignores them.
///
/// Text that is erased later was shown: the stream counts, not the screen. The state is bounded: less than 1 KiB.
#[derive(Default)]
pub struct Cleaner {
    decoder: Utf8Decoder,
    strings: ControlStrings,
    parser: Parser,
}

impl Cleaner {
    /// Creates a cleaner for the output of one program, from its first byte on.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends the visible text of the next bytes to `text`: at most three bytes of text for one byte of output.
    pub fn clean(&mut self, bytes: &[u8], text: &mut String) {
        let mut screen = Screen { parser: &mut self.parser, text };
        let strings = &mut self.strings;
        self.decoder.decode(bytes, |part| clean_text(strings, &mut screen, part));
    }
}

impl std::fmt::Debug for Cleaner {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Cleaner").field("strings", &self.strings).finish_non_exhaustive()
    }
}

/// Translates the 8-bit form of control functions (U+0080 to U+009F) to ESC and a character: `vte` knows only those.
fn clean_text(strings: &mut ControlStrings, screen: &mut Screen<'_>, mut part: &str) {
    while let Some((position, c1)) = find_c1(part) {
        screen.feed(strings, &part[..position]);
        let mut sequence = [ESCAPE as u8, c1 - 0x40];
        // Cannot fail: both bytes are ASCII.
        if let Ok(sequence) = std::str::from_utf8_mut(&mut sequence) {
            screen.feed(strings, sequence);
        }
        part = &part[position + 2..];
    }
    screen.feed(strings, part);
}

/// Byte position of the first C1 control and its number, 0x80 to 0x9F. In UTF-8 it is 0xC2 and the number.
fn find_c1(text: &str) -> Option<(usize, u8)> {
    let bytes = text.as_bytes();
    memchr::memchr_iter(0xC2, bytes)
        .filter_map(|position| Some((position, *bytes.get(position + 1)?)))
        .find(|(_, number)| (0x80..=0x9F).contains(number))
}

/// The parser for escape sequences and the visible text behind it.
struct Screen<'a> {
    parser: &'a mut Parser,
    text: &'a mut String,
}

impl Screen<'_> {
    /// Parses `part`, except for the contents of control strings, which are skipped.
    fn feed(&mut self, strings: &mut ControlStrings, mut part: &str) {
        while !part.is_empty() {
            let (next, length) = strings.next(part);
            let mut output = VisibleText(self.text);
            match next {
                Next::Parse => self.parser.advance(&mut output, &part.as_bytes()[..length]),
                Next::Skip => {}
                // CAN ends the string for the parser as well, and shows nothing.
                Next::Abandon => self.parser.advance(&mut output, &[CANCEL]),
            }
            part = &part[length..];
        }
    }
}

struct VisibleText<'a>(&'a mut String);

impl Perform for VisibleText<'_> {
    fn print(&mut self, character: char) {
        self.0.push(character);
    }

    fn execute(&mut self, byte: u8) {
        // CAN and SUB end sequences and strings; they show nothing by themselves.
        if byte != CANCEL && byte != SUBSTITUTE {
            self.0.push(char::from(byte));
        }
    }

    fn csi_dispatch(&mut self, _params: &Params, intermediates: &[u8], _ignore: bool, final_byte: char) {
        // With intermediate bytes the same final byte is another function.
        if intermediates.is_empty() && moves_the_cursor(final_byte) {
            self.0.push(' ');
        }
    }
}

/// Final bytes of CUU, CUD, CUF, CUB, CNL, CPL, CHA, CUP, CHT, CBT, HPA, HPR, VPA, VPR, HVP, HPB and VPB.
fn moves_the_cursor(final_byte: char) -> bool {
    matches!(final_byte, 'A'..='I' | 'Z' | '`' | 'a' | 'd' | 'e' | 'f' | 'j' | 'k')
}

#[cfg(test)]
mod tests;
