use super::*;

const MAX_STRING: usize = 4096;

fn cleaned(reads: &[&[u8]]) -> String {
    let mut cleaner = Cleaner::new();
    let mut text = String::new();
    for read in reads {
        cleaner.clean(read, &mut text);
    }
    text
}

/// Cleans `output` in one read and byte by byte; both must agree.
fn clean(output: &str) -> String {
    let whole = cleaned(&[output.as_bytes()]);
    let bytes: Vec<&[u8]> = output.as_bytes().chunks(1).collect();
    assert_eq!(whole, cleaned(&bytes), "{output:?}");
    whole
}

#[test]
fn sequences_vanish_in_both_forms() {
    for (output, text) in [
        ("a\x1b[1;31mb\x1b[0mc", "abc"),
        ("a\u{9b}1;31mb", "ab"),
        ("a\x1b[?2004hb\x1b[?1049hc", "abc"),
        ("a\x1b[1 qb", "ab"),
        ("a\x1b(Bb\x1b)0c\x1b#8d\x1b%Ge", "abcde"),
        ("a\x1b7b\x1b8c\x1b=d\x1bMe", "abcde"),
        ("a\u{85}b", "ab"),
        ("a\x1b\x1b[31mb", "ab"),
        ("a\x1b[3\x1b[31mb", "ab"),
        ("a\x1b[3\x18b", "ab"),
        ("line\r\nnext\ttab", "line\r\nnext\ttab"),
    ] {
        assert_eq!(clean(output), text, "{output:?}");
    }
}

#[test]
fn text_of_control_strings_is_not_visible() {
    for (output, text) in [
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]0;title\x1b\\b", "ab"),
        ("a\u{9d}0;title\u{9c}b", "ab"),
        ("a\x1bPq#0;2~\x07more\x1b\\b", "ab"),
        ("a\u{90}data\u{9c}b", "ab"),
        ("a\x1bXsos\x1b\\b\x1b^pm\x1b\\c\x1b_apc\x1b\\d", "abcd"),
        ("a\x1b]0;title\x18b", "ab"),
        ("a\x1b]0;title\x1ab", "ab"),
        ("a\x1bP✓ ✜\x1b\\b", "ab"),
        ("a\x1b]0;title\x1b[31mb", "ab"),
        ("\x1b]8;;https://example.com/evt_1\x1b\\link\x1b]8;;\x1b\\", "link"),
    ] {
        assert_eq!(clean(output), text, "{output:?}");
    }
}

#[test]
fn a_string_without_an_end_is_abandoned_after_4096_characters() {
    for introducer in ["\x1b]", "\x1bP", "\u{9f}"] {
        let filler = "é".repeat(MAX_STRING);
        assert_eq!(clean(&format!("a{introducer}{filler}text\x1b[31m more")), "atext more", "{introducer:?}");
        let filler = "x".repeat(MAX_STRING - 1);
        assert_eq!(clean(&format!("a{introducer}{filler}text")), "aext", "{introducer:?}");
    }
    let filler = "x".repeat(MAX_STRING);
    assert_eq!(clean(&format!("a\x1b]{filler}\x07b")), "ab", "a string of exactly that length may end");
    assert_eq!(clean(&format!("a\x1b]{filler}yz\x07b")), "ayz\x07b");
}

#[test]
fn a_cursor_movement_becomes_one_space() {
    for movement in ["\x1b[C", "\x1b[1000000000C", "\x1b[99999999999999999999B", "\x1b[2;3H", "\u{9b}5G", "\x1b[4d"] {
        assert_eq!(clean(&format!("a{movement}b")), "a b", "{movement:?}");
    }
    assert_eq!(clean("a\x1b[2K\x1b[1Ab"), "a b", "erasing shows nothing");
    assert_eq!(clean("a\x1b[?5Cb\x1b[1 Ac"), "abc", "private sequences and intermediates are other functions");
}

#[test]
fn invalid_utf8_is_replaced_and_split_characters_are_whole() {
    assert_eq!(cleaned(&[b"a\xffb"]), "a\u{FFFD}b");
    assert_eq!(cleaned(&[b"a\xe2", b"\x9c", b"\x93b"]), "a✓b");
    assert_eq!(cleaned(&[b"a\xe2", b"\x9c\x1b[31mb"]), "a\u{FFFD}b");
    assert_eq!(cleaned(&[b"\x9bx"]), "\u{FFFD}x", "a raw byte is no control function in UTF-8");
}
