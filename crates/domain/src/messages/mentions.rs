//! Mentions in message texts.

/// Maximum number of mentions of one message. Further ones are plain text.
pub const MAX_MENTIONS: usize = 100;

/// Returns the names mentioned as `@name`, each once, in the order of first mention.
///
/// A mention is at the start or after white space, so addresses are not mentions; the name is `[A-Za-z0-9_-]+`. The
/// names may not belong to any agent.
#[must_use]
pub fn extract_mentions(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut after_space = true;
    for (at, c) in text.char_indices() {
        if c == '@' && after_space {
            let rest = &text[at + 1..];
            let end = rest.bytes().position(|b| !is_name_byte(b)).unwrap_or(rest.len());
            let name = &rest[..end];
            if !name.is_empty() && !found.iter().any(|known| known == name) {
                found.push(name.to_owned());
                if found.len() == MAX_MENTIONS {
                    break;
                }
            }
        }
        after_space = c.is_whitespace();
    }
    found
}

const fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-'
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn mentions_follow_white_space() {
        for (text, expected) in [
            ("@bob", vec!["bob"]),
            ("hi @bob, @al-ice_2!", vec!["bob", "al-ice_2"]),
            ("@bob @ada @bob", vec!["bob", "ada"]),
            ("mail bob@example.org", vec![]),
            ("(@bob)", vec![]),
            ("@@bob", vec![]),
            ("@ bob", vec![]),
            ("line\n@bob\t@Bob", vec!["bob", "Bob"]),
            ("@bobé", vec!["bob"]),
            ("é@bob \u{3000}@ada", vec!["ada"]),
            ("", vec![]),
        ] {
            assert_eq!(extract_mentions(text), expected, "{text:?}");
        }
    }

    #[test]
    fn mentions_are_bounded() {
        let text: String = (0..1000).map(|n| format!("@a{n} ")).collect();
        assert_eq!(extract_mentions(&text).len(), MAX_MENTIONS);
    }

    proptest! {
        #[test]
        fn a_mention_is_in_the_text_and_named_once(text in "[@a-c \n.é-]{0,60}") {
            let found = extract_mentions(&text);
            for (at, name) in found.iter().enumerate() {
                let mention = format!("@{name}");
                prop_assert!(text.contains(&mention));
                prop_assert!(!found[..at].contains(name));
            }
        }
    }
}
