//! Session events: what an agent's session reports, and what that says about the agent.

use crate::agent::AgentStatus;

/// A type of session event, in bytes.
pub const MAX_TYPE_BYTES: usize = 64;

/// Types of one word that the contract lists. All others have two.
const SINGLE_WORDS: [&str; 2] = ["log", "error"];

/// Whether this names a type of session event: two words with a dot between, such as `tool.called`, or one
/// of the two single words of the contract. Brokers report more types than any list has.
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

/// What an event says about its agent's status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusEffect {
    /// Nothing.
    None,
    /// This is what the agent is doing now.
    Sets(AgentStatus),
    /// It says that there is a new status, but not which.
    Unreadable,
}

/// What an event of this type says about its agent's status; `told` is the `status` of its payload.
#[must_use]
pub fn status_effect(event_type: &str, told: Option<&str>) -> StatusEffect {
    match event_type.strip_prefix("status.") {
        Some("changed") => told.and_then(AgentStatus::parse).map_or(StatusEffect::Unreadable, StatusEffect::Sets),
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
    fn only_status_types_touch_the_status() {
        use StatusEffect::{None, Sets, Unreadable};
        for (event_type, told, expected) in [
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
            assert_eq!(status_effect(event_type, told), expected, "{event_type} {told:?}");
        }
    }
}
