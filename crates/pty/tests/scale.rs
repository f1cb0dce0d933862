//! Many terminals at once: no thread for each of them, and little memory.

mod support;

use std::time::Duration;

use support::{STAGE, Session, eventually};

const TERMINALS: usize = 50;
/// The goal for an idle terminal, its screen included.
const IDLE_BYTES: u64 = 256 << 10;

fn own_stat() -> procfs::process::Stat {
    procfs::process::Process::myself().and_then(|process| process.stat()).expect("stat")
}

async fn echo(session: &mut Session, text: &str) {
    session.type_keys(&format!("{text}\r")).await;
    session.wait_for(&format!("{text}\r\n{text}")).await;
}

#[test]
fn fifty_terminals_need_no_more_threads_than_one() {
    STAGE.run(async {
        let mut first = STAGE.sh("echo READY; exec cat").await;
        first.wait_for("READY").await;
        echo(&mut first, "one").await;
        STAGE.host.usage().await.expect("scanned");
        let before = own_stat();

        let mut sessions = Vec::new();
        for _ in 0..TERMINALS {
            sessions.push(STAGE.sh("echo READY; exec cat").await);
        }
        for session in &mut sessions {
            session.wait_for("READY").await;
            echo(session, "two").await;
        }
        let usage = STAGE.host.usage().await.expect("scanned");
        assert_eq!(usage.len(), TERMINALS + 1);
        assert!(usage.values().all(|usage| usage.processes == 1));
        let after = own_stat();
        assert_eq!(after.num_threads, before.num_threads);
        let grown = after.rss.saturating_sub(before.rss) * procfs::page_size() / TERMINALS as u64;
        println!("{} KiB per idle terminal", grown >> 10);
        assert!(grown < IDLE_BYTES, "{grown} bytes each");

        let ends: Vec<_> = sessions
            .iter()
            .map(|session| {
                let terminal = session.terminal.clone();
                STAGE.runtime.spawn(async move { terminal.end(Duration::from_secs(10)).await })
            })
            .collect();
        for end in ends {
            let report = end.await.expect("no panic").expect("ended");
            assert_eq!((report.killed, report.survivors.len()), (0, 0));
        }
        for session in &mut sessions {
            session.finish().await;
        }
        let descriptors = || std::fs::read_dir("/proc/self/fd").expect("descriptors").count();
        eventually("all descriptors are closed", || descriptors() < 40).await;
        echo(&mut first, "three").await;
    });
}
