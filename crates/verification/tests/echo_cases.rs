//! Echoes as agent programs show them, and texts that look like echoes. Each is judged in one read, byte by byte and
//! in reads of three bytes.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic, as tests do")]

use relay_verification::Timestamp;
use relay_verification::cleaning::Cleaner;
use relay_verification::echo::{EchoMonitor, ExpectedEcho, MAX_WATCHES, MatchDetail};

const BODY: &str = "please review the pull request now, and say what is missing";
const LINE: &str = "Relay message from Alice [evt_42]: please review the pull request now, and say what is missing";

fn at(millis: i64) -> Timestamp {
    Timestamp::from_millis(millis)
}

fn expected() -> ExpectedEcho {
    ExpectedEcho::new("Alice", "evt_42", BODY, LINE)
}

/// The verdict on output after the injection, which is over when the output ends.
fn judge(expected: &ExpectedEcho, reads: &[&[u8]]) -> Option<MatchDetail> {
    let mut cleaner = Cleaner::new();
    let mut monitor = EchoMonitor::new();
    let watch = monitor.begin(expected, at(0), at(15_000)).unwrap();
    let mut matches = Vec::new();
    for read in reads {
        let mut text = String::new();
        cleaner.clean(read, &mut text);
        matches.extend(monitor.on_text(&text, at(100)));
    }
    matches.extend(monitor.end(watch));
    assert!(matches.len() <= 1);
    assert_eq!(monitor.watch_count(), 0);
    matches.pop().map(|found| found.detail)
}

/// The verdict, which must not depend on the reads.
fn verdict(expected: &ExpectedEcho, output: &[u8]) -> Option<MatchDetail> {
    let whole = judge(expected, &[output]);
    for size in [1, 3] {
        let reads: Vec<&[u8]> = output.chunks(size).collect();
        let split = judge(expected, &reads);
        assert_eq!(split.is_some(), whole.is_some(), "{size}: {:?}", String::from_utf8_lossy(output));
    }
    whole
}

fn matches(output: impl AsRef<[u8]>) -> bool {
    verdict(&expected(), output.as_ref()).is_some()
}

#[test]
fn plain_echoes_are_exact() {
    for output in [
        LINE.to_owned(),
        format!("{LINE}\r\n"),
        format!("<system-reminder>…</system-reminder>\n{LINE}\n> "),
        format!("^[[200~{LINE}^[[201~"),
        format!("\x1b[?1049h\x1b[2J\x1b[H{LINE}"),
        format!("\x1b]0;title\x07{LINE}"),
        format!("{LINE}\x1b[2K\x1b[1A"),
    ] {
        assert_eq!(verdict(&expected(), output.as_bytes()), Some(MatchDetail::Exact), "{output:?}");
    }
}

#[test]
fn layout_does_not_matter() {
    let wrapped: String =
        LINE.chars().collect::<Vec<_>>().chunks(7).map(|row| row.iter().collect::<String>() + "\r\n").collect();
    let boxed: String = wrapped.lines().map(|row| format!("│ ❯ {row} │\r\n")).collect();
    let drawn: String =
        wrapped.lines().enumerate().map(|(row, text)| format!("\x1b[{row};3H\x1b[31m{text}\x1b[0m")).collect();
    let spinning = LINE.replace("review", "rev\u{2819}\x08iew");
    let spaced = LINE.replace(' ', "\u{a0}\t ");
    for output in [wrapped.clone(), boxed, drawn, spinning, spaced] {
        assert!(matches(&output), "{output:?}");
    }
}

