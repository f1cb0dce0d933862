//! Fuzz targets of the cleaner and the matcher: edited recordings of terminals. The targets of frames are in the
//! broker. A long run: `PROPTEST_CASES=1000000 cargo xtask test -p relay-verification --test fuzz`.

mod edits;

use proptest::prelude::*;
use relay_verification::Timestamp;
use relay_verification::cleaning::Cleaner;
use relay_verification::echo::{EchoMonitor, ExpectedEcho, squash};

use edits::{edited, settings};

const SENDER: &str = "Bob";
const ID: &str = "ev-7";
const BODY: &str = "please review the parser, then merge";
const WORDS: [&str; 5] = ["please", "review", "the", "parser,", "then"];
const LINE: &str = "Relay message from Bob [ev-7]: please review the parser, then merge";

/// Terminal output with the message, and with others beside it.
const RECORDINGS: [&[u8]; 9] = [
    b"> Relay message from Bob [ev-7]: please review the parser, then merge\r\n",
    b"\x1b[2J\x1b[H\x1b[38;5;4m\xe2\x95\xad\xe2\x94\x80\xe2\x94\x80\xe2\x95\xae\x1b[0m\r\n\xe2\x94\x82 Relay message from B \xe2\x94\x82\r\n\
      \xe2\x94\x82 ob [ev-7]: please re \xe2\x94\x82\r\n\xe2\x94\x82 view the parser, then \xe2\x94\x82\r\n",
    b"\x1b[?2004h\x1b[?1049h\x1b[1;1HRelay message from Bob [\x1b[1mev-7\x1b[m]: please\x1b[2;1Hreview the parser, then\x1b[K",
    b"\x1b]0;Relay message from Bob [ev-7]: please review the parser, then merge\x07\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\",
    b"[Pasted text #1 +2 lines] ev-7\r\n\xe2\xa0\x8b Thinking\xe2\x80\xa6 \x1b[1A\x1b[2K",
    b"Relay message from Bob [ev-71]: please review the parser, then merge\r\n",
    b"Relay message from Bob [EV-7]: please review the parser, then merge\r\n",
    b"\x1bPq#0;2;0;0;0\x1b\\\x1b_G\x1b\\\xc2\x9b31m\xc2\x9d0;ev-7\xc2\x9c \xff\xfe \xf0\x9f\x8e",
    b"2026-05-01 10:00:00 INFO got ev-7 from Bob: please review the parser, then merge\r\n$ ",
];

/// Pieces that terminals and attackers put between them.
const PIECES: [&[u8]; 16] = [
    b"\x1b",
    b"\x1b[",
    b"\x1b]",
    b"\x1bP",
    b"\x1b\\",
    b"\x07",
    b"\x18",
    b"\x1a",
    b"\r\n",
    b"ev-7",
    b"[ev-7]",
    b"Bob",
    b"\xc2\x9b",
    b"\xe2",
    b"\x1b[999999999C",
    b"please",
];

fn clean<'a>(reads: impl Iterator<Item = &'a [u8]>) -> String {
    let (mut cleaner, mut text) = (Cleaner::new(), String::new());
    reads.for_each(|read| cleaner.clean(read, &mut text));
    text
}

/// Returns whether the output is an echo of the message.
fn judge<'a>(reads: impl Iterator<Item = &'a [u8]>) -> bool {
    let (mut cleaner, mut monitor) = (Cleaner::new(), EchoMonitor::new());
    let start = Timestamp::from_millis(0);
    let expected = ExpectedEcho::new(SENDER, ID, BODY, LINE);
    let watch = monitor.begin(&expected, start, Timestamp::from_millis(15_000));
    let mut is_found = false;
    for read in reads {
        let mut text = String::new();
        cleaner.clean(read, &mut text);
        is_found |= !monitor.on_text(&text, start).is_empty();
    }
    is_found || watch.and_then(|watch| monitor.end(watch)).is_some()
}

/// The id stands somewhere without a letter beside it, and all other parts somewhere.
fn has_all_parts(text: &str) -> bool {
    let text = squash(text);
    let is_id = |character: Option<char>| {
        character.is_some_and(|character| character.is_ascii_alphanumeric() || "_-".contains(character))
    };
    let is_delimited = text
        .match_indices(ID)
        .any(|(at, _)| !is_id(text[..at].chars().next_back()) && !is_id(text[at + ID.len()..].chars().next()));
    is_delimited && text.contains(SENDER) && WORDS.iter().all(|word| text.contains(word))
}

proptest! {
    #![proptest_config(settings())]

    #[test]
    fn cleaner(bytes in edited(&RECORDINGS, &PIECES), size in 1usize..70) {
        let text = clean(std::iter::once(bytes.as_slice()));
        prop_assert_eq!(&clean(bytes.chunks(size)), &text, "the text depends on the reads");
        prop_assert!(text.len() <= 3 * bytes.len());
        let has_control_function = text.contains(|c: char| c == '\x1b' || ('\u{80}'..='\u{9f}').contains(&c));
        prop_assert!(!has_control_function, "{:?}", text);
        // CAN ends whatever was open.
        let shown = [bytes.as_slice(), b"\x18", b"shown"].concat();
        prop_assert!(clean(std::iter::once(shown.as_slice())).ends_with("shown"));
    }

    #[test]
    fn matcher(bytes in edited(&RECORDINGS, &PIECES), size in 1usize..70) {
        let verdict = judge(std::iter::once(bytes.as_slice()));
        prop_assert_eq!(judge(bytes.chunks(size)), verdict, "the verdict depends on the reads");
        if verdict {
            let text = clean(std::iter::once(bytes.as_slice()));
            prop_assert!(has_all_parts(&text), "verified without its parts: {:?}", text);
        }
        let echoed = [bytes.as_slice(), b"\x18\r\n", LINE.as_bytes(), b"\r\n"].concat();
        prop_assert!(judge(echoed.chunks(size)), "an echo behind other output is not found");
    }
}
