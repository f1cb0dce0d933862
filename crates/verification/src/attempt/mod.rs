//! [`Attempt`]: one injection of a message and the signals that follow it.
//!
//! Signals and time go in, [`AttemptEffect`]s come out. The first signal of an acknowledging channel is the ack, at
//! most one; stronger signals later are upgrades; silence is a time-out. [`Delivery`](crate::delivery::Delivery)
//! decides about the consequences.

use std::time::Duration;

use crate::channel::{ECHO_PATIENCE, SIGNAL_WINDOW};
use crate::level::level_of;
use crate::{Channel, Level, Proof, RequiredChannels, Timestamp};

/// Once per delivery, an agent that floods its output gets this much more time to show an echo: the message waits
/// behind the output that the agent has still to write. Our choice.
pub const ECHO_EXTENSION: Duration = Duration::from_secs(5);

/// Expectations of one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttemptRules {
    /// Channels whose silence counts.
    pub required: RequiredChannels,
    /// An echo counts if it comes less than this long after the first byte: [`SIGNAL_WINDOW`], or less where it was
    /// learned that agents confirm by file.
    pub echo_window: Duration,
}

/// Consequence of a signal or of time. Not every signal has one: repetitions and weaker signals are absorbed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptEffect {
    /// The message is acknowledged. At most once, and never after a time-out.
    Acknowledge(Proof),
    /// A higher level than before.
    Upgrade(Proof),
    /// Nothing came in time. At most once, and never after an ack. Signals within the window still upgrade.
    TimeOut,
    /// The signal does not count.
    Ignore(IgnoredSignal),
}

/// Reason why a signal does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IgnoredSignal {
    /// It is older than the injection.
    BeforeInjection,
    /// It came after the window of its channel.
    AfterWindow,
    /// Activity before the agent was shown to have the message.
    ActivityBeforeAck,
    /// The delivery has failed.
    AfterFailure,
    /// The agent has ended.
    AfterAgentEnded,
}

impl IgnoredSignal {
    /// The word for the reason in logs and figures.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BeforeInjection => "before_injection",
            Self::AfterWindow => "after_window",
            Self::ActivityBeforeAck => "activity_before_ack",
            Self::AfterFailure => "after_failure",
            Self::AfterAgentEnded => "after_agent_ended",
        }
    }
}

/// One injection. Its time begins when the first byte is handed to the terminal.
#[derive(Debug, Clone)]
pub struct Attempt {
    rules: AttemptRules,
    started_at: Timestamp,
    entered_at: Option<Timestamp>,
    extension: Duration,
    verdict: Verdict,
    strongest: Option<Proof>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Pending,
    Acknowledged,
    TimedOut,
}

impl Attempt {
    /// Begins an attempt at the instant at which its first byte is handed to the terminal.
    pub fn new(rules: AttemptRules, started_at: Timestamp) -> Self {
        Self {
            rules,
            started_at,
            entered_at: None,
            extension: Duration::ZERO,
            verdict: Verdict::Pending,
            strongest: None,
        }
    }

    /// Returns the instant of the first byte.
    pub fn started_at(&self) -> Timestamp {
        self.started_at
    }

    /// Returns the instant at which text and Enter were written; `None` before.
    pub fn entered_at(&self) -> Option<Timestamp> {
        self.entered_at
    }

    /// Returns the highest level so far.
    pub fn level(&self) -> Level {
        level_of(self.strongest)
    }

    /// Returns the signal that proves the level; `None` at [`Level::Injected`].
    pub fn strongest(&self) -> Option<Proof> {
        self.strongest
    }

    /// Returns `true` if the attempt is neither acknowledged nor timed out.
    pub fn is_pending(&self) -> bool {
        self.verdict == Verdict::Pending
    }

    /// Notes that text and Enter were taken by the terminal. The first call counts. The instants of the first byte and
    /// of the last one are read by different tasks, so the latter may be the earlier one by a little.
    pub fn enter_written(&mut self, at: Timestamp) {
        self.entered_at.get_or_insert(at.max(self.started_at));
    }