#[test]
fn id_sender_and_five_words_in_any_order_are_enough() {
    let tokens = "now, the pull\nreview [evt_42] please request (Alice)";
    assert_eq!(verdict(&expected(), tokens.as_bytes()), Some(MatchDetail::Tokens));
    assert!(!matches("now, the pull\nreview [evt_42] please request"), "no sender");
    assert!(!matches("now, the\nreview [evt_42] please request (Alice)"), "a word is missing");
    assert!(matches(LINE.replace("missing", "mis[12:01 log]sing")), "only the first five words count");
    assert!(!matches(LINE.replace("review", "rev[12:01 log]iew")), "one of the five is split");
    assert!(!matches(LINE.replace("evt_42", "evt[12:01 log]_42")), "the id is split");
    assert!(!matches(LINE.to_uppercase()), "case counts");
    let empty = ExpectedEcho::new("Alice", "evt_42", "", "Relay message from Alice [evt_42]: ");
    assert!(verdict(&empty, b"Alice [evt_42]").is_some());
}

#[test]
fn the_id_is_delimited() {
    for id in ["evt_421", "xevt_42", "evt_42-retry", "EVT_42", "a_evt_42", "evt_42\r\n1", "e\u{2502}x_evt_42", "evt_43"]
    {
        assert!(!matches(LINE.replace("evt_42", id)), "{id:?}");
    }
    for id in ["evt\r\n_42", "e│v│t_42", "(evt_42)", ".evt_42.", "éevt_42é", "evt_42\x1b]0;1\x07"] {
        assert!(matches(LINE.replace("evt_42", id)), "{id:?}");
    }
    assert!(!matches(format!("{}. See evt_42 above", LINE.replace("evt_42", "x"))), "letters are next to it in prose");
    assert!(matches(format!("{}. evt_42.", LINE.replace("[evt_42]", "[x]"))));
}

#[test]
fn the_end_of_the_output_so_far_decides_nothing() {
    let words = LINE.replace("[evt_42]", "[x]");
    assert!(matches(format!("{words}. evt_42")), "nothing follows until the end of the attempt");
    assert!(!matches(format!("{words}. evt_42 \r\n 7")));
    assert!(matches(format!("{words}. evt_42 \r\n ]")));
    assert!(matches(format!("evt_42, {words}")), "nothing before it");
    let far = " ".repeat(100_000);
    assert!(matches(format!("{words}. evt_42{far}]")));
    assert!(!matches(format!("{words}. evt_42{far}7")));
}

#[test]
fn hidden_text_is_no_echo() {
    assert!(!matches("****************************"));
    assert!(!matches("[Pasted text #1 +3 lines]"));
    assert!(!matches(format!("\x1b]0;{LINE}\x07")));
    assert!(!matches(format!("\x1b]2;{LINE}\x1b\\")));
    assert!(!matches(format!("\x1bP{LINE}\x1b\\")));
    assert!(matches(format!("\x1b]8;;https://example.com\x1b\\{LINE}\x1b]8;;\x1b\\")), "text of a link is shown");
    assert!(!matches(format!("\x1b]8;;{LINE}\x1b\\link\x1b]8;;\x1b\\")));
}

#[test]
fn parts_must_lie_in_one_window() {
    let words = LINE.replace("[evt_42]", "[x].");
    for (gap, is_found) in [(40_000, true), (100_000, false)] {
        for filler in [".", " ", "─", "\x1b[31m."] {
            let width = if filler == "─" { 3 } else { 1 };
            let filler = filler.repeat(gap / width);
            assert_eq!(judge_whole(&format!("{words}{filler}[evt_42]")), is_found, "{gap}");
            assert_eq!(judge_whole(&format!("[evt_42]{filler}{words}")), is_found, "{gap}");
        }
    }
    let sequences = "\x1b[31m".repeat(50_000);
    assert!(judge_whole(&format!("[evt_42]{sequences}{words}")), "sequences do not use the window up");
    let burst = format!("{LINE}{}", "x".repeat(200_000));
    assert!(judge_whole(&burst), "an echo at the front of a large read");
    let prefix = "x".repeat(1_000_000);
    assert!(judge_whole(&format!("{prefix} {LINE}")));
}

fn judge_whole(output: &str) -> bool {
    let whole = judge(&expected(), &[output.as_bytes()]).is_some();
    let reads: Vec<&[u8]> = output.as_bytes().chunks(3000).collect();
    assert_eq!(judge(&expected(), &reads).is_some(), whole);
    whole
}

