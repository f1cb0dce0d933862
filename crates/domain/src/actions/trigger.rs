//! Triggers: rules that invoke an action for matching messages.

/// Maximum number of triggers in one workspace.
pub const MAX_PER_WORKSPACE: i64 = 500;
/// Maximum length of a pattern, in bytes.
pub const MAX_PATTERN_BYTES: usize = 512;
/// Maximum memory of a compiled pattern, in bytes. Bounds patterns with large repetition counts.
pub const MAX_COMPILED_BYTES: usize = 256 * 1024;

/// Bounds of the minimum interval of a trigger, in seconds. 0: every match invokes the action.
pub const MIN_INTERVAL_SECONDS: std::ops::RangeInclusive<i32> = 0..=86_400;

/// Facts of a message that triggers filter by.
#[derive(Debug, Clone, Copy)]
pub struct TriggerFacts<'a> {
    /// Name of the channel.
    pub channel: &'a str,
    /// Names of the mentioned agents.
    pub mentions: &'a [String],
}

/// Returns whether a message matches the channel and mention filters of a trigger; an absent filter matches everything.
/// The text pattern is matched by the engine.
#[must_use]
pub fn matches_scope(channel: Option<&str>, mention: Option<&str>, seen: &TriggerFacts<'_>) -> bool {
    let channel = channel.map(|channel| channel.strip_prefix('#').unwrap_or(channel));
    let mention = mention.map(|name| name.strip_prefix('@').unwrap_or(name));
    channel.is_none_or(|channel| channel == seen.channel)
        && mention.is_none_or(|name| seen.mentions.iter().any(|known| known == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_filter_matches_everything() {
        let mentions = ["bob".to_owned(), "ada".to_owned()];
        let seen = TriggerFacts { channel: "general", mentions: &mentions };
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
            assert_eq!(matches_scope(channel, mention, &seen), expected, "{channel:?} {mention:?}");
        }
    }
}
