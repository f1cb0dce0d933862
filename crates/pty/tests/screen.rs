//! The screen of real programs: queries, sizes, snapshots.

mod support;

use relay_pty::{PtyError, SnapshotFormat, TerminalSize};
use support::STAGE;

#[test]
fn a_program_gets_its_queries_answered() {
    STAGE.run(async {
        const ASK: &str = r#"
import os, re, sys, tty
tty.setraw(0)
os.write(1, b"\x1b[2J\x1b[5;7H")
def ask(query, end):
    os.write(1, query)
    answer = b""
    while not re.search(end, answer):
        answer += os.read(0, 1)
    return answer.hex()
queries = [(b"\x1b[c", b"c"), (b"\x1b[>c", b"c"), (b"\x1b[5n", b"n"), (b"\x1b[6n", b"R"), (b"\x1b]11;?\x07", b"\x1b\\\\"),
           (b"\x1b[>q", b"\x1b\\\\"), (b"\x1b[?u", b"u"), (b"\x1b[18t", b"t")]
answers = [ask(*query) for query in queries]
os.write(1, b"<" + b" ".join(answer.encode() for answer in answers) + b">")
"#;
        let mut session = STAGE.python(ASK, &[]).await;
        let name = concat!("\x1bP>|relay-pty(", env!("CARGO_PKG_VERSION"), ")\x1b\\");
        let background = "\x1b]11;rgb:0000/0000/0000\x1b\\";
        let expected =
            ["\x1b[?62;22c", "\x1b[>0;10;0c", "\x1b[0n", "\x1b[5;7R", background, name, "\x1b[?0u", "\x1b[8;24;80t"];
        let hex = |text: &&str| text.bytes().map(|byte| format!("{byte:02x}")).collect::<String>();
        let expected: Vec<String> = expected.iter().map(hex).collect();
        session.wait_for(&format!("<{}>", expected.join(" "))).await;
    });
}

#[test]
fn a_resize_reaches_program_and_snapshot_together() {
    STAGE.run(async {
        const SHOW_SIZE: &str = r#"
import os, signal
def show(*_):
    size = os.get_terminal_size(0)
    os.write(1, b"size %d %d\n" % (size.lines, size.columns))
signal.signal(signal.SIGWINCH, show)
show()
os.read(0, 100)
"#;
        let mut session = STAGE.python(SHOW_SIZE, &[]).await;
        session.wait_for("size 24 80").await;
        session.terminal.resize(TerminalSize::new(40, 100).expect("valid")).expect("it runs");
        let snapshot = session.terminal.snapshot(SnapshotFormat::Plain);
        assert_eq!((snapshot.rows, snapshot.cols, snapshot.contents.lines().count()), (40, 100, 40));
        session.wait_for("size 40 100").await;
        for (rows, cols) in [(0, 80), (24, 0), (1001, 80), (24, 1001)] {
            assert!(matches!(TerminalSize::new(rows, cols), Err(PtyError::InvalidSize { .. })));
        }
        session.type_keys("\x04").await;
        session.finish().await;
        assert!(matches!(session.terminal.resize(TerminalSize::default()), Err(PtyError::Ended)));
    });
}

#[test]
fn a_snapshot_shows_prompt_cursor_and_how_much_output_it_includes() {
    STAGE.run(async {
        let mut session = STAGE.sh("printf '\\033[1;32mgreen\\033[m\\nname $ '; read line").await;
        session.wait_for("$ ").await;
        let plain = session.terminal.snapshot(SnapshotFormat::Plain);
        assert!(plain.contents.starts_with("green\nname $\n\n"));
        assert_eq!((plain.cursor, plain.output_offset), ((2, 8), session.output.len() as u64));
        assert_eq!(session.terminal.text_before_cursor(), "name $ ");
        let ansi = session.terminal.snapshot(SnapshotFormat::Ansi).contents;
        assert!(ansi.starts_with("\x1b[") && ansi.contains("\x1b[1;1H\x1b[32;1mgreen"), "{ansi:?}");
        session.type_keys("\r").await;
        session.finish().await;
        assert!(session.terminal.snapshot(SnapshotFormat::Plain).contents.starts_with("green\n"));
    });
}