#[test]
fn only_output_of_the_attempt_counts() {
    let (first, second) = LINE.split_at(40);
    let verdict = |reads: [(&str, i64); 2]| {
        let mut monitor = EchoMonitor::new();
        let mut matches = Vec::new();
        let mut watch = None;
        for (text, millis) in reads {
            if millis >= 0 && watch.is_none() {
                watch = monitor.begin(&expected(), at(0), at(15_000));
            }
            matches.extend(monitor.on_text(text, at(millis)));
        }
        matches.extend(watch.and_then(|watch| monitor.end(watch)));
        !matches.is_empty()
    };
    assert!(verdict([(first, 0), (second, 14_999)]));
    assert!(!verdict([(first, -1), (second, 0)]), "half before the injection");
    assert!(!verdict([(first, 0), (second, 15_000)]), "half after the deadline");
    assert!(!verdict([("", 0), (LINE, 15_000)]));
    assert!(!verdict([(LINE, -5), ("", 0)]));
}

#[test]
fn sequences_that_began_before_the_injection_are_continued() {
    let mut cleaner = Cleaner::new();
    let mut monitor = EchoMonitor::new();
    let mut before = String::new();
    cleaner.clean(b"\x1b]0;tit", &mut before);
    monitor.on_text(&before, at(-10));
    let watch = monitor.begin(&expected(), at(0), at(15_000)).unwrap();
    let mut after = String::new();
    cleaner.clean(format!("le {LINE}\x07").as_bytes(), &mut after);
    assert_eq!(monitor.on_text(&after, at(10)), []);
    assert_eq!(monitor.end(watch), None);
}

#[test]
fn interleaved_echoes_match_their_own_id() {
    let line = |id: &str| format!("Relay message from Alice [{id}]: do the same thing again please");
    let expect = |id: &str| ExpectedEcho::new("Alice", id, "do the same thing again please", &line(id));
    let mut monitor = EchoMonitor::new();
    let first = monitor.begin(&expect("evt_1"), at(0), at(15_000)).unwrap();
    assert_eq!(monitor.on_text("Relay message from Alice [evt_", at(5)), []);
    let second = monitor.begin(&expect("evt_2"), at(10), at(15_010)).unwrap();
    let found = monitor.on_text("1]: do the same thing again please", at(20));
    assert_eq!(found.iter().map(|found| found.watch).collect::<Vec<_>>(), [first]);
    let found = monitor.on_text(&line("evt_2"), at(30));
    assert_eq!(found.iter().map(|found| (found.watch, found.at)).collect::<Vec<_>>(), [(second, at(30))]);
    assert_eq!(monitor.end(first), None);
}

#[test]
fn deadlines_move_and_watches_are_bounded() {
    let mut monitor = EchoMonitor::new();
    let watches: Vec<_> = (0..MAX_WATCHES).map(|_| monitor.begin(&expected(), at(0), at(15_000)).unwrap()).collect();
    assert_eq!(monitor.begin(&expected(), at(0), at(15_000)), None);
    monitor.set_deadline(watches[7], at(20_000));
    let found = monitor.on_text(LINE, at(19_999));
    assert_eq!(found.iter().map(|found| found.watch).collect::<Vec<_>>(), [watches[7]]);
    assert_eq!(monitor.watch_count(), 0, "the others were overdue");
}

#[test]
fn parts_longer_than_the_window_never_match() {
    let long = "x".repeat(100_000);
    let line = format!("Relay message from Alice [evt_42]: {long}");
    assert_eq!(judge(&ExpectedEcho::new("Alice", "evt_42", &long, &line), &[line.as_bytes()]), None);
    let words = format!("one two three four five {long}");
    let line = format!("Relay message from Alice [evt_42]: {words}");
    let expected = ExpectedEcho::new("Alice", "evt_42", &words, &line);
    assert_eq!(judge(&expected, &[line.as_bytes()]), Some(MatchDetail::Tokens));
    assert_eq!(judge(&ExpectedEcho::new("Alice", "❯", "a", LINE), &[LINE.as_bytes()]), None, "no id");
}
