//! Snapshots of a screen: as text, and as bytes that repaint it.

use std::fmt::Write as _;

use vt100::Screen;

/// Form of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotFormat {
    /// Text without attributes: each row without its trailing blanks and with a line feed.
    Plain,
    /// Bytes that repaint the screen on an empty terminal of the same size, with colours, cursor and modes.
    Ansi,
}

/// Contents of a screen at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScreenSnapshot {
    /// Rows of the screen.
    pub rows: u16,
    /// Columns of the screen.
    pub cols: u16,
    /// Row and column of the cursor, from 1.
    pub cursor: (u16, u16),
    /// The contents in the requested format.
    pub contents: String,
    /// Bytes of output that the snapshot includes. A chunk whose offset is smaller is part of it already.
    pub output_offset: u64,
}

pub(super) fn take(screen: &Screen, format: SnapshotFormat, output_offset: u64) -> ScreenSnapshot {
    let (rows, cols) = screen.size();
    let cursor = cursor(screen);
    let contents = match format {
        SnapshotFormat::Plain => plain(screen),
        SnapshotFormat::Ansi => ansi(screen, cursor),
    };
    ScreenSnapshot { rows: rows.get(), cols: cols.get(), cursor, contents, output_offset }
}

/// Cursor from 1. Behind the last column, where the next character wraps, it is reported on that column.
pub(super) fn cursor(screen: &Screen) -> (u16, u16) {
    let (rows, cols) = screen.size();
    let (row, col) = screen.cursor_position();
    ((row + 1).min(rows.get()), (col + 1).min(cols.get()))
}

fn plain(screen: &Screen) -> String {
    let cols = screen.size().1.get();
    let mut contents = String::new();
    for row in screen.rows(0, cols) {
        contents.push_str(row.trim_end());
        contents.push('\n');
    }
    contents
}

fn ansi(screen: &Screen, (row, col): (u16, u16)) -> String {
    // Before the rows: switching to the alternate screen moves the cursor and clears.
    let buffer = if screen.alternate_screen() { "\x1b[?1049h" } else { "\x1b[?1049l" };
    let mut contents = format!("\x1b[m{buffer}\x1b[H\x1b[2J");
    // A width beyond the last column keeps the rows independent: otherwise a wrapped row relies on the one above.
    let width = screen.size().1.get() + 1;
    for (index, painted) in screen.rows_formatted(0, width).enumerate().filter(|(_, painted)| !painted.is_empty()) {
        // Writing to a String cannot fail.
        let _ = write!(contents, "\x1b[m\x1b[{};1H{painted}", index + 1);
    }
    contents.push_str("\x1b[m");
    contents.push_str(&screen.attributes_formatted());
    let _ = write!(contents, "\x1b[{row};{col}H");
    contents.push_str(&screen.input_mode_formatted());
    contents.push_str(if screen.hide_cursor() { "\x1b[?25l" } else { "\x1b[?25h" });
    contents
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use vt100::Parser;

    use super::*;

    fn parser(rows: u16, cols: u16) -> Parser {
        Parser::new(NonZeroU16::new(rows).expect("rows"), NonZeroU16::new(cols).expect("cols"), 0)
    }

    #[test]
    fn every_row_ends_with_a_line_feed_and_without_blanks() {
        let mut parser = parser(24, 80);
        parser.process(b"one  \r\n\r\n  three");
        let snapshot = take(parser.screen(), SnapshotFormat::Plain, 0);
        assert_eq!(snapshot.contents.split('\n').count(), 25);
        assert!(snapshot.contents.starts_with("one\n\n  three\n\n"));
        assert_eq!((snapshot.rows, snapshot.cols, snapshot.cursor), (24, 80, (3, 8)));
    }

    #[test]
    fn a_repainted_screen_is_the_same_with_its_modes() {
        let outputs = [
            "plain \x1b[1;31mred\x1b[0m\r\n\x1b[4;2;3;7;38;5;200mall\x1b[48;2;1;2;3m of it",
            "wide 漢字 and e\u{301} combined\r\n漢",
            "\x1b[?1049h\x1b[?1h\x1b=\x1b[?1002h\x1b[?1006h\x1b[?2004h\x1b[?25l\x1b[10;20Hthere",
            "a line that is longer than the screen is wide, so that it wraps\r\n\x1b[44m\x1b[K\x1b[5;5H\x1b[1K",
            "\x1b[41m\x1b[2J\x1b[3;40Hx",
        ];
        for output in outputs {
            let mut original = parser(12, 40);
            original.process(output.as_bytes());
            let snapshot = take(original.screen(), SnapshotFormat::Ansi, 0);
            assert!(snapshot.contents.starts_with("\x1b["), "{output:?}");
            let mut repainted = parser(12, 40);
            repainted.process(b"\x1b[7mold contents\r\nsecond row\x1b[20;20H");
            repainted.process(snapshot.contents.as_bytes());
            assert_eq!(rows(&repainted), rows(&original), "{output:?}");
            let modes = |parser: &Parser| {
                let screen = parser.screen();
                (screen.alternate_screen(), screen.hide_cursor(), screen.input_mode_formatted(), cursor(screen))
            };
            assert_eq!(modes(&repainted), modes(&original), "{output:?}");
        }
    }

    /// Every cell with its attributes.
    fn rows(parser: &Parser) -> Vec<vt100::Cell> {
        let screen = parser.screen();
        let (rows, cols) = screen.size();
        let places = (0..rows.get()).flat_map(|row| (0..cols.get()).map(move |col| (row, col)));
        places.filter_map(|(row, col)| screen.cell(row, col).cloned()).collect()
    }
}
