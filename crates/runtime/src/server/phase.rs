//! Phase of a connection, which decides which timeout applies.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use super::Timeouts;

/// Phase of one connection, shared by its stream and its requests.
#[derive(Debug)]
pub(super) struct Phase(Mutex<State>);

#[derive(Debug, Clone, Copy)]
enum State {
    /// The head of a request is read since then.
    Head(Instant),
    /// A request is in progress. Its handler limits its time.
    Request,
    /// No request is in progress since then.
    Idle(Instant),
    /// The connection carries another protocol.
    Upgraded,
}

/// Reason for which a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Timeout {
    Head,
    Idle,
}

impl Timeout {
    /// Returns the label of the metric.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Head => "head",
            Self::Idle => "idle",
        }
    }
}

impl Default for Phase {
    fn default() -> Self {
        Self(Mutex::new(State::Head(Instant::now())))
    }
}

impl Phase {
    /// Returns the end of the present phase, unless it has none.
    pub(super) fn deadline(&self, timeouts: &Timeouts) -> Option<(Instant, Timeout)> {
        match *self.state() {
            State::Head(since) => Some((since + timeouts.head, Timeout::Head)),
            State::Idle(since) => Some((since + timeouts.idle, Timeout::Idle)),
            State::Request | State::Upgraded => None,
        }
    }

    /// Notes that bytes arrived: between requests they begin the next head.
    pub(super) fn on_bytes(&self) {
        let mut state = self.state();
        if matches!(*state, State::Idle(_)) {
            *state = State::Head(Instant::now());
        }
    }

    pub(super) fn start_request(self: &Arc<Self>) -> RequestInProgress {
        *self.state() = State::Request;
        RequestInProgress(Arc::clone(self))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Request of a connection that is idle again when this is dropped.
#[derive(Debug)]
pub(super) struct RequestInProgress(Arc<Phase>);

impl RequestInProgress {
    /// Ends the request with an upgrade: no timeout applies from now on.
    pub(super) fn upgrade(self) {
        *self.0.state() = State::Upgraded;
    }
}

impl Drop for RequestInProgress {
    fn drop(&mut self) {
        let mut state = self.0.state();
        // Not after an upgrade, whose state must stay.
        if matches!(*state, State::Request) {
            *state = State::Idle(Instant::now());
        }
    }
}
