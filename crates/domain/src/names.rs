//! Rules for names, and length limits of texts.
//!
//! Every text that a client can store has a limit here; longer texts are refused, never truncated.

use std::fmt;

use crate::AgentId;

/// Maximum length of an agent name, in bytes.
pub const MAX_AGENT_NAME_BYTES: usize = 128;
/// Maximum length of a node name, in bytes.
pub const MAX_NODE_NAME_BYTES: usize = 128;
/// Maximum length of a node id chosen by a broker, in bytes.
pub const MAX_NODE_ID_BYTES: usize = 128;
/// Maximum length of a channel name, in bytes (it is ASCII).
pub const MAX_CHANNEL_NAME_BYTES: usize = 80;
/// Maximum length of a workspace name, in bytes.
pub const MAX_WORKSPACE_NAME_BYTES: usize = 256;
/// Maximum length of a channel topic, in bytes.
pub const MAX_TOPIC_BYTES: usize = 1024;
/// Maximum length of the name of a group conversation, in bytes.
pub const MAX_TITLE_BYTES: usize = 256;
/// Maximum length of an agent's persona, in bytes.
pub const MAX_PERSONA_BYTES: usize = 16 * 1024;
/// Maximum length of a workspace's system prompt, in bytes.
pub const MAX_SYSTEM_PROMPT_BYTES: usize = 64 * 1024;
/// Maximum length of a message text, in bytes.
pub const MAX_TEXT_BYTES: usize = 256 * 1024;
/// Maximum size of a JSON value that is stored as given (metadata, capabilities, skills, provenance), in bytes.
pub const MAX_METADATA_BYTES: usize = 64 * 1024;
/// Maximum length of a reaction, in bytes: a shortcode, or a sequence of emoji.
pub const MAX_EMOJI_BYTES: usize = 64;
/// Maximum number of distinct emoji in the reactions to one message.
pub const MAX_DISTINCT_EMOJI: i64 = 50;
/// Maximum length of a search query, in bytes.
pub const MAX_SEARCH_BYTES: usize = 1024;
/// Maximum length of a short text such as an error, a reason or a version, in bytes.
pub const MAX_NOTE_BYTES: usize = 2048;
/// Maximum length of a content type, in bytes.
pub const MAX_CONTENT_TYPE_BYTES: usize = 128;
/// Maximum number of tags of a node; each has at most [`MAX_AGENT_NAME_BYTES`].
pub const MAX_TAGS: usize = 64;
/// Maximum number of capabilities of a node or provider.
pub const MAX_CAPABILITIES: usize = 256;
/// Maximum length of an `Idempotency-Key`, in visible ASCII characters.
pub const MAX_IDEMPOTENCY_KEY_LENGTH: usize = 255;

/// Maximum nesting of arrays and objects in JSON from clients. Strict parsers stop at 128, and stored values travel
/// inside frames and lists that add a few levels.
pub const MAX_JSON_DEPTH: usize = 64;

/// Maximum number of agents in a list and in the presence response.
pub const MAX_LISTED_AGENTS: i64 = 20_000;
/// Maximum number of channels in a list.
pub const MAX_LISTED_CHANNELS: i64 = 5_000;
/// Maximum number of members in a channel's member list.
pub const MAX_LISTED_MEMBERS: i64 = 20_000;

/// Prefix of the names of channels with one recipient; the id of the agent follows.
const SUBSCRIPTION_CHANNEL_PREFIX: &str = "subscription-";

/// Returns the name of the channel whose only recipient is this agent.
#[must_use]
pub fn subscription_channel(agent: AgentId) -> String {
    format!("{SUBSCRIPTION_CHANNEL_PREFIX}{agent}")
}

/// Returns the only agent that may be a member of a channel; `None` if any may.
#[must_use]
pub fn only_recipient(channel: &str) -> Option<AgentId> {
    let id = channel.strip_prefix(SUBSCRIPTION_CHANNEL_PREFIX)?;
    // No agent has a shorter id, so names such as `subscription-2026` stay free for ordinary channels.
    let agent = (id.len() >= MIN_ID_DIGITS).then(|| id.parse().ok())??;
    (subscription_channel(agent) == channel).then_some(agent)
}

/// Maximum length of the handle of a session in a frame, in bytes.
pub const MAX_SESSION_REF_BYTES: usize = 1024;

/// Prefix of the engine's own names on node sockets (ADR 0002).
pub const RESERVED_PREFIX: &str = ".relay-";
/// Prefix of the names of the engine's own agents, such as [`WEBHOOK_AGENT`].
pub const SYSTEM_PREFIX: &str = "__relay_";
/// Hidden agent that authors the messages of inbound webhooks.
pub const WEBHOOK_AGENT: &str = "__relay_webhook__";
/// Channel that every workspace has and every agent joins by default.
pub const GENERAL_CHANNEL: &str = "general";

