//! Programs that flood their output: memory is bounded, and other terminals are not affected. One test, since it
//! measures the memory of the whole process.

mod support;

use std::{sync::LazyLock, time::Duration};

use relay_pty::{Limits, SnapshotFormat, TerminalEvent};
use support::{Stage, eventually, request};

const CHUNK: usize = 32 << 10;
const BUDGET: usize = 1 << 20;
const MUCH: usize = 24 << 20;

static STAGE: LazyLock<Stage> =
    LazyLock::new(|| Stage::new(Limits { undelivered_output_bytes: BUDGET, ..Limits::default() }));

fn resident_bytes() -> u64 {
    let process = procfs::process::Process::myself().and_then(|process| process.stat()).expect("stat");
    process.rss * procfs::page_size()
}

#[test]
fn floods_are_bounded_and_affect_no_other_terminal() {
    STAGE.run(async {
        let mut calm = STAGE.sh("echo READY; exec cat").await;
        calm.wait_for("READY").await;

        // A consumer that takes nothing: its channel fills up, then its program waits.
        let (stuck, stuck_events) = STAGE.host.spawn(request("yes", &[])).await.expect("it starts");
        // Its chunks are full only where the program is fast enough, so it is full when nothing moves any more.
        let (mut bytes, mut unmoved) = (0, 0);
        let is_full = || {
            let now = STAGE.host.undelivered_output_bytes();
            unmoved = if now == bytes { unmoved + 1 } else { 0 };
            bytes = now;
            bytes > CHUNK && unmoved > 20
        };
        eventually("the channel fills up", is_full).await;
        calm.type_keys("first\r").await;
        calm.wait_for("first\r\nfirst").await;
        assert!(STAGE.host.undelivered_output_bytes() <= 19 * CHUNK);
        assert!(stuck.snapshot(SnapshotFormat::Plain).contents.starts_with("y\ny\n"));
        drop(stuck_events);
        eventually("its output is discarded", || STAGE.host.undelivered_output_bytes() == 0).await;

        // Consumers that hold everything: reading pauses, writing does not.
        let (flood, mut events) = STAGE.host.spawn(request("yes", &[])).await.expect("it starts");
        let mut held = Vec::new();
        while STAGE.host.undelivered_output_bytes() <= BUDGET {
            if let Some(TerminalEvent::Output(chunk)) = events.next().await {
                held.push(chunk);
            }
        }
        calm.type_keys("second\r").await;
        assert!(STAGE.host.undelivered_output_bytes() <= BUDGET + 8 * CHUNK);
        drop((held, events));
        calm.wait_for("second\r\nsecond").await;

        for terminal in [stuck, flood] {
            terminal.end(Duration::from_secs(2)).await.expect("ended");
        }

        // Escape strings that never end, one cell that gathers characters, sequences that other terminals stack up.
        for endless in [
            "printf '\\033]0;'; exec yes aaaaaaaa",
            "printf '\\033P'; exec yes aaaaaaaa",
            "exec yes '\u{301}\u{301}'",
            "exec yes \"$(printf '\\033]8;;u\\033[22;0t\\033[>1u')\"",
        ] {
            let before = resident_bytes();
            let (terminal, mut events) = STAGE.host.spawn(request("sh", &["-c", endless])).await.expect("it starts");
            let mut bytes = 0;
            while bytes < MUCH {
                if let Some(TerminalEvent::Output(chunk)) = events.next().await {
                    bytes += chunk.bytes().len();
                }
            }
            let grown = resident_bytes().saturating_sub(before);
            assert!(grown < MUCH as u64 / 2, "{} MiB of {}: {endless:?}", grown >> 20, MUCH >> 20);
            terminal.end(Duration::from_secs(2)).await.expect("ended");
        }
    });
}
