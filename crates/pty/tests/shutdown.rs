//! The end of a host. In a file of its own, since a host does not start again.

mod support;

use std::time::Duration;

use relay_pty::{Exit, PtyError};
use tokio::time::Instant;

use support::{STAGE, is_alive, numbers, request};

/// Ignores signals, and leaves an orphan in a session of its own with an empty environment.
const STUBBORN: &str = r#"
import os, signal, sys
for name in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(name, signal.SIG_IGN)
reader, writer = os.pipe()
os.set_inheritable(writer, True)
wait = f"import os, signal\nos.write({writer}, str(os.getpid()).encode())\nwhile True: signal.pause()"
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, ["python3", "-c", wait], {})
    os._exit(0)
os.wait()
print("pids", os.getpid(), os.read(reader, 20).decode(), flush=True)
while True:
    signal.pause()
"#;

#[test]
fn shutdown_leaves_no_process_and_takes_no_more() {
    STAGE.run(async {
        let mut sessions = Vec::new();
        let mut pids = Vec::new();
        for _ in 0..10 {
            sessions.push(STAGE.python(STUBBORN, &[]).await);
        }
        for session in &mut sessions {
            session
                .wait_until("both have started", |session| {
                    session.text().contains("pids") && session.text().ends_with('\n')
                })
                .await;
            pids.extend(numbers(&session.text(), "pids"));
        }
        assert!(pids.len() == 20 && pids.iter().all(|pid| is_alive(*pid)));
        let started = Instant::now();
        let report = STAGE.host.shutdown(Duration::from_millis(500)).await.expect("ended");
        assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
        assert!(report.killed >= 20 && report.survivors.is_empty(), "{report:?}");
        assert!(!pids.iter().any(|pid| is_alive(*pid)));
        for session in &mut sessions {
            assert_eq!(session.finish().await.exit, Exit::Signal(9));
        }
        assert!(matches!(STAGE.host.spawn(request("true", &[])).await, Err(PtyError::ShuttingDown)));
    });
}
