//! Triggers: rules that invoke an action for matching messages.

use std::{convert::Infallible, str::FromStr};

use chrono::{DateTime, Utc};

use crate::{AgentId, TriggerId, events::EventSeq};

/// Maximum number of triggers in one workspace.
pub const MAX_PER_WORKSPACE: i64 = 500;
/// Maximum length of a pattern, in bytes.
pub const MAX_PATTERN_BYTES: usize = 512;
/// Maximum memory of a compiled pattern, in bytes. Bounds patterns with large repetition counts.
pub const MAX_COMPILED_BYTES: usize = 256 * 1024;
/// Beginning of a text against which patterns are matched, in bytes.
pub const MAX_MATCHED_BYTES: usize = 32 * 1024;

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

/// Condition of a trigger on the agents that a message mentions.
///
/// Stored as text. The texts of the first two contain no name, so that a version which knows names only matches no
/// message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MentionFilter {
    /// Any message: the condition `false`.
    Unrestricted,
    /// A message that mentions at least one agent: the condition `true`.
    AnyAgent,
    /// A message that mentions this agent; a leading `@` is ignored.
    Agent(String),
}

impl MentionFilter {
    const UNRESTRICTED: &str = "";
    const ANY_AGENT: &str = "@";

    /// Returns the stored text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Unrestricted => Self::UNRESTRICTED,
            Self::AnyAgent => Self::ANY_AGENT,
            Self::Agent(name) => name,
        }
    }

    fn matches(&self, mentions: &[String]) -> bool {
        match self {
            Self::Unrestricted => true,
            Self::AnyAgent => !mentions.is_empty(),
            Self::Agent(name) => {
                let name = name.strip_prefix('@').unwrap_or(name);
                mentions.iter().any(|mentioned| mentioned == name)
            }
        }
    }
}

impl FromStr for MentionFilter {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            Self::UNRESTRICTED => Self::Unrestricted,
            Self::ANY_AGENT => Self::AnyAgent,
            name => Self::Agent(name.to_owned()),
        })
    }
}

#[cfg(feature = "sqlx")]
crate::columns::text_column!(MentionFilter);

/// Returns whether a message matches the channel and mention filters of a trigger; an absent filter matches everything.
/// The text pattern is matched by the engine.
#[must_use]
pub fn matches_scope(channel: Option<&str>, mention: Option<&MentionFilter>, seen: &TriggerFacts<'_>) -> bool {
    let channel = channel.map(|channel| channel.strip_prefix('#').unwrap_or(channel));
    channel.is_none_or(|channel| channel == seen.channel)
        && mention.is_none_or(|mention| mention.matches(seen.mentions))
}

/// Rule that invokes an action for matching messages.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct Trigger {
    pub trigger_id: TriggerId,
    /// Matches only messages in this channel.
    pub channel: Option<String>,
    /// Matches only texts that contain this pattern.
    pub pattern: Option<String>,
    /// Matches only messages with these mentions.
    pub mention: Option<MentionFilter>,
    pub action_name: String,
    pub enabled: bool,
    /// Seq of the last event before the trigger was enabled; it matches later ones only.
    pub after_seq: EventSeq,
    pub last_triggered_at: Option<DateTime<Utc>>,
    /// Reason for which the last match invoked nothing.
    pub last_error: Option<String>,
    pub created_at: DateTime<Utc>,
    pub updated_at: Option<DateTime<Utc>>,
    /// Agent that created it; `None` for the workspace key.
    pub created_by: Option<AgentId>,
    /// Minimum time between two invocations, in seconds.
    pub min_interval_seconds: i32,
}

/// Changes to a trigger; `None` keeps a field, `Some(None)` clears it.
#[derive(Debug, Default)]
pub struct TriggerChange {
    pub channel: Option<Option<String>>,
    pub pattern: Option<Option<String>>,
    pub mention: Option<Option<MentionFilter>>,
    pub action_name: Option<String>,
    pub enabled: Option<bool>,
    pub min_interval_seconds: Option<i32>,
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
            let filter = mention.map(|name| MentionFilter::Agent(name.to_owned()));
            assert_eq!(matches_scope(channel, filter.as_ref(), &seen), expected, "{channel:?} {mention:?}");
        }
    }

    #[test]
    fn any_mention_matches_a_message_with_one() {
        let mentions = ["bob".to_owned()];
        for (filter, mentions, expected) in [
            (MentionFilter::AnyAgent, &mentions[..], true),
            (MentionFilter::AnyAgent, &[], false),
            (MentionFilter::Unrestricted, &mentions, true),
            (MentionFilter::Unrestricted, &[], true),
        ] {
            let seen = TriggerFacts { channel: "general", mentions };
            assert_eq!(matches_scope(None, Some(&filter), &seen), expected, "{filter:?} {mentions:?}");
        }
    }

    #[test]
    fn stored_filters_are_read_back() {
        for filter in [MentionFilter::Unrestricted, MentionFilter::AnyAgent, MentionFilter::Agent("@bob".to_owned())] {
            assert_eq!(filter.as_str().parse(), Ok(filter.clone()));
        }
    }
}