/// Error for a text that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} {problem}")]
pub struct InvalidText {
    /// Name of the field in the request.
    pub field: &'static str,
    /// Rule that the text breaks.
    pub problem: TextProblem,
}

/// Rule that a text breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextProblem {
    /// Empty or blank.
    Empty,
    /// Longer than this number of bytes.
    TooLong(usize),
    /// Contains control characters.
    ControlCharacter,
    /// Begins with [`RESERVED_PREFIX`] or [`SYSTEM_PREFIX`], or ends as the name of a released agent.
    Reserved,
    /// The machine of agents' own nodes.
    ReservedMachine,
    /// A path of one machine where a name is needed that is the same everywhere.
    AbsolutePath,
    /// Not in the format of the field.
    Malformed,
}

impl fmt::Display for TextProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("must not be empty"),
            Self::TooLong(limit) => write!(f, "must not be longer than {limit} bytes"),
            Self::ControlCharacter => f.write_str("must not contain control characters"),
            Self::Reserved => {
                write!(
                    f,
                    "is reserved: it begins with {RESERVED_PREFIX} or {SYSTEM_PREFIX}, or ends as that of a released agent"
                )
            }
            Self::ReservedMachine => f.write_str("must not be \"direct\", the machine of agents' own nodes"),
            Self::AbsolutePath => f.write_str("must not name a repository by an absolute path: use owner/name"),
            Self::Malformed => f.write_str("is malformed"),
        }
    }
}

/// Checks a name: one line, not blank, at most `limit` bytes.
///
/// # Errors
/// Returns the rule that the name breaks.
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

/// Checks the length of a text: at most `limit` bytes.
///
/// # Errors
/// If the text is longer.
pub fn check_length(field: &'static str, text: &str, limit: usize) -> Result<(), InvalidText> {
    if text.len() > limit {
        return Err(InvalidText { field, problem: TextProblem::TooLong(limit) });
    }
    Ok(())
}

/// Checks the encoded size of a stored JSON value: at most [`MAX_METADATA_BYTES`].
///
/// # Errors
/// If the value is larger.
pub fn check_json_length(field: &'static str, encoded_bytes: usize) -> Result<(), InvalidText> {
    if encoded_bytes > MAX_METADATA_BYTES {
        return Err(InvalidText { field, problem: TextProblem::TooLong(MAX_METADATA_BYTES) });
    }
    Ok(())
}

/// Checks the name of an agent. Names are case-sensitive.
///
/// # Errors
/// If it is blank, too long, contains control characters or begins with a reserved prefix.
pub fn check_agent_name(name: &str) -> Result<(), InvalidText> {
    check_name("name", name, MAX_AGENT_NAME_BYTES)?;
    if name.starts_with(RESERVED_PREFIX) || name.starts_with(SYSTEM_PREFIX) || is_released_name(name) {
        return Err(InvalidText { field: "name", problem: TextProblem::Reserved });
    }
    Ok(())
}

/// Shortest id of an agent, in digits.
const MIN_ID_DIGITS: usize = 15;

/// Returns whether a name is one under which a released agent may be kept: a name, `released` and an agent id, as in
/// `writer__released_243812050000000000`. A new agent of such a name would pose as the released one.
#[must_use]
pub fn is_released_name(name: &str) -> bool {
    let is_separator = |letter: char| letter.is_ascii_punctuation() || letter == ' ';
    let before_id = name.trim_end_matches(|letter: char| letter.is_ascii_digit());
    let before_word = before_id.trim_end_matches(is_separator);
    name.len() - before_id.len() >= MIN_ID_DIGITS
        && before_word.len() < before_id.len()
        && before_word.strip_suffix("released").is_some_and(|rest| rest.ends_with(is_separator) && rest.len() > 1)
}

/// Returns whether `name` is a valid channel name: `[a-z0-9][a-z0-9-]*`, at most [`MAX_CHANNEL_NAME_BYTES`].
#[must_use]
pub fn is_channel_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|first| first.is_ascii_lowercase() || first.is_ascii_digit())
        && name.len() <= MAX_CHANNEL_NAME_BYTES
        && bytes.all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}

/// Parses the name of a node as a client writes it: without one leading `#`.
///
/// # Errors
/// If it is blank, too long, or contains control characters or another `#`.
pub fn parse_node_name(written: &str) -> Result<&str, InvalidText> {
    let name = strip_hash(written);
    check_name("name", name, MAX_NODE_NAME_BYTES)?;
    if name.contains('#') {
        return Err(InvalidText { field: "name", problem: TextProblem::Malformed });
    }
    Ok(name)
}

