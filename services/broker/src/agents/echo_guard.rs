//! [`EchoGuard`]: output that may be the echo of a typed message says nothing about the agent.

use std::time::Duration;

use relay_verification::Timestamp;

/// Time in which output may still repeat a typed message: a busy program echoes late, and redraws what it has shown.
const ECHO_TIME: Duration = Duration::from_secs(60);

/// Remembers when a message was typed that its echo must not stand for a statement of the agent.
#[derive(Debug, Default)]
pub(super) struct EchoGuard {
    typed_at: Option<Timestamp>,
}

impl EchoGuard {
    /// Notes that such a message was typed.
    pub(super) fn on_typed(&mut self, at: Timestamp) {
        self.typed_at = Some(at);
    }

    /// Returns whether output at this instant may be its echo.
    pub(super) fn is_echo_possible(&self, at: Timestamp) -> bool {
        self.typed_at.is_some_and(|typed_at| at < typed_at + ECHO_TIME)
    }
}
