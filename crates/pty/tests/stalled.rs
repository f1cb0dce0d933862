//! Programs that do not read their input: bounded, reported, and without effect on other terminals.

mod support;

use std::{
    pin::pin,
    sync::LazyLock,
    task::{Context, Waker},
    time::Duration,
};

use relay_pty::{Injection, Limits, PtyError};
use support::Stage;

static STAGE: LazyLock<Stage> = LazyLock::new(|| {
    Stage::new(Limits { write_stall: Duration::from_millis(300), injections: 3, ..Limits::default() })
});

/// Raw mode, so that the kernel does not drop what does not fit. Reads only after the file was made.
const DEAF: &str = r#"
import os, sys, tty
tty.setraw(0)
os.mkfifo(sys.argv[1])
os.write(1, b"READY")
open(sys.argv[1]).read()
total = 0
while total < int(sys.argv[2]):
    total += len(os.read(0, 65536))
os.write(1, b"ALL")
"#;

fn is_pending(future: std::pin::Pin<&mut impl Future>) -> bool {
    future.poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

#[test]
fn a_program_that_does_not_read_is_reported_bounded_and_served_when_it_reads() {
    STAGE.run(async {
        let folder = tempfile::tempdir().expect("a folder");
        let gate = folder.path().join("gate");
        let large = "x".repeat(1 << 20);
        let mut deaf = STAGE.python(DEAF, &[gate.to_str().expect("text"), &(large.len() + 11).to_string()]).await;
        deaf.wait_for("READY").await;
        let mut first = deaf.terminal.write_input(large).await.expect("room");
        let mut injection = deaf.terminal.inject(Injection::new("in turn")).expect("room");
        let terminal = deaf.terminal.clone();
        let mut second = pin!(terminal.write_input("abc"));
        assert!(is_pending(second.as_mut()), "the queue is full");

        // Another terminal works as ever, and so does the rest of this one.
        let mut other = STAGE.sh("echo READY; read line; echo \"got $line\"").await;
        other.wait_for("READY").await;
        other.type_keys("hello\r").await;
        other.wait_for("got hello").await;
        deaf.wait_until("a stall", |session| session.stalled > 0).await;
        let status = deaf.terminal.input_status();
        assert_eq!((status.input_bytes, status.injection_count), (1 << 20, 1));
        assert!(status.stalled_since.is_some());
        assert_eq!(deaf.stalled, 1);

        std::fs::write(&gate, "").expect("the program waits for it");
        first.written().await.expect("written");
        second.await.expect("room now").written().await.expect("written");
        injection.written().await.expect("written");
        deaf.wait_for("ALL").await;
        let status = deaf.terminal.input_status();
        assert_eq!((status.input_bytes, status.injection_count, status.stalled_since), (0, 0, None));
    });
}

#[test]
fn unbegun_entries_can_be_withdrawn_and_the_end_fails_the_rest() {
    STAGE.run(async {
        let folder = tempfile::tempdir().expect("a folder");
        let gate = folder.path().join("gate");
        let mut deaf = STAGE.python(DEAF, &[gate.to_str().expect("text"), "1"]).await;
        deaf.wait_for("READY").await;
        let first = deaf.terminal.write_input("x".repeat(500_000)).await.expect("room");
        let second = deaf.terminal.write_input("y").await.expect("room");
        let mut injections: Vec<_> = (0..3).map(|_| deaf.terminal.inject(Injection::new("z")).expect("room")).collect();
        assert!(matches!(deaf.terminal.inject(Injection::new("z")), Err(PtyError::InjectionQueueFull)));
        deaf.wait_until("a stall", |session| session.stalled > 0).await;
        assert!(second.withdraw());
        assert!(deaf.terminal.withdraw(injections[1].id()));
        assert!(matches!(injections[1].written().await, Err(PtyError::Ended)));
        assert!(!deaf.terminal.withdraw(first.id()) && !first.withdraw(), "it has begun");
        let report = deaf.terminal.end(Duration::from_secs(10)).await.expect("ended");
        assert_eq!(report.killed, 0);
        for injection in [0, 2] {
            assert!(matches!(injections[injection].written().await, Err(PtyError::Ended)));
        }
    });
}

/// A program that asks and never reads the answers.
#[test]
fn unread_answers_are_bounded() {
    STAGE.run(async {
        const ASK: &str = r#"
import os, tty
tty.setraw(0)
for _ in range(400):
    os.write(1, b"\x1b[6n" * 1000)
os.write(1, b"ASKED")
os.read(0, 1)
os.write(1, b"READ")
"#;
        let mut session = STAGE.python(ASK, &[]).await;
        session.wait_for("READ").await;
        assert!(session.terminal.input_status().dropped_answers > 0);
    });
}