    /// Takes a signal. Calls come in the order of their instants; a signal that is late in the order of calls is
    /// judged by its own instant and never lowers a level.
    pub fn signal(&mut self, at: Timestamp, channel: Channel) -> Vec<AttemptEffect> {
        // Time first: a signal that comes after the end of the attempt upgrades, but cannot acknowledge any more.
        let mut effects: Vec<AttemptEffect> = self.tick(at).into_iter().collect();
        let effect = match self.check(at, channel) {
            Err(reason) => Some(AttemptEffect::Ignore(reason)),
            Ok(proof) if proof.level() <= self.level() => None,
            Ok(proof) => {
                self.strongest = Some(proof);
                match self.verdict {
                    Verdict::Pending => {
                        self.verdict = Verdict::Acknowledged;
                        Some(AttemptEffect::Acknowledge(proof))
                    }
                    Verdict::Acknowledged | Verdict::TimedOut => Some(AttemptEffect::Upgrade(proof)),
                }
            }
        };
        effects.extend(effect);
        effects
    }

    /// Notes that time has passed. Returns [`AttemptEffect::TimeOut`] when the attempt ends without an ack.
    pub fn tick(&mut self, at: Timestamp) -> Option<AttemptEffect> {
        let is_over = self.times_out_at().is_some_and(|end| at >= end);
        if self.verdict != Verdict::Pending || !is_over {
            return None;
        }
        self.verdict = Verdict::TimedOut;
        Some(AttemptEffect::TimeOut)
    }

    /// Gives the echo of a pending attempt [`ECHO_EXTENSION`] more time. `false` if the attempt is not pending at `at`
    /// or has its extension already.
    pub fn extend_echo(&mut self, at: Timestamp) -> bool {
        let is_over = self.times_out_at().is_some_and(|end| at >= end);
        let extends = self.is_pending() && !is_over && self.extension.is_zero();
        if extends {
            self.extension = ECHO_EXTENSION;
        }
        extends
    }

    /// Returns the instant at which the attempt ends without an ack. With no required channel that is 2 s after Enter,
    /// and unknown before Enter was written: silence means nothing, so there is nothing to wait for.
    pub fn times_out_at(&self) -> Option<Timestamp> {
        if self.rules.required.is_empty() {
            return self.entered_at.map(|entered_at| entered_at + ECHO_PATIENCE + self.extension);
        }
        let signals_end = self.started_at + SIGNAL_WINDOW;
        Some(if self.rules.required.echo { signals_end.max(self.echo_ends_at()) } else { signals_end })
    }

    /// An echo that is read at this instant or later does not count.
    pub fn echo_ends_at(&self) -> Timestamp {
        // Without a required channel the extension moves the end of the attempt, not the window.
        let extension = if self.rules.required.is_empty() { Duration::ZERO } else { self.extension };
        self.started_at + self.rules.echo_window + extension
    }

    /// From this instant on no signal counts any more.
    pub fn signals_end_at(&self) -> Timestamp {
        (self.started_at + SIGNAL_WINDOW).max(self.echo_ends_at())
    }

    /// Returns the proof that a signal is, or the reason why it does not count.
    pub(crate) fn check(&self, at: Timestamp, channel: Channel) -> Result<Proof, IgnoredSignal> {
        let elapsed = at.checked_duration_since(self.started_at).ok_or(IgnoredSignal::BeforeInjection)?;
        let window_end = match channel {
            Channel::Echo => self.echo_ends_at(),
            Channel::File | Channel::Mcp | Channel::Api | Channel::Activity => self.started_at + SIGNAL_WINDOW,
        };
        if at >= window_end {
            return Err(IgnoredSignal::AfterWindow);
        }
        if !channel.acknowledges() && self.level() == Level::Injected {
            return Err(IgnoredSignal::ActivityBeforeAck);
        }
        Ok(Proof { channel, elapsed })
    }
}

#[cfg(test)]
mod tests;
