//! [`DeliveryEffect`]: the work that the state machine leaves to its caller.

use crate::attempt::IgnoredSignal;
use crate::{Channel, Proof};

/// Consequence of a signal, of time, or of the agent's end.
///
/// `Verified` and `Closed` acknowledge the message; there is at most one of them, and never after `Failed` or
/// `Cancelled`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryEffect {
    /// The message is verified.
    Verified {
        /// The signal.
        proof: Proof,
        /// The attempt that it came in, counted from 1.
        attempt: u32,
    },
    /// A higher level came after the verdict. Level 3 says that the agent acts on the message.
    Upgraded {
        /// The signal.
        proof: Proof,
        /// The last attempt.
        attempt: u32,
    },
    /// Type the same line with the same ids again, if [`Delivery::begin_attempt`](super::Delivery::begin_attempt)
    /// still allows it when the terminal is ready.
    Reinject {
        /// Number of the new attempt, from 2.
        attempt: u32,
    },
    /// An attempt ended without a signal and no other begins now. The ack waits.
    Held,
    /// The message is acknowledged without being verified.
    Closed {
        /// Why it is acknowledged.
        reason: UnverifiedReason,
        /// The late signal, for [`UnverifiedReason::Late`]. The level rises; the delivery stays unverified.
        proof: Option<Proof>,
    },
    /// The delivery has failed for good. Its failure must be reported before the cumulative ack passes it.
    Failed(FailureReason),
    /// The agent has ended: nothing is acknowledged, and its next process gets the message again.
    Cancelled,
    /// A signal that does not count.
    Ignored {
        /// Channel of the signal.
        channel: Channel,
        /// Why it does not count.
        reason: IgnoredSignal,
    },
}

/// Why an unverified message is acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UnverifiedReason {
    /// No channel is required, so nothing could confirm it.
    NoChannel,
    /// The agent rested at its prompt after the write.
    SettledIdle,
    /// A signal came after the window.
    Late,
}

impl UnverifiedReason {
    /// The word for the reason in events.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoChannel => "no_channel",
            Self::SettledIdle => "settled_idle",
            Self::Late => "late",
        }
    }
}

/// Why a delivery failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FailureReason {
    /// No signal, or none of the level that the message demands.
    VerificationFailed,
    /// The terminal never took the text and its Enter.
    WriteStalled,
    /// The message is longer than an argument of a program may be.
    MessageTooLong,
    /// The program that was started for the message has not ended in time.
    RunTimeout,
}

impl FailureReason {
    /// The word for the reason in events and towards the engine.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::VerificationFailed => "verification_failed",
            Self::WriteStalled => "write_stalled",
            Self::MessageTooLong => "message_too_long",
            Self::RunTimeout => "run_timeout",
        }
    }
}
