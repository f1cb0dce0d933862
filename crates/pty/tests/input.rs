//! Input of real programs: order, whole entries, pastes, long lines.

mod support;

use std::time::Duration;

use relay_pty::{Injection, PtyError};
use support::{RECORD, STAGE};

#[test]
fn entries_of_many_callers_never_interleave_and_keep_their_order() {
    STAGE.run(async {
        const CALLERS: usize = 8;
        const ENTRIES: usize = 40;
        const LENGTH: usize = 1_500;
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("input");
        let total = CALLERS * ENTRIES * LENGTH;
        let arguments = [&total.to_string(), file.to_str().expect("text"), ""];
        let mut session = STAGE.python(RECORD, &arguments).await;
        session.wait_for("READY").await;
        for caller in 0..CALLERS {
            let terminal = session.terminal.clone();
            STAGE.runtime.spawn(async move {
                for entry in 0..ENTRIES {
                    let text = format!("{caller}:{entry:03}:{:x<width$}", "", width = LENGTH - 7);
                    let mut ticket = if caller % 2 == 0 {
                        terminal.write_input(format!("{text}\r")).await.expect("room")
                    } else {
                        terminal.inject(Injection { enter_gap: Duration::ZERO, ..Injection::new(text) }).expect("room")
                    };
                    let receipt = ticket.written().await.expect("written");
                    assert_eq!(receipt.bytes, LENGTH);
                    assert!(receipt.began_at <= receipt.finished_at);
                }
            });
        }
        session.wait_for("RECORDED").await;
        let input = std::fs::read_to_string(&file).expect("recorded");
        let mut next = [0; CALLERS];
        for entry in input.split_terminator('\r') {
            assert_eq!(entry.len(), LENGTH - 1, "whole entries");
            let mut fields = entry.split(':').map(|field| field.parse::<usize>());
            let (Some(Ok(caller)), Some(Ok(number))) = (fields.next(), fields.next()) else { panic!("{entry}") };
            assert_eq!(number, next[caller], "order of one caller");
            next[caller] += 1;
        }
        assert_eq!(next, [ENTRIES; CALLERS]);
    });
}

#[test]
fn a_large_entry_arrives_complete_in_a_program_that_reads_little_at_a_time() {
    STAGE.run(async {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("input");
        let text: String = (0..300_000).map(|number| format!("{number}é ")).collect();
        let mut session = STAGE.python(RECORD, &[&text.len().to_string(), file.to_str().expect("text"), ""]).await;
        session.wait_for("READY").await;
        let mut ticket = session.terminal.write_input(text.clone()).await.expect("larger than the bound, but alone");
        assert_eq!(ticket.written().await.expect("written").bytes, text.len());
        session.wait_for("RECORDED").await;
        assert!(std::fs::read(&file).expect("recorded") == text.as_bytes());
    });
}

#[test]
fn an_injection_is_pasted_where_the_program_asks_for_it() {
    STAGE.run(async {
        let folder = tempfile::tempdir().expect("a folder");
        for (mode, expected) in [
            ("", "keys    one\ntwo\r"),
            ("\x1b[?2004h", "\x1b[200~keys\tone\ntwo\x1b[201~\r"),
            ("\x1b[?2004h\x1bc", "keys    one\ntwo\r"),
        ] {
            let file = folder.path().join("input");
            let arguments = [&expected.len().to_string(), file.to_str().expect("text"), mode];
            let mut session = STAGE.python(RECORD, &arguments).await;
            session.wait_for("READY").await;
            let modes = session.terminal.input_modes().expect("it runs");
            assert!(!modes.line.canonical && !modes.line.echo);
            session.terminal.inject(Injection::new("keys\tone\ntwo")).expect("room").written().await.expect("written");
            session.wait_for("RECORDED").await;
            assert_eq!(std::fs::read_to_string(&file).expect("recorded"), expected);
        }
    });
}

/// Answers to queries wait for the end of an injection; nothing gets between text and Enter.
#[test]
fn an_answer_does_not_split_an_injection() {
    STAGE.run(async {
        const ASK_AND_PRINT: &str = r#"
import os, tty
tty.setraw(0)
os.write(1, b"READY")
data = os.read(0, 100)
os.write(1, b"\x1b[5n")
while not data.endswith(b"n"):
    data += os.read(0, 100)
os.write(1, b"<" + data.hex().encode() + b">")
"#;
        let mut session = STAGE.python(ASK_AND_PRINT, &[]).await;
        session.wait_for("READY").await;
        let injection = Injection { enter_gap: Duration::from_millis(300), ..Injection::new("text") };
        let mut ticket = session.terminal.inject(injection).expect("room");
        session.wait_for(">").await;
        ticket.written().await.expect("written");
        let expected: String = b"text\r\x1b[0n".iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(session.text().contains(&format!("<{expected}>")), "{:?}", session.text());
    });
}

#[test]
fn output_from_before_an_injection_comes_before_its_announcement_and_its_echo_after() {
    STAGE.run(async {
        let mut session = STAGE.sh("stty -echo; echo before; read line; echo \"got $line\"").await;
        session.wait_for("before").await;
        let ticket = session.terminal.inject(Injection::new("hello")).expect("room");
        session.finish().await;
        let [(id, offset)] = session.began[..] else { panic!("one announcement: {:?}", session.began) };
        assert_eq!(id, ticket.id());
        let (before, after) = session.output.split_at(offset);
        assert_eq!((before, after), (&b"before\r\n"[..], &b"got hello\r\n"[..]));
    });
}

#[test]
fn long_lines_survive_canonical_mode() {
    STAGE.run(async {
        const LINES: &str = r#"
import sys
print("READY", flush=True)
with open(sys.argv[1], "w") as record:
    for line in sys.stdin:
        record.write(line)
print("RECORDED", flush=True)
"#;
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("input");
        let mut session = STAGE.python(LINES, &[file.to_str().expect("text")]).await;
        session.wait_for("READY").await;
        assert!(session.terminal.input_modes().expect("it runs").line.canonical);
        let text: String = (0..10_000).map(|number| format!("{number}é ")).collect();
        session.terminal.inject(Injection::new(text.clone())).expect("room");
        let _end_of_input = session.terminal.write_input("\x04").await.expect("room");
        session.wait_for("RECORDED").await;
        let recorded = std::fs::read_to_string(&file).expect("recorded");
        assert!(recorded.lines().all(|line| line.len() <= 4095));
        assert!(recorded.replace('\n', "") == text);
    });
}

#[test]
fn keys_reach_the_program_as_signals() {
    STAGE.run(async {
        let mut session = STAGE.sh("echo READY; exec cat").await;
        session.wait_for("READY").await;
        session.type_keys("\x03").await;
        assert_eq!(session.finish().await.exit, relay_pty::Exit::Signal(2));
        assert!(matches!(session.terminal.write_input("more").await, Err(PtyError::Ended)));
        assert!(matches!(session.terminal.inject(Injection::new("more")), Err(PtyError::Ended)));
        assert!(matches!(session.terminal.input_modes(), Err(PtyError::Ended)));
    });
}
