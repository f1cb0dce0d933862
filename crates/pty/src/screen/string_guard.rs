//! Bound on escape strings, in front of the parser.
//!
//! The parser gathers an operating system command (`ESC ]` … `BEL` or `ESC \`) until it ends. Whether it bounds that
//! depends on a feature that any crate of the program can switch on, so the bound is here. Other strings it discards.

/// Bytes of one command that the parser receives. Titles and colours need a fraction of it.
const COMMAND_BYTES: usize = 4 << 10;

const BELL: u8 = 0x07;
const CANCEL: u8 = 0x18;
const SUBSTITUTE: u8 = 0x1a;
const ESCAPE: u8 = 0x1b;
const DELETE: u8 = 0x7f;

/// Position within escape sequences, carried over between reads.
#[derive(Debug, Default)]
pub(super) struct StringGuard(State);

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    #[default]
    Elsewhere,
    /// Behind an escape character.
    Escape,
    /// Inside a command, with its length so far.
    Command(usize),
}

impl StringGuard {
    /// Passes `output` on without the part of commands beyond the bound.
    pub(super) fn pass(&mut self, mut output: &[u8], mut sink: impl FnMut(&[u8])) {
        while let Some(first) = output.first() {
            let (length, next) = match self.0 {
                State::Elsewhere => match output.iter().position(|byte| *byte == ESCAPE) {
                    Some(place) => (place + 1, State::Escape),
                    None => (output.len(), State::Elsewhere),
                },
                State::Escape => match *first {
                    b']' => (1, State::Command(0)),
                    CANCEL | SUBSTITUTE => (1, State::Elsewhere),
                    // Control characters take effect in the middle of a sequence.
                    0x00..0x20 | DELETE => (1, State::Escape),
                    _ => (1, State::Elsewhere),
                },
                State::Command(taken) => {
                    let ends = |byte: &u8| matches!(*byte, BELL | CANCEL | SUBSTITUTE | ESCAPE);
                    let end = output.iter().position(ends).unwrap_or(output.len());
                    let kept = end.min(COMMAND_BYTES - taken);
                    sink(&output[..kept]);
                    output = &output[end..];
                    self.0 = match output.first() {
                        None => State::Command(taken + kept),
                        // Left in place: it begins the terminator or another sequence, which the next round looks at.
                        Some(&ESCAPE) => State::Elsewhere,
                        Some(_) => {
                            sink(&output[..1]);
                            output = &output[1..];
                            State::Elsewhere
                        }
                    };
                    continue;
                }
            };
            sink(&output[..length]);
            output = &output[length..];
            self.0 = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn passed(pieces: &[Vec<u8>]) -> Vec<u8> {
        let mut guard = StringGuard::default();
        let mut passed = Vec::new();
        for piece in pieces {
            guard.pass(piece, |bytes| passed.extend_from_slice(bytes));
        }
        passed
    }

    #[test]
    fn a_long_command_is_cut_and_the_output_behind_it_is_kept() {
        for end in ["\x07", "\x1b\\", "\x18"] {
            let output = format!("before\x1b]0;{}{end}after\x1b[6n", "t".repeat(100_000));
            let expected = format!("before\x1b]0;{}{end}after\x1b[6n", "t".repeat(COMMAND_BYTES - 2));
            let pieces: Vec<Vec<u8>> = output.as_bytes().chunks(777).map(<[u8]>::to_vec).collect();
            assert_eq!(passed(&pieces), expected.as_bytes());
        }
        let endless: Vec<Vec<u8>> = vec![b"\x1b\n]no end\r\n".repeat(1000); 100];
        assert!(passed(&endless).len() == endless.concat().len(), "each ends at the next escape character");
        let endless: Vec<Vec<u8>> = [vec![b"\x1b\n]".to_vec()], vec![b"no end\r\n".repeat(1000); 100]].concat();
        assert_eq!(passed(&endless).len(), 3 + COMMAND_BYTES);
    }

    proptest! {
        #[test]
        fn output_without_long_commands_is_unchanged(
            pieces in prop::collection::vec("[\x07\x18\x1b\\]a;\n\\\\é]{0,12}".prop_map(String::into_bytes), 0..20)
        ) {
            prop_assert_eq!(passed(&pieces), pieces.concat());
        }
    }
}
