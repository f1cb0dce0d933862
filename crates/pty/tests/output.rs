//! Output of real programs: complete, in whole characters, paced.

mod support;

use tokio::time::Instant;

use support::STAGE;

/// Python: raw mode, so that the kernel changes nothing.
const RAW: &str = "import os, sys, time, tty\ntty.setraw(0)\n";

#[test]
fn large_output_is_complete_and_comes_before_the_end() {
    STAGE.run(async {
        let program = format!("{RAW}for n in range(200000):\n os.write(1, b'%07d:' % n + b'0123456789' * 10)\n");
        let mut session = STAGE.python(&program, &[]).await;
        let report = session.finish().await;
        assert_eq!(report.exit, relay_pty::Exit::Code(0));
        let expected: Vec<u8> =
            (0..200_000).flat_map(|n| format!("{n:07}:{}", "0123456789".repeat(10)).into_bytes()).collect();
        assert!(session.output == expected, "{} of {} bytes", session.output.len(), expected.len());
    });
}

#[test]
fn the_last_words_of_short_programs_are_never_lost() {
    STAGE.run(async {
        for round in 0..40 {
            let mut session =
                STAGE.sh(&format!("head -c 9000 /dev/zero | tr '\\0' x; printf end{round}; exit {round}")).await;
            let report = session.finish().await;
            assert_eq!(report.exit, relay_pty::Exit::Code(round));
            assert_eq!(session.output.len(), 9000 + format!("end{round}").len());
            assert!(session.text().ends_with(&format!("end{round}")));
        }
    });
}

#[test]
fn characters_that_are_written_in_pieces_are_never_split() {
    STAGE.run(async {
        let text = "é漢😀e\u{301}|".repeat(60);
        let program = format!("{RAW}for b in '{text}'.encode():\n os.write(1, bytes([b]))\n time.sleep(0.001)\n");
        let mut session = STAGE.python(&program, &[]).await;
        let mut joined = String::new();
        while session.exit.is_none() {
            let before = session.output.len();
            session.step().await;
            let chunk = std::str::from_utf8(&session.output[before..]).expect("whole characters");
            joined.push_str(chunk);
        }
        assert_eq!(joined, text);
        assert!(session.chunks > 3);
    });
}

#[test]
fn an_unfinished_character_at_the_end_is_delivered() {
    STAGE.run(async {
        let mut session = STAGE.python(&format!("{RAW}os.write(1, 'a漢'.encode()[:-1])\n"), &[]).await;
        session.finish().await;
        assert_eq!(session.text(), "a\u{fffd}");
    });
}

#[test]
fn many_small_writes_become_few_chunks() {
    STAGE.run(async {
        let program = format!("{RAW}for n in range(20000):\n os.write(1, b'x' * 20)\n");
        let started = Instant::now();
        let mut session = STAGE.python(&program, &[]).await;
        session.finish().await;
        let intervals = started.elapsed().as_millis() as usize / 16;
        let full = session.output.len() / (32 << 10);
        assert_eq!(session.output.len(), 400_000);
        assert!(session.chunks <= intervals + full + 2, "{} chunks in {intervals} intervals", session.chunks);
    });
}
