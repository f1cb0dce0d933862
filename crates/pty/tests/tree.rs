//! Process trees of real programs: their end, their resources, their orphans.

mod support;

use std::{os::unix::process::CommandExt, process::Command, time::Duration};

use relay_pty::{Exit, Leftover, ProcessIdentity};
use tokio::time::Instant;

use support::{MARKER_VARIABLE, STAGE, eventually, is_alive, numbers, request};

/// Ignores every signal it can, like its child, its child in a session of its own, an orphan in a session of its own,
/// and one with an empty environment.
const STUBBORN: &str = r#"
import os, signal, subprocess, sys
for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(name, signal.SIG_IGN)
wait = [sys.executable, "-c", "import signal\nwhile True: signal.pause()"]
child = subprocess.Popen(wait)
own_session = subprocess.Popen(wait, start_new_session=True)
cleared = subprocess.Popen(wait, start_new_session=True, env={})
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    orphan = subprocess.Popen(wait)
    os.write(writer, str(orphan.pid).encode())
    os._exit(0)
os.wait()
orphan = os.read(reader, 20).decode()
print("pids", os.getpid(), child.pid, own_session.pid, cleared.pid, orphan, flush=True)
while True:
    signal.pause()
"#;

#[test]
fn the_whole_tree_is_ended_though_it_ignores_signals() {
    STAGE.run(async {
        let mut session = STAGE.python(STUBBORN, &[]).await;
        session
            .wait_until("all have started", |session| session.text().contains("pids") && session.text().ends_with('\n'))
            .await;
        let pids = numbers(&session.text(), "pids");
        assert!(pids.len() == 5 && pids.iter().all(|pid| is_alive(*pid)));
        let started = Instant::now();
        let report = session.terminal.end(Duration::from_millis(300)).await.expect("ended");
        assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
        assert_eq!((report.exit, report.killed), (Some(Exit::Signal(9)), 5));
        assert!(report.survivors.is_empty());
        assert!(!pids.iter().any(|pid| is_alive(*pid)));
        assert_eq!(session.finish().await.exit, Exit::Signal(9));
    });
}

/// The program has ended long ago; what it left behind is still its tree.
#[test]
fn descendants_that_outlived_the_program_are_ended() {
    STAGE.run(async {
        let mut session = STAGE.sh("setsid sh -c 'echo pids $$; exec sleep 1000' & sleep 0.2; wait $!; exit").await;
        session.wait_for("pids").await;
        session.wait_until("the number", |session| session.text().ends_with('\n')).await;
        let [daemon] = numbers(&session.text(), "pids")[..] else { panic!("one") };
        let shell = session.terminal.identity().pid;
        let killed = rustix::process::Pid::from_raw(shell)
            .map(|shell| rustix::process::kill_process(shell, rustix::process::Signal::KILL));
        assert!(matches!(killed, Some(Ok(()))));
        assert_eq!(session.finish().await.exit, Exit::Signal(9));
        assert!(is_alive(daemon));
        let report = session.terminal.end(Duration::from_secs(5)).await.expect("ended");
        assert_eq!((report.killed, report.survivors.len()), (0, 0));
        assert!(!is_alive(daemon));
    });
}

#[test]
fn a_program_that_handles_signals_exits_in_the_grace_also_when_stopped() {
    STAGE.run(async {
        let mut session =
            STAGE.sh("trap 'echo bye; exit 4' TERM; echo READY; kill -STOP $$; while :; do sleep 0.01; done").await;
        session.wait_for("READY").await;
        let pid = session.terminal.identity().pid;
        let stopped = || {
            procfs::process::Process::new(pid).and_then(|process| process.stat()).is_ok_and(|stat| stat.state == 'T')
        };
        eventually("it stops", stopped).await;
        // The hang-up comes first and has no trap: use a program that ignores it for this.
        let report = session.terminal.end(Duration::from_secs(10)).await.expect("ended");
        assert_eq!((report.killed, report.survivors.len()), (0, 0));
        let exit = session.finish().await.exit;
        assert!(matches!(exit, Exit::Signal(1) | Exit::Code(4)), "{exit:?}");

        let mut session =
            STAGE.sh("trap '' HUP; trap 'echo bye; exit 4' TERM; echo READY; while :; do sleep 0.01; done").await;
        session.wait_for("READY").await;
        let report = session.terminal.end(Duration::from_secs(10)).await.expect("ended");
        assert_eq!((report.exit, report.killed), (Some(Exit::Code(4)), 0));
        assert_eq!(session.finish().await.exit, Exit::Code(4));
        assert!(session.text().contains("bye"));
    });
}

#[test]
fn usage_sums_the_tree() {
    STAGE.run(async {
        const USE: &str = r#"
import subprocess, threading, time
memory = b"x" * (64 << 20)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
threads = [threading.Thread(target=threading.Event().wait, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
started = time.process_time()
while time.process_time() - started < 0.2:
    pass
print("READY", flush=True)
input()
"#;
        let mut session = STAGE.python(USE, &[]).await;
        session.wait_for("READY").await;
        let usage = session.terminal.usage().await.expect("scanned");
        assert_eq!((usage.processes, usage.threads), (2, 5));
        assert!(usage.resident_bytes > 64 << 20 && usage.resident_bytes < 256 << 20, "{usage:?}");
        assert!(usage.cpu >= Duration::from_millis(200) && usage.cpu < Duration::from_secs(20), "{usage:?}");
        let all = STAGE.host.usage().await.expect("scanned");
        assert_eq!(all.get(&session.terminal.identity()).map(|usage| usage.processes), Some(2));
        session.terminal.end(Duration::from_secs(10)).await.expect("ended");
        assert_eq!(session.terminal.usage().await.expect("scanned").processes, 0);
    });
}

#[test]
fn orphans_that_ended_are_reaped() {
    STAGE.run(async {
        let mut session = STAGE.sh("(setsid sh -c 'echo pids $$; exit 0' &); read line").await;
        session
            .wait_until("the number", |session| session.text().contains("pids") && session.text().ends_with('\n'))
            .await;
        let [orphan] = numbers(&session.text(), "pids")[..] else { panic!("one") };
        eventually("it is reaped", || procfs::process::Process::new(orphan).is_err()).await;
        session.terminal.end(Duration::ZERO).await.expect("ended");
    });
}

#[test]
fn leftovers_of_an_earlier_process_are_ended() {
    STAGE.run(async {
        let marker = request("unused", &[]).marker;
        // As a predecessor would have left them: not started by the host, and marked.
        let start = |script: &str| {
            let mut command = Command::new("python3");
            command.args(["-c", script]).env(MARKER_VARIABLE, &marker).process_group(0);
            command.spawn().expect("it starts")
        };
        let ignore = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()";
        let (mut root, mut other) = (start(ignore), start(ignore));
        let pid = i32::try_from(root.id()).expect("a process id");
        let stat = procfs::process::Process::new(pid).and_then(|process| process.stat()).expect("it runs");
        let leftover = Leftover { root: ProcessIdentity { pid, start_ticks: stat.starttime }, marker: marker.clone() };
        let stranger =
            ProcessIdentity { pid: i32::try_from(std::process::id()).expect("a process id"), start_ticks: 1 };
        let ended = Leftover { root: stranger, marker: "no such marker".into() };
        let report = STAGE.host.end_leftovers(&[leftover, ended], Duration::from_millis(100)).await.expect("ended");
        assert_eq!(report.survivors, [0; 0]);
        for process in [&mut root, &mut other] {
            let status = process.wait().expect("it was ours");
            assert!(!status.success());
        }
    });
}
