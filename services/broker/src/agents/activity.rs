//! Activity of a running agent, for lists, and the watch for one that takes no message.

use std::time::Duration;

use relay_pty::Terminal;
use relay_verification::Timestamp;

use crate::injection::DeliveryMode;

/// Time after which an agent counts as blocked, when a message could not be typed.
const BLOCKED_AFTER: Duration = Duration::from_secs(120);

/// State word of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AgentState {
    Working,
    Idle,
    /// A message could not be typed for a long time.
    BlockedOnSend,
}

impl AgentState {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Working => "working",
            Self::Idle => "idle",
            Self::BlockedOnSend => "blocked_on_send",
        }
    }
}

/// Facts that change while an agent runs; written by its task.
#[derive(Debug, Clone)]
pub(crate) struct AgentInfo {
    /// The terminal of the running process; none between two processes.
    pub(crate) terminal: Option<Terminal>,
    pub(crate) state: AgentState,
    /// Unix time in milliseconds of the last output or step of a delivery.
    pub(crate) last_activity_ms: i64,
    /// Unix time in milliseconds of the start of the process.
    pub(crate) started_ms: i64,
    /// Share of its context that the agent says is left.
    pub(crate) context_left_percent: Option<u8>,
    pub(crate) mode: DeliveryMode,
    pub(crate) pending_count: usize,
    pub(crate) unsettled_count: usize,
}

impl AgentInfo {
    /// Facts about an agent whose program is about to start.
    pub(super) fn starting(now_ms: i64) -> Self {
        Self {
            terminal: None,
            state: AgentState::Working,
            last_activity_ms: now_ms,
            started_ms: now_ms,
            context_left_percent: None,
            mode: DeliveryMode::default(),
            pending_count: 0,
            unsettled_count: 0,
        }
    }

    /// Process id of the agent's own program.
    pub(crate) fn pid(&self) -> Option<i32> {
        self.terminal.as_ref().map(|terminal| terminal.identity().pid)
    }
}

/// Reports once that a message could not be typed for a long time.
#[derive(Debug, Default)]
pub(super) struct BlockedWatch {
    /// Beginning of the wait that was reported.
    reported: Option<Timestamp>,
}

impl BlockedWatch {
    /// Returns how long the message that is being typed waits, if that is to be reported now.
    pub(super) fn poll(&mut self, now: Timestamp, typing_since: Option<Timestamp>) -> Option<Duration> {
        self.next_report(typing_since).filter(|due| now >= *due)?;
        self.reported = typing_since;
        typing_since.map(|since| now.duration_since(since))
    }

    /// Instant of the next report, unless the message is typed before.
    pub(super) fn next_report(&self, typing_since: Option<Timestamp>) -> Option<Timestamp> {
        // The start of the wait identifies the message: the wait of another message starts later.
        typing_since.filter(|_| self.reported != typing_since).map(|since| since + BLOCKED_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_message_that_cannot_be_typed_is_reported_once() {
        let at = |seconds: i64| Timestamp::from_millis(seconds * 1000);
        let limit = BLOCKED_AFTER.as_secs().cast_signed();
        let mut watch = BlockedWatch::default();
        assert_eq!((watch.poll(at(500), None), watch.next_report(None)), (None, None));
        let since = Some(at(500));
        assert_eq!(watch.next_report(since), Some(at(500 + limit)));
        assert_eq!(watch.poll(at(499 + limit), since), None);
        assert_eq!(watch.poll(at(501 + limit), since), Some(BLOCKED_AFTER + Duration::from_secs(1)));
        assert_eq!((watch.poll(at(900), since), watch.next_report(since)), (None, None), "it is reported");
        assert_eq!(watch.poll(at(901 + limit), Some(at(901))), Some(BLOCKED_AFTER), "the next one");
        assert_eq!(watch.poll(at(2000), None), None);
    }
}
