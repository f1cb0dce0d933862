//! Session events: reports of an agent's session, and their effect on the agent's status.

use chrono::{DateTime, Utc};

use crate::{AgentId, JsonText, SessionEventId, agents::AgentStatus};

/// Maximum length of an event type, in bytes.
pub const MAX_TYPE_BYTES: usize = 64;

/// Report of an agent's session.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionEvent {
    pub id: SessionEventId,
    /// Agent whose session it is.
    pub agent_id: AgentId,
    /// Type as checked by [`is_event_type`].
    pub event_type: String,
    /// JSON object; empty in lists until it is read.
    pub payload: JsonText,
    /// Number of the event, from 1 per agent.
    pub sequence: i64,
    /// Time of acceptance.
    pub created_at: DateTime<Utc>,
}

/// Types of one word. All others have two (docs/protocol/rest.md, "Session events").
const SINGLE_WORDS: [&str; 2] = ["log", "error"];

/// Returns whether `text` is a valid session event type: two words separated by a dot, such as `tool.called`, or `log`
/// or `error`. There is no list of types because brokers define their own.
#[must_use]
pub fn is_event_type(text: &str) -> bool {
    let is_word = |word: &str| {
        word.bytes().next().is_some_and(|first| first.is_ascii_lowercase())
            && word.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-".contains(&byte))
    };
    text.len() <= MAX_TYPE_BYTES
        && (SINGLE_WORDS.contains(&text)
            || text.split_once('.').is_some_and(|(family, what)| is_word(family) && is_word(what)))
}

/// Effect of a session event on its agent's status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusEffect {
    /// No effect.
    None,
    /// The event sets this status.
    Sets(AgentStatus),
    /// The event announces a status that is missing or unknown.
    Unreadable,
}

/// Returns the effect of an event of this type; `reported` is the `status` in its payload.
#[must_use]
pub fn status_effect(event_type: &str, reported: Option<&str>) -> StatusEffect {
    match event_type.strip_prefix("status.") {
        Some("changed") => reported.and_then(AgentStatus::parse).map_or(StatusEffect::Unreadable, StatusEffect::Sets),
        Some(word @ ("active" | "idle" | "blocked" | "waiting" | "offline")) => {
            AgentStatus::parse(word).map_or(StatusEffect::None, StatusEffect::Sets)
        }
        _ => StatusEffect::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_two_words() {
        for text in [
            "status.changed",
            "tool.called",
            "session.starting",
            "observability.capabilities",
            "activity.changed",
            "turn.started",
            "a.b",
            "x1.y_z-2",
            "log",
            "error",
        ] {
            assert!(is_event_type(text), "{text}");
        }
        for text in ["", ".", "a", "a.", ".b", "a.b.c", "A.b", "a.B", "a b.c", "a.b ", "1a.b", "a.é", "logs"] {
            assert!(!is_event_type(text), "{text}");
        }
        assert!(!is_event_type(&format!("a.{}", "x".repeat(MAX_TYPE_BYTES))));
    }

    #[test]
    fn only_status_events_affect_the_status() {
        use StatusEffect::{None, Sets, Unreadable};
        for (event_type, reported, expected) in [
            ("status.idle", Option::None, Sets(AgentStatus::Idle)),
            ("status.offline", Some("active"), Sets(AgentStatus::Offline)),
            ("status.changed", Some("blocked"), Sets(AgentStatus::Blocked)),
            ("status.changed", Some("online"), Sets(AgentStatus::Active)),
            ("status.changed", Some("away"), Sets(AgentStatus::Idle)),
            ("status.changed", Some("gone"), Unreadable),
            ("status.changed", Option::None, Unreadable),
            ("status.resting", Some("idle"), None),
            ("activity.changed", Some("idle"), None),
            ("session.starting", Option::None, None),
            ("log", Some("idle"), None),
        ] {
            assert_eq!(status_effect(event_type, reported), expected, "{event_type} {reported:?}");
        }
    }
}
