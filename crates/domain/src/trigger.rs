//! Triggers: which message invokes which action.

/// Triggers of a workspace.
pub const MAX_PER_WORKSPACE: i64 = 500;
/// A pattern, in bytes.
pub const MAX_PATTERN_BYTES: usize = 512;
/// Memory that a compiled pattern may take, in bytes. What repeats itself too often does not fit.
pub const MAX_COMPILED_BYTES: usize = 256 * 1024;

/// The facts of a message that triggers ask for.
#[derive(Debug, Clone, Copy)]
pub struct Seen<'a> {
    /// The channel's name.
    pub channel: &'a str,
    /// The names mentioned.
    pub mentions: &'a [String],
}

/// Whether a message is in the channel and mentions the agent that a trigger wants; whatever it does not want may be
/// anything. The text is matched elsewhere.
#[must_use]
pub fn concerns(channel: Option<&str>, mention: Option<&str>, seen: &Seen<'_>) -> bool {
    let channel = channel.map(|channel| channel.strip_prefix('#').unwrap_or(channel));
    let mention = mention.map(|name| name.strip_prefix('@').unwrap_or(name));
    channel.is_none_or(|channel| channel == seen.channel)
        && mention.is_none_or(|name| seen.mentions.iter().any(|known| known == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_trigger_does_not_ask_for_may_be_anything() {
        let mentions = ["bob".to_owned(), "ada".to_owned()];
        let seen = Seen { channel: "general", mentions: &mentions };
        for (channel, mention, expected) in [
            (None, None, true),
            (Some("general"), None, true),
            (Some("#general"), None, true),
            (Some("random"), None, false),
            (None, Some("ada"), true),
            (None, Some("@bob"), true),
            (None, Some("eve"), false),
            (Some("#general"), Some("@ada"), true),
            (Some("#general"), Some("@eve"), false),
            (Some("#random"), Some("@ada"), false),
        ] {
            assert_eq!(concerns(channel, mention, &seen), expected, "{channel:?} {mention:?}");
        }
    }
}
