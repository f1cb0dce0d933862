//! [`SessionStatus`]: an agent's activity as reported to the engine. Pure; at most one change each second, the last
//! state wins.

use std::time::Duration;

use relay_verification::Timestamp;
use serde_json::{Value, json};

const PACE: Duration = Duration::from_secs(1);

/// Activity of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Activity {
    Starting,
    /// It has output, or a message was typed.
    Thinking,
    /// A message could not be typed for a long time.
    Waiting,
    Idle,
}

impl Activity {
    fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Thinking => "thinking",
            Self::Waiting => "waiting",
            Self::Idle => "idle",
        }
    }

    fn is_turn(self) -> bool {
        matches!(self, Self::Thinking | Self::Waiting)
    }
}

/// An event for the engine: its type and payload.
pub(super) type SessionEvent = (&'static str, Value);

/// Activity of one agent, and what was reported of it.
#[derive(Debug)]
pub(super) struct SessionStatus {
    current: Activity,
    reported: Activity,
    reason: &'static str,
    reported_at: Timestamp,
}

impl SessionStatus {
    /// For a process that was just started, which is reported by the caller.
    pub(super) fn new(at: Timestamp) -> Self {
        Self { current: Activity::Starting, reported: Activity::Starting, reason: "spawn", reported_at: at }
    }

    /// Notes what the agent does.
    pub(super) fn set(&mut self, activity: Activity, reason: &'static str) {
        // A repetition keeps the reason of the change.
        if self.current != activity {
            (self.current, self.reason) = (activity, reason);
        }
    }

    /// Instant of the next report, if one is due at all.
    pub(super) fn next_report(&self) -> Option<Timestamp> {
        (self.current != self.reported).then(|| self.reported_at + PACE)
    }

    /// Events that are due.
    pub(super) fn poll(&mut self, now: Timestamp) -> Vec<SessionEvent> {
        if self.next_report().is_none_or(|due| now < due) {
            return Vec::new();
        }
        let previous = std::mem::replace(&mut self.reported, self.current);
        self.reported_at = now;
        let turn = match (previous.is_turn(), self.current.is_turn()) {
            (false, true) => Some(("turn.started", json!({ "reason": self.reason }))),
            (true, false) => Some(("turn.settled", json!({ "reason": self.reason }))),
            (true, true) | (false, false) => None,
        };
        let change = json!({
            "activity": self.current.as_str(),
            "previousActivity": previous.as_str(),
            "reason": self.reason,
        });
        turn.into_iter().chain([("activity.changed", change)]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    #[test]
    fn the_last_state_of_a_second_is_reported() {
        let mut status = SessionStatus::new(at(0));
        assert_eq!(status.next_report(), None);
        status.set(Activity::Thinking, "output");
        assert_eq!((status.poll(at(999)).len(), status.next_report()), (0, Some(at(1000))));
        let kinds = |events: Vec<SessionEvent>| events.into_iter().map(|(kind, _)| kind).collect::<Vec<_>>();
        assert_eq!(kinds(status.poll(at(1000))), ["turn.started", "activity.changed"]);
        status.set(Activity::Idle, "prompt");
        status.set(Activity::Thinking, "output");
        assert_eq!(status.next_report(), None, "it is as it was reported");
        status.set(Activity::Idle, "prompt");
        let events = status.poll(at(2000));
        assert_eq!(events[1].1, json!({ "activity": "idle", "previousActivity": "thinking", "reason": "prompt" }));
        assert_eq!(kinds(events), ["turn.settled", "activity.changed"]);
    }
}
