//! Start and end of real programs: what they receive, how their end is reported.

mod support;

use std::{collections::BTreeSet, path::PathBuf, time::Duration};

use relay_pty::{Exit, PtyError};
use support::{MARKER_VARIABLE, STAGE, eventually, is_alive, is_marked, numbers, request};

#[test]
fn codes_and_signals_are_reported_after_the_last_output() {
    STAGE.run(async {
        for (script, exit) in [
            ("printf last; exit 0", Exit::Code(0)),
            ("printf last; exit 7", Exit::Code(7)),
            ("printf last; exit 137", Exit::Code(137)),
            ("printf last; kill -9 $$", Exit::Signal(9)),
            ("printf last; kill -SEGV $$", Exit::Signal(11)),
        ] {
            let mut session = STAGE.sh(script).await;
            assert_eq!(session.finish().await.exit, exit, "{script}");
            assert_eq!(session.text(), "last", "{script}");
            assert_eq!(session.terminal.exited().await, exit, "{script}");
            assert!(!PathBuf::from(format!("/proc/{}", session.terminal.identity().pid)).exists(), "reaped");
        }
    });
}

#[test]
fn a_program_that_cannot_start_is_an_error_with_the_reason() {
    STAGE.run(async {
        let missing = STAGE.host.spawn(request("no-such-program", &[])).await;
        assert!(matches!(missing, Err(PtyError::Execute { ref source, .. }) if source.raw_os_error() == Some(2)));
        let not_executable = STAGE.host.spawn(request("/etc/passwd", &[])).await;
        assert!(
            matches!(not_executable, Err(PtyError::Execute { ref source, .. }) if source.raw_os_error() == Some(13))
        );
        let mut nowhere = request("true", &[]);
        nowhere.working_directory = Some("/no/such/folder".into());
        let text = STAGE.host.spawn(nowhere).await.expect_err("no folder").to_string();
        assert!(text.contains("/no/such/folder") && text.contains("No such file"), "{text}");
        let mut file = request("true", &[]);
        file.working_directory = Some("/etc/passwd".into());
        assert!(matches!(STAGE.host.spawn(file).await, Err(PtyError::WorkingDirectory { .. })));
    });
}

#[test]
fn a_program_gets_its_own_session_a_clean_environment_and_nothing_else() {
    STAGE.run(async {
        const LOOK: &str = r#"
import os, sys
print("session", os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), os.tcgetpgrp(0) == os.getpid())
print("arguments", sys.argv[1:])
print("folder", os.getcwd())
"#;
        let mut look = request("python3", &["-c", LOOK, "", "$HOME", "two words"]);
        look.working_directory = Some("/usr".into());
        let mut session = STAGE.start(look).await;
        session.finish().await;
        let text = session.text();
        assert!(text.contains("session True True True"), "{text}");
        assert!(text.contains("arguments ['', '$HOME', 'two words']"), "{text}");
        assert!(text.contains("folder /usr"), "{text}");

        let look = request("env", &[]);
        let expected: BTreeSet<String> = [
            format!("PATH={}", std::env::var("PATH").expect("PATH is set")),
            format!("{MARKER_VARIABLE}={}", look.marker.display()),
            "TERM=xterm-256color".into(),
        ]
        .into();
        let mut session = STAGE.start(look).await;
        session.finish().await;
        assert_eq!(session.text().lines().map(str::to_owned).collect::<BTreeSet<_>>(), expected);
    });
}

#[test]
fn a_program_inherits_no_descriptor_and_no_ignored_signal() {
    STAGE.run(async {
        // A descriptor that this process would hand to its children. Rust itself ignores SIGPIPE.
        let open = std::fs::File::open("/dev/null").expect("a file");
        rustix::io::fcntl_setfd(&open, rustix::io::FdFlags::empty()).expect("inheritable");
        let mut session = STAGE.start(request("cat", &["/proc/self/status"])).await;
        session.finish().await;
        let text = session.text();
        let mask = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).expect("the line");
            u64::from_str_radix(line.trim(), 16).expect("a mask")
        };
        // Signals 32 and 33 belong to the C library, which refuses to change them.
        assert_eq!((mask("SigIgn:") & !(0b11 << 31), mask("SigBlk:")), (0, 0), "{text}");
        let mut session = STAGE.start(request("find", &["/proc/self/fd", "-printf", "%f=%l\n"])).await;
        session.finish().await;
        let inherited: Vec<String> =
            session.text().lines().filter(|line| line.contains("=/dev/null")).map(str::to_owned).collect();
        assert_eq!(inherited, [""; 0], "{}", session.text());
    });
}

#[test]
fn a_descendant_that_keeps_the_terminal_open_does_not_hold_up_the_end() {
    STAGE.run(async {
        let mut session = STAGE.sh("trap '' HUP TERM; sleep 1000 & echo pids $!; exit 3").await;
        let exit = session.finish().await.exit;
        let [child] = numbers(&session.text(), "pids")[..] else { panic!("one child") };
        assert_eq!(exit, Exit::Code(3));
        assert!(is_alive(child), "it ignores the hang-up");
        let report = session.terminal.end(Duration::ZERO).await.expect("ended");
        assert!(report.killed >= 1 && report.survivors.is_empty() && report.exit == Some(Exit::Code(3)), "{report:?}");
        assert!(!is_alive(child));
    });
}

/// The terminal is closed for a while, which the kernel reports as ready all the time.
#[test]
fn a_program_may_close_its_terminal_and_open_it_again() {
    STAGE.run(async {
        const REOPEN: &str = r#"
import os, sys
os.mkfifo(sys.argv[1])
os.write(1, b"closing ")
for fd in (0, 1, 2):
    os.close(fd)
open(sys.argv[1]).read()
terminal = os.open("/dev/tty", os.O_RDWR)
os.write(terminal, b"again ")
while os.read(terminal, 100) != b"go\n":
    pass
os.write(terminal, b"bye")
os._exit(5)
"#;
        let folder = tempfile::tempdir().expect("a folder");
        let gate = folder.path().join("gate");
        let mut session = STAGE.python(REOPEN, &[gate.to_str().expect("text")]).await;
        session.wait_for("closing").await;
        eventually("it waits", || gate.exists()).await;
        std::fs::write(&gate, "").expect("the program waits for it");
        session.wait_for("again").await;
        session.type_keys("go\r").await;
        assert_eq!(session.finish().await.exit, Exit::Code(5));
        assert!(session.text().ends_with("bye"), "{}", session.text());
    });
}

#[test]
fn an_abandoned_start_leaves_no_program() {
    STAGE.run(async {
        let abandoned = request("cat", &[]);
        let marker = abandoned.marker.clone();
        let mut start = Box::pin(STAGE.host.spawn(abandoned));
        let context = &mut std::task::Context::from_waker(std::task::Waker::noop());
        assert!(start.as_mut().poll(context).is_pending());
        eventually("it starts", || is_marked(&marker)).await;
        drop(start);
        eventually("it is ended", || !is_marked(&marker)).await;
    });
}
