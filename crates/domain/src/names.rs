//! What names may look like and how long texts may be.
//!
//! Every text that a client can store has a limit here; nothing is cut, what is too long is refused.

use std::fmt;

/// An agent's or node's name, in bytes.
pub const MAX_AGENT_NAME_BYTES: usize = 128;
/// A node's name, in bytes.
pub const MAX_NODE_NAME_BYTES: usize = 128;
/// A node id chosen by a broker, in bytes.
pub const MAX_NODE_ID_BYTES: usize = 128;
/// A channel's name, in bytes (it is ASCII).
pub const MAX_CHANNEL_NAME_BYTES: usize = 80;
/// A workspace's name, in bytes.
pub const MAX_WORKSPACE_NAME_BYTES: usize = 256;
/// A channel's topic, in bytes.
pub const MAX_TOPIC_BYTES: usize = 1024;
/// A group conversation's name, in bytes.
pub const MAX_TITLE_BYTES: usize = 256;
/// An agent's persona, in bytes.
pub const MAX_PERSONA_BYTES: usize = 16 * 1024;
/// A workspace's system prompt, in bytes.
pub const MAX_SYSTEM_PROMPT_BYTES: usize = 64 * 1024;
/// A message's text, in bytes.
pub const MAX_TEXT_BYTES: usize = 256 * 1024;
/// Any JSON value that is stored as given (metadata, capabilities, skills, provenance), in bytes as JSON.
pub const MAX_METADATA_BYTES: usize = 64 * 1024;
/// A reaction, in bytes: a shortcode, or a sequence of emoji.
pub const MAX_EMOJI_BYTES: usize = 64;
/// Different emoji that one message takes as reactions.
pub const MAX_DISTINCT_EMOJI: i64 = 50;
/// What is searched for, in bytes.
pub const MAX_SEARCH_BYTES: usize = 1024;
/// A short note such as an error, a reason, a version or a content type, in bytes.
pub const MAX_NOTE_BYTES: usize = 2048;
/// A content type, in bytes.
pub const MAX_CONTENT_TYPE_BYTES: usize = 128;
/// Tags of a node; each at most [`MAX_AGENT_NAME_BYTES`] long.
pub const MAX_TAGS: usize = 64;
/// Capabilities of a node or provider.
pub const MAX_CAPABILITIES: usize = 256;
/// An `Idempotency-Key`, in visible ASCII characters.
pub const MAX_IDEMPOTENCY_KEY_LENGTH: usize = 255;

/// Levels of arrays and objects in a JSON text from outside. Strict parsers stop at 128, and what is
/// stored travels inside frames and lists that add a few of their own.
pub const MAX_JSON_DEPTH: usize = 64;

/// Agents that a list or the presence route answers with, at most.
pub const MAX_LISTED_AGENTS: i64 = 20_000;
/// Channels that a list answers with, at most.
pub const MAX_LISTED_CHANNELS: i64 = 5_000;
/// Members that a channel's member list answers with, at most.
pub const MAX_LISTED_MEMBERS: i64 = 20_000;

/// Names that begin so are the engine's own on node sockets (ADR 0002).
pub const RESERVED_PREFIX: &str = ".relay-";
/// Names that begin so are the engine's own agents, such as [`WEBHOOK_AGENT`].
pub const SYSTEM_PREFIX: &str = "__relay_";
/// The hidden agent whose messages are those of inbound webhooks.
pub const WEBHOOK_AGENT: &str = "__relay_webhook__";
/// The channel that every workspace has and every agent joins.
pub const GENERAL: &str = "general";

/// A text is too long, empty or has characters that it must not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} {problem}")]
pub struct InvalidText {
    /// The field as the client calls it.
    pub field: &'static str,
    /// What is wrong with it.
    pub problem: TextProblem,
}

/// What can be wrong with a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextProblem {
    /// Nothing in it.
    Empty,
    /// More bytes than the limit given.
    TooLong(usize),
    /// Control characters in it.
    ControlCharacter,
    /// Begins with [`RESERVED_PREFIX`] or [`SYSTEM_PREFIX`].
    Reserved,
    /// Not of the form that the field has.
    Malformed,
}

impl fmt::Display for TextProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("must not be empty"),
            Self::TooLong(limit) => write!(f, "must not be longer than {limit} bytes"),
            Self::ControlCharacter => f.write_str("must not contain control characters"),
            Self::Reserved => write!(f, "must not begin with {RESERVED_PREFIX} or {SYSTEM_PREFIX}"),
            Self::Malformed => f.write_str("is malformed"),
        }
    }
}

/// A name: one line, not blank, at most `limit` bytes.
///
/// # Errors
/// Says which of these it is not.
pub fn check_name(field: &'static str, name: &str, limit: usize) -> Result<(), InvalidText> {
    if name.trim().is_empty() {
        return Err(InvalidText { field, problem: TextProblem::Empty });
    }
    check_length(field, name, limit)?;
    if name.chars().any(char::is_control) {
        return Err(InvalidText { field, problem: TextProblem::ControlCharacter });
    }
    Ok(())
}

/// A text of any content, at most `limit` bytes.
///
/// # Errors
/// When it is longer.
pub fn check_length(field: &'static str, text: &str, limit: usize) -> Result<(), InvalidText> {
    if text.len() > limit {
        return Err(InvalidText { field, problem: TextProblem::TooLong(limit) });
    }
    Ok(())
}

/// A stored JSON value: its encoded length is at most [`MAX_METADATA_BYTES`].
///
/// # Errors
/// When it is longer.
pub fn check_json_length(field: &'static str, encoded_bytes: usize) -> Result<(), InvalidText> {
    if encoded_bytes > MAX_METADATA_BYTES {
        return Err(InvalidText { field, problem: TextProblem::TooLong(MAX_METADATA_BYTES) });
    }
    Ok(())
}