/// Removes one leading `#` from a name sent by a client.
#[must_use]
pub fn strip_hash(name: &str) -> &str {
    name.strip_prefix('#').unwrap_or(name)
}

/// Parses an idempotency key: 1 to 255 visible ASCII characters after trimming.
#[must_use]
pub fn parse_idempotency_key(header: &str) -> Option<&str> {
    let key = header.trim();
    let fits = (1..=MAX_IDEMPOTENCY_KEY_LENGTH).contains(&key.len());
    (fits && key.bytes().all(|byte| byte.is_ascii_graphic())).then_some(key)
}

/// Returns whether a JSON text contains the character U+0000, which Postgres cannot store.
///
/// JSON can only contain it as an escape, and an escape starts with a backslash that is not itself escaped.
#[must_use]
pub fn contains_nul_escape(json: &[u8]) -> bool {
    // Searching for one byte is many times faster than the loop, and most texts have no escape.
    if !json.contains(&b'\\') {
        return false;
    }
    let mut rest = json;
    while let Some(at) = rest.iter().position(|byte| *byte == b'\\') {
        if rest[at + 1..].starts_with(b"u0000") {
            return true;
        }
        // Skip the backslash and the character that it escapes.
        rest = rest.get(at + 2..).unwrap_or_default();
    }
    false
}

/// Returns whether a JSON text nests arrays and objects deeper than [`MAX_JSON_DEPTH`].
#[must_use]
pub fn exceeds_max_depth(json: &[u8]) -> bool {
    // Counting is many times faster than the loop, and few texts have so many brackets. The sum of a part fits into a
    // byte, so that the compiler counts 16 at a time.
    let opening = |part: &[u8]| part.iter().map(|byte| u8::from(matches!(byte, b'[' | b'{'))).sum::<u8>();
    if json.chunks(255).map(|part| usize::from(opening(part))).sum::<usize>() <= MAX_JSON_DEPTH {
        return false;
    }
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
    fn names_of_released_agents_are_reserved() {
        for reserved in
            ["a__released_243812050000000000", "a b#released:243812050000000000", "a-released-243812050000000000"]
        {
            assert!(is_released_name(reserved) && check_agent_name(reserved).is_err(), "{reserved}");
        }
        for free in [
            "released",
            "a-released",
            "a-released-20261124",
            "released-243812050000000000",
            "unreleased-243812050000000000",
        ] {
            assert!(!is_released_name(free) && check_agent_name(free).is_ok(), "{free}");
        }
    }

    #[test]
    fn a_node_name_loses_one_hash_and_has_no_other() {
        for (written, name) in [("box", Some("box")), ("#box", Some("box")), ("#a b", Some("a b"))] {
            assert_eq!(parse_node_name(written).ok(), name, "{written:?}");
        }
        for refused in ["", "#", "##", "##box", "a#b", "# ", "a\nb"] {
            assert!(parse_node_name(refused).is_err(), "{refused:?}");
        }
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
        assert_eq!(parse_idempotency_key(" a-1 "), Some("a-1"));
        for key in ["", "  ", "a b", "ä", "a\u{7f}", &"k".repeat(256)] {
            assert_eq!(parse_idempotency_key(key), None, "{key:?}");
        }
    }

    #[test]
    fn only_a_real_escape_contains_nul() {
        for (json, expected) in [
            (r#"{"a":"\u0000"}"#, true),
            (r#""\\\u0000""#, true),
            (r#""\\u0000""#, false),
            (r#""\u0001""#, false),
            (r#""u0000""#, false),
            ("\\", false),
            ("", false),
        ] {
            assert_eq!(contains_nul_escape(json.as_bytes()), expected, "{json}");
        }
    }

    #[test]
    fn depth_is_counted_outside_strings() {
        let nested = |levels: usize| format!("{}1{}", "[".repeat(levels), "]".repeat(levels));
        let beside = format!("[{}]", vec!["{}"; 1000].join(","));
        let quoted = format!(r#"["\"{}"]"#, "[".repeat(1000));
        for (json, expected) in
            [(nested(MAX_JSON_DEPTH), false), (nested(MAX_JSON_DEPTH + 1), true), (beside, false), (quoted, false)]
        {
            assert_eq!(exceeds_max_depth(json.as_bytes()), expected, "{json}");
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
            let _ = (check_agent_name(&text), is_channel_name(&text), parse_idempotency_key(&text));
            let _ = (contains_nul_escape(text.as_bytes()), exceeds_max_depth(text.as_bytes()));
        }
    }
}
