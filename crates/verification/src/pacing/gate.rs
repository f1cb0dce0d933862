//! [`InjectionGate`]: the earliest start of an agent's next injection.

use super::pause::Pause;
use crate::Timestamp;
use crate::channel::ECHO_PATIENCE;
use crate::echo::MAX_WATCHES;

/// Deliveries of one agent that may await their verdict at the same time.
pub const MAX_OUTSTANDING: usize = MAX_WATCHES;

/// Follows the injections into one agent. Verdicts of older deliveries may still be outstanding.
#[derive(Debug, Clone, Default)]
pub struct InjectionGate {
    /// The adaptive pause. The caller reports outcomes to it.
    pub pause: Pause,
    last: Last,
}

#[derive(Debug, Clone, Copy, Default)]
enum Last {
    #[default]
    None,
    Writing {
        started_at: Timestamp,
        has_verdict: bool,
    },
    Written {
        started_at: Timestamp,
        entered_at: Timestamp,
        has_verdict: bool,
    },
}

/// The condition for the next injection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InjectionStart {
    /// At once.
    Now,
    /// At this instant, or at an earlier verdict.
    At(Timestamp),
    /// As soon as text and Enter of the last injection were written.
    AfterEnter,
    /// As soon as a delivery gets its verdict: [`MAX_OUTSTANDING`] await theirs.
    AfterVerdict,
}

impl InjectionGate {
    /// A gate for an agent into which nothing was typed yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The first byte of an injection was handed to the terminal.
    pub fn started(&mut self, at: Timestamp) {
        self.last = Last::Writing { started_at: at, has_verdict: false };
    }

    /// Text and Enter of the last injection were taken by the terminal.
    pub fn on_entered(&mut self, at: Timestamp) {
        if let Last::Writing { started_at, has_verdict } = self.last {
            self.last = Last::Written { started_at, entered_at: at, has_verdict };
        }
    }

    /// The last injection has its verdict, or its delivery ended in another way.
    pub fn on_verdict(&mut self) {
        match &mut self.last {
            Last::None => {}
            Last::Writing { has_verdict, .. } | Last::Written { has_verdict, .. } => *has_verdict = true,
        }
    }

    /// Returns the condition for the next injection. With `waits_for_verdict`
    /// ([`Strategy::waits_for_verdict`](crate::strategy::Strategy::waits_for_verdict)) it waits up to 2 s for the
    /// verdict on the last one; otherwise only for the pause.
    pub fn next_start(&self, now: Timestamp, outstanding: usize, waits_for_verdict: bool) -> InjectionStart {
        if outstanding >= MAX_OUTSTANDING {
            return InjectionStart::AfterVerdict;
        }
        match self.last {
            Last::None => InjectionStart::Now,
            Last::Writing { .. } => InjectionStart::AfterEnter,
            Last::Written { started_at, entered_at, has_verdict } => {
                let mut earliest = entered_at + self.pause.duration();
                if waits_for_verdict && !has_verdict {
                    earliest = earliest.max(started_at + ECHO_PATIENCE);
                }
                if now >= earliest { InjectionStart::Now } else { InjectionStart::At(earliest) }
            }
        }
    }
}
