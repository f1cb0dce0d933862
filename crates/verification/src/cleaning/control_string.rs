//! [`ControlStrings`]: where OSC, DCS, SOS, PM and APC strings begin and end.

/// A control string that has not ended after this many characters is abandoned, and what follows is text again.
/// Titles and hyperlinks stay far below; longer strings (pictures) carry no text that could be an echo. The bound
/// keeps one unfinished sequence from blinding the verification for the rest of an agent's life. Our choice.
const MAX_STRING: usize = 4096;

const BELL: char = '\x07';
const CANCEL: char = '\x18';
const SUBSTITUTE: char = '\x1A';
const ESCAPE: char = '\x1B';

/// The reaction to a piece of decoded output.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Text and escape sequences, for the parser.
    Parse,
    /// The inside of a control string.
    Skip,
    /// A control string that is too long: the parser must be brought back to text.
    Abandon,
}

/// Follows the output as far as necessary to know whether it is inside a control string. Input contains no C1
/// controls: they have been translated to their two-character form.
#[derive(Debug, Default)]
pub(super) struct ControlStrings {
    state: State,
}

#[derive(Debug, Default, Clone, Copy)]
enum State {
    #[default]
    Text,
    AfterEscape,
    Inside {
        kind: Kind,
        length: usize,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Operating system command: ends with BEL as well.
    Osc,
    /// DCS, SOS, PM or APC.
    Other,
}

impl ControlStrings {
    /// Takes the beginning of `part`, which is not empty: the reaction to it, and its length in bytes.
    pub(super) fn next(&mut self, part: &str) -> (Next, usize) {
        match self.state {
            State::Text => match memchr::memchr(ESCAPE as u8, part.as_bytes()) {
                Some(position) => {
                    self.state = State::AfterEscape;
                    (Next::Parse, position + 1)
                }
                None => (Next::Parse, part.len()),
            },
            State::AfterEscape => {
                let Some(character) = part.chars().next() else { return (Next::Skip, 0) };
                self.state = after_escape(character);
                (Next::Parse, character.len_utf8())
            }
            State::Inside { kind, length } => self.inside(part, kind, length),
        }
    }

    fn inside(&mut self, part: &str, kind: Kind, length: usize) -> (Next, usize) {
        let content: usize = part
            .chars()
            .take(MAX_STRING - length)
            .take_while(|character| !kind.is_ended_by(*character))
            .map(char::len_utf8)
            .sum();
        if content > 0 {
            let characters = part[..content].chars().count();
            self.state = State::Inside { kind, length: length + characters };
            return (Next::Skip, content);
        }
        match part.chars().next() {
            // It begins the terminator or another sequence; either way the string has ended.
            Some(ESCAPE) => self.state = State::AfterEscape,
            Some(character) if kind.is_ended_by(character) => self.state = State::Text,
            Some(_) | None => {
                self.state = State::Text;
                return (Next::Abandon, 0);
            }
        }
        // All characters that end a string are one byte long.
        (Next::Parse, 1)
    }
}

impl Kind {
    fn is_ended_by(self, character: char) -> bool {
        matches!(character, CANCEL | SUBSTITUTE | ESCAPE) || (character == BELL && self == Self::Osc)
    }
}

/// The state after ESC and `character`. As in the parser, other controls within an escape sequence do not end it.
fn after_escape(character: char) -> State {
    match character {
        ']' => State::Inside { kind: Kind::Osc, length: 0 },
        'P' | 'X' | '^' | '_' => State::Inside { kind: Kind::Other, length: 0 },
        CANCEL | SUBSTITUTE => State::Text,
        '\0'..='\x1F' | '\x7F'.. => State::AfterEscape,
        ' '..='~' => State::Text,
    }
}
