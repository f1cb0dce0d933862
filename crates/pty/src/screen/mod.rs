//! The screen that follows a terminal's output: contents, modes, snapshots, and answers to queries.

mod answers;
mod snapshot;
mod string_guard;

use std::sync::Arc;

use vt100::Parser;

use crate::{LineMode, TerminalProfile, TerminalSize};
use answers::Answers;
pub use snapshot::{ScreenSnapshot, SnapshotFormat};
use string_guard::StringGuard;

/// Modes that decide how text has to be typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InputModes {
    /// Treatment of input by the kernel.
    pub line: LineMode,
    /// The program wants pasted text between marks (mode 2004).
    pub bracketed_paste: bool,
    /// The program shows its alternate screen.
    pub alternate_screen: bool,
}

/// Emulated screen of one terminal, without scrollback: 32 bytes a cell, and as much again once the program has used
/// its alternate screen.
pub(crate) struct Screen {
    parser: Parser<Answers>,
    guard: StringGuard,
    /// Bytes of output that the screen shows.
    offset: u64,
}

impl Screen {
    pub(crate) fn new(size: TerminalSize, profile: Arc<TerminalProfile>) -> Self {
        let parser = Parser::new_with_callbacks(size.rows(), size.cols(), 0, Answers::new(profile));
        Self { parser, guard: StringGuard::default(), offset: 0 }
    }

    /// Takes output and returns the answers to the queries in it, joined.
    pub(crate) fn process(&mut self, output: &[u8]) -> Vec<u8> {
        let parser = &mut self.parser;
        self.guard.pass(output, |passed| parser.process(passed));
        self.offset += output.len() as u64;
        self.parser.callbacks_mut().take()
    }

    pub(crate) fn resize(&mut self, size: TerminalSize) {
        self.parser.set_size(size.rows(), size.cols());
    }

    pub(crate) fn bracketed_paste(&self) -> bool {
        self.parser.screen().bracketed_paste()
    }

    pub(crate) fn alternate_screen(&self) -> bool {
        self.parser.screen().alternate_screen()
    }

    pub(crate) fn snapshot(&self, format: SnapshotFormat) -> ScreenSnapshot {
        snapshot::take(self.parser.screen(), format, self.offset)
    }

    /// Text of the cursor's row up to the cursor, with its blanks.
    pub(crate) fn text_before_cursor(&self) -> String {
        let screen = self.parser.screen();
        let (row, col) = screen.cursor_position();
        let cells = (0..col).filter_map(|col| screen.cell(row, col)).filter(|cell| !cell.is_wide_continuation());
        cells.map(|cell| if cell.has_contents() { cell.contents() } else { " " }).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn screen(rows: u16, cols: u16) -> Screen {
        let size = TerminalSize::new(rows, cols).expect("valid size");
        Screen::new(size, Arc::new(TerminalProfile::default()))
    }

    #[test]
    fn the_text_before_the_cursor_keeps_its_blanks() {
        let mut screen = screen(5, 40);
        screen.process("one\r\n漢\x1b[2C$ ".as_bytes());
        assert_eq!(screen.text_before_cursor(), "漢  $ ");
    }

    /// Pieces of output that programs send, with parameters at and beyond their bounds.
    fn hostile() -> impl Strategy<Value = Vec<u8>> {
        let number = prop_oneof![Just(0_u32), 1_u32..5, Just(65_535), Just(4_000_000_000)];
        let sequence = (prop::collection::vec(number, 0..4), "[?>=!$ ]?", "[@-~]").prop_map(|(numbers, mark, end)| {
            let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
            format!("\x1b[{mark}{}{end}", numbers.join(";")).into_bytes()
        });
        prop_oneof![
            4 => sequence,
            1 => prop::collection::vec(any::<u8>(), 0..40),
            2 => "[a漢é\u{301}\u{200d}😀\t\r\n\u{8}]{0,30}".prop_map(String::into_bytes),
            1 => "\u{1b}[78=>McDEHZ]|\u{1b}\\][0-9;?]{0,6}\u{7}|\u{1b}\\[\\?(47|1049|6|2004)[hl]".prop_map(String::into_bytes),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn no_output_and_no_size_breaks_the_screen(
            pieces in prop::collection::vec((hostile(), prop::option::weighted(0.2, (1_u16..6, 1_u16..6))), 1..30)
        ) {
            let mut screen = screen(3, 4);
            for (output, size) in pieces {
                screen.process(&output);
                if let Some((rows, cols)) = size {
                    screen.resize(TerminalSize::new(rows, cols).expect("valid size"));
                }
                screen.text_before_cursor();
                let plain = screen.snapshot(SnapshotFormat::Plain);
                prop_assert!((1..=plain.rows).contains(&plain.cursor.0) && (1..=plain.cols).contains(&plain.cursor.1));
                screen.snapshot(SnapshotFormat::Ansi);
            }
        }
    }
}
