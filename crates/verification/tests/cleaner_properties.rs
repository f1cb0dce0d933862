//! Any bytes are cleaned without a panic, within bounds, and alike for any split.

use proptest::prelude::*;
use relay_verification::Timestamp;
use relay_verification::cleaning::Cleaner;
use relay_verification::echo::{EchoMonitor, ExpectedEcho};

fn clean<'a>(reads: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut cleaner = Cleaner::new();
    let mut text = String::new();
    for read in reads {
        cleaner.clean(read, &mut text);
    }
    text
}

/// Bytes that are often part of sequences.
fn output() -> impl Strategy<Value = Vec<u8>> {
    let token = prop_oneof![
        2 => any::<u8>().prop_map(|byte| vec![byte]),
        4 => prop::sample::select(b"\x1b[]P_^X\\0123456789;?m H(B\x07\x18\x1a".to_vec()).prop_map(|byte| vec![byte]),
        2 => prop::sample::select(vec![b"\x1b]0;".to_vec(), "\u{9b}".into(), "\u{9c}".into(), "\u{9d}".into(), "✓é".into()]),
        1 => (0usize..5000).prop_map(|length| vec![b'x'; length]),
    ];
    prop::collection::vec(token, 0..60).prop_map(|tokens| tokens.concat())
}

proptest! {
    #[test]
    fn any_split_gives_the_same_text(bytes in output(), sizes in prop::collection::vec(1usize..9, 1..6)) {
        let whole = clean([bytes.as_slice()]);
        prop_assert_eq!(&clean(bytes.chunks(1)), &whole);
        let mut sizes = sizes.into_iter().cycle();
        let mut rest = bytes.as_slice();
        let reads = std::iter::from_fn(|| {
            let (read, after) = rest.split_at(sizes.next()?.min(rest.len()));
            rest = after;
            (!read.is_empty()).then_some(read)
        });
        prop_assert_eq!(&clean(reads), &whole);
    }

    #[test]
    fn text_is_bounded_and_free_of_sequences(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
        let text = clean([bytes.as_slice()]);
        prop_assert!(text.len() <= 3 * bytes.len());
        let has_control_function = text.contains(|c: char| c == '\x1b' || ('\u{80}'..='\u{9f}').contains(&c));
        prop_assert!(!has_control_function);
        prop_assert_eq!(clean([text.as_bytes()]), text.clone(), "clean text stays as it is");
    }

    #[test]
    fn plain_text_is_kept(text in "\\PC{0,200}") {
        prop_assert_eq!(clean([text.as_bytes()]), text.clone());
    }

    #[test]
    fn no_output_causes_a_panic(
        reads in prop::collection::vec(prop_oneof![output(), prop::collection::vec(any::<u8>(), 0..300)], 0..20),
        parts in ("\\PC{0,12}", "\\PC{0,12}", "\\PC{0,40}", "\\PC{0,40}"),
    ) {
        let (sender, id, body, line) = parts;
        let mut cleaner = Cleaner::new();
        let mut monitor = EchoMonitor::new();
        for (index, read) in reads.iter().enumerate() {
            let now = Timestamp::from_millis(index as i64 * 100);
            let deadline = Timestamp::from_millis(index as i64 * 100 + 500);
            monitor.begin(&ExpectedEcho::new(&sender, &id, &body, &line), now, deadline);
            let mut text = String::new();
            cleaner.clean(read, &mut text);
            monitor.on_text(&text, now);
            prop_assert!(monitor.watch_count() <= 5, "overdue watches end");
        }
    }
}

#[test]
fn endless_sequences_hide_following_text_only_up_to_their_bound() {
    for introducer in ["\x1b]", "\x1bP", "\x1bX", "\x1b^", "\x1b_"] {
        let output = format!("{introducer}{}shown", "x".repeat(4096)).repeat(100);
        assert_eq!(clean(output.as_bytes().chunks(1000)), "shown".repeat(100), "{introducer:?}");
    }
    let digits = format!("\x1b[{}Hshown", "9".repeat(1_000_000));
    assert_eq!(clean([digits.as_bytes()]), " shown");
}