/// An agent's name. Names are case-sensitive.
///
/// # Errors
/// When it is blank, too long, has control characters or begins with a reserved prefix.
pub fn check_agent_name(name: &str) -> Result<(), InvalidText> {
    check_name("name", name, MAX_AGENT_NAME_BYTES)?;
    if name.starts_with(RESERVED_PREFIX) || name.starts_with(SYSTEM_PREFIX) {
        return Err(InvalidText { field: "name", problem: TextProblem::Reserved });
    }
    Ok(())
}

/// Whether this may name a channel: `[a-z0-9][a-z0-9-]*`, at most [`MAX_CHANNEL_NAME_BYTES`].
#[must_use]
pub fn is_channel_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|first| first.is_ascii_lowercase() || first.is_ascii_digit())
        && name.len() <= MAX_CHANNEL_NAME_BYTES
        && bytes.all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}

/// A channel's name as a client wrote it, without one leading `#`.
#[must_use]
pub fn strip_hash(name: &str) -> &str {
    name.strip_prefix('#').unwrap_or(name)
}

/// An idempotency key, trimmed: 1 to 255 visible ASCII characters.
#[must_use]
pub fn idempotency_key(header: &str) -> Option<&str> {
    let key = header.trim();
    let fits = (1..=MAX_IDEMPOTENCY_KEY_LENGTH).contains(&key.len());
    (fits && key.bytes().all(|byte| byte.is_ascii_graphic())).then_some(key)
}

/// Whether a JSON text spells the character U+0000 somewhere, which Postgres cannot store.
///
/// JSON can only spell it as an escape, and an escape starts with a backslash that is not itself escaped.
#[must_use]
pub fn spells_nul(json: &[u8]) -> bool {
    let mut rest = json;
    while let Some(at) = rest.iter().position(|byte| *byte == b'\\') {
        if rest[at + 1..].starts_with(b"u0000") {
            return true;
        }
        // The backslash and what it escapes.
        rest = rest.get(at + 2..).unwrap_or_default();
    }
    false
}

/// Whether a JSON text has more than [`MAX_JSON_DEPTH`] levels of arrays and objects.
#[must_use]
pub fn nests_too_deeply(json: &[u8]) -> bool {
    let (mut depth, mut in_string) = (0_usize, false);
    let mut bytes = json.iter();
    while let Some(byte) = bytes.next() {
        match (in_string, byte) {
            (true, b'\\') => {
                bytes.next();
            }
            (_, b'"') => in_string = !in_string,
            (false, b'[' | b'{') => depth += 1,
            (false, b']' | b'}') => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_JSON_DEPTH {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn channel_names_are_lower_case_words() {
        for name in ["a", "general", "0", "dev-ops", "a-", "dm-0a", &"x".repeat(80)] {
            assert!(is_channel_name(name), "{name}");
        }
        for name in ["", "-a", "#a", "A", "a b", "a_b", "ä", "a.", &"x".repeat(81)] {
            assert!(!is_channel_name(name), "{name}");
        }
        assert_eq!(strip_hash("#general"), "general");
        assert_eq!(strip_hash("##general"), "#general");
    }

    #[test]
    fn agent_names_are_one_line() {
        for name in ["a", "Ada Lovelace", "日本", "a/b", "#x", &"x".repeat(128)] {
            assert_eq!(check_agent_name(name), Ok(()), "{name}");
        }
        for name in ["", "  ", "a\nb", "a\0", "\u{7f}", WEBHOOK_AGENT, ".relay-x", &"x".repeat(129)] {
            assert!(check_agent_name(name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn idempotency_keys_are_visible_ascii() {
        assert_eq!(idempotency_key(" a-1 "), Some("a-1"));
        for key in ["", "  ", "a b", "ä", "a\u{7f}", &"k".repeat(256)] {
            assert_eq!(idempotency_key(key), None, "{key:?}");
        }
    }

    #[test]
    fn only_a_real_escape_spells_nul() {
        for (json, expected) in [
            (r#"{"a":"\u0000"}"#, true),
            (r#""\\\u0000""#, true),
            (r#""\\u0000""#, false),
            (r#""\u0001""#, false),
            (r#""u0000""#, false),
            ("\\", false),
            ("", false),
        ] {
            assert_eq!(spells_nul(json.as_bytes()), expected, "{json}");
        }
    }

    #[test]
    fn depth_is_counted_outside_of_strings() {
        let nested = |levels: usize| format!("{}1{}", "[".repeat(levels), "]".repeat(levels));
        let beside = format!("[{}]", vec!["{}"; 1000].join(","));
        let quoted = format!(r#"["\"{}"]"#, "[".repeat(1000));
        for (json, expected) in
            [(nested(MAX_JSON_DEPTH), false), (nested(MAX_JSON_DEPTH + 1), true), (beside, false), (quoted, false)]
        {
            assert_eq!(nests_too_deeply(json.as_bytes()), expected, "{json}");
        }
    }

    proptest! {
        #[test]
        fn a_channel_name_survives_a_url(name in "[a-z0-9][a-z0-9-]{0,79}") {
            prop_assert!(is_channel_name(&name));
            let written = format!("#{name}");
            prop_assert_eq!(strip_hash(&written), name.as_str());
        }

        #[test]
        fn any_text_can_be_checked(text in any::<String>()) {
            let _ = (check_agent_name(&text), is_channel_name(&text), idempotency_key(&text));
            let _ = (spells_nul(text.as_bytes()), nests_too_deeply(text.as_bytes()));
        }
    }
}
