//! The verdict on an echo against a slow but obvious judgement, for any split of the output.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic, as tests do")]

use proptest::prelude::*;
use relay_verification::Timestamp;
use relay_verification::cleaning::Cleaner;
use relay_verification::echo::{EchoMonitor, ExpectedEcho, WINDOW_BYTES, squash};

const SENDER: &str = "Bob";
const ID: &str = "ev-7";
const BODY: &str = "a bb a ccc d never compared";
const LINE: &str = "Relay message from Bob [ev-7]: a bb a ccc d never compared";

/// Ranges of cleaned text in which `part` stands, and the squashed neighbours of each.
fn occurrences(text: &str, part: &str) -> Vec<(usize, usize, Option<u8>, Option<u8>)> {
    let mut bytes = Vec::new();
    for (offset, character) in text.char_indices().filter(|(_, character)| !squash(&character.to_string()).is_empty()) {
        let mut buffer = [0; 4];
        let encoded = character.encode_utf8(&mut buffer).bytes();
        bytes.extend(encoded.enumerate().map(|(within, byte)| (byte, offset + within)));
    }
    let part = squash(part);
    (0..(bytes.len() + 1).saturating_sub(part.len()))
        .filter(|start| bytes[*start..].iter().zip(part.bytes()).all(|((byte, _), expected)| *byte == expected))
        .map(|start| {
            let last = start + part.len() - 1;
            let before = start.checked_sub(1).map(|index| bytes[index].0);
            (bytes[start].1, bytes[last].1 + 1, before, bytes.get(last + 1).map(|(byte, _)| *byte))
        })
        .collect()
}

fn is_id_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-'
}

/// Looks at every window that begins at a part.
fn reference(text: &str) -> bool {
    let delimited: Vec<(usize, usize)> = occurrences(text, ID)
        .into_iter()
        .filter(|(_, _, before, after)| ![before, after].into_iter().any(|byte| byte.is_some_and(is_id_byte)))
        .map(|(start, end, ..)| (start, end))
        .collect();
    let places = |part: &str| occurrences(text, part).into_iter().map(|(start, end, ..)| (start, end)).collect();
    let exact: Vec<Vec<(usize, usize)>> = vec![delimited.clone(), places(LINE)];
    let tokens = vec![delimited, places(SENDER), places("a"), places("bb"), places("ccc"), places("d")];
    [exact, tokens].iter().any(|parts| {
        parts.iter().flatten().any(|(begin, _)| {
            let fits = |(start, end): &(usize, usize)| start >= begin && (end - begin) as u64 <= WINDOW_BYTES;
            parts.iter().all(|places| places.iter().any(fits))
        })
    })
}

fn judge<'a>(reads: impl Iterator<Item = &'a [u8]>) -> bool {
    let mut cleaner = Cleaner::new();
    let mut monitor = EchoMonitor::new();
    let expected = ExpectedEcho::new(SENDER, ID, BODY, LINE);
    let start = Timestamp::from_millis(0);
    let watch = monitor.begin(&expected, start, Timestamp::from_millis(15_000)).unwrap();
    let mut is_found = false;
    for read in reads {
        let mut text = String::new();
        cleaner.clean(read, &mut text);
        is_found |= !monitor.on_text(&text, start).is_empty();
    }
    is_found || monitor.end(watch).is_some()
}

/// Output made of parts, of near misses, and of what terminals put between them.
fn fragment() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => prop::sample::select(vec![ID, SENDER, "a", "bb", "ccc", "d", "ev-", "7", "B", "ob", "c", "_", "é", "]", "["])
            .prop_map(str::to_owned),
        1 => Just(LINE.to_owned()),
        3 => prop::sample::select(vec![" ", "\r\n", "│", "\x1b[31m", "\x1b[3C", "\x1b]0;Bob ev-7 a bb ccc d\x07", "\u{9b}K"])
            .prop_map(str::to_owned),
        1 => "\\PC{0,8}",
    ]
}

/// A run of text that keeps parts apart, around the size of a window.
fn gap() -> impl Strategy<Value = String> {
    let length = prop_oneof![0usize..40_000, 65_500usize..65_570, 30_000usize..34_000, 65_536usize..80_000];
    (length, prop::sample::select(vec![" ", "."])).prop_map(|(length, filler)| filler.repeat(length))
}

fn cleaned(output: &str) -> String {
    let mut text = String::new();
    Cleaner::new().clean(output.as_bytes(), &mut text);
    text
}

proptest! {
    #[test]
    fn short_output_has_the_verdict_of_the_reference(
        fragments in prop::collection::vec(fragment(), 0..40),
        sizes in prop::collection::vec(1usize..12, 1..8),
    ) {
        let output = fragments.concat();
        let verdict = reference(&cleaned(&output));
        prop_assert_eq!(judge([output.as_bytes()].into_iter()), verdict, "{:?}", &output);
        prop_assert_eq!(judge(output.as_bytes().chunks(1)), verdict, "{:?}", &output);
        let mut rest = output.as_bytes();
        let mut sizes = sizes.into_iter().cycle();
        let reads = std::iter::from_fn(|| {
            let (read, after) = rest.split_at(sizes.next()?.min(rest.len()));
            rest = after;
            (!read.is_empty()).then_some(read)
        });
        prop_assert_eq!(judge(reads), verdict, "{:?}", &output);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn distances_have_the_verdict_of_the_reference(
        // Parts in an order that is often complete, with gaps between some of them.
        order in Just(vec![ID, SENDER, "a", "bb", "ccc", "d", ID, "bb"]).prop_shuffle(),
        gaps in prop::collection::vec(prop_oneof![2 => Just(".".to_owned()), 1 => gap()], 8),
        size in prop::sample::select(vec![1usize, 3, 1000, 40_000]),
    ) {
        let output: String = order.iter().zip(&gaps).map(|(part, gap)| format!("{part}{gap}")).collect();
        let verdict = reference(&output);
        prop_assert_eq!(judge([output.as_bytes()].into_iter()), verdict);
        prop_assert_eq!(judge(output.as_bytes().chunks(size)), verdict);
    }
}
