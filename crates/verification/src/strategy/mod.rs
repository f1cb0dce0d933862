//! [`Strategy`]: the expectations of an agent program, and the [`DeliveryRules`] that follow for one delivery.
//!
//! [`Strategy::builtin`] has the agent programs known to us; the broker's harness table may change each entry.
//! [`Learned`] corrects a strategy by the observed behaviour of the program.

mod learning;
mod table;

use serde::{Deserialize, Serialize};

pub use learning::{DeliveryRecord, Learned, LearnedChange, SHORT_ECHO_WINDOW};

use crate::attempt::AttemptRules;
use crate::delivery::{DeliveryRules, MAX_REINJECTIONS, UnverifiedPolicy};
use crate::{Channel, Level, RequiredChannels};

/// Quality of a program's echo of typed text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EchoSupport {
    /// Always.
    Reliable,
    /// Not always, or not in full.
    Partial,
    /// Not known, or different from program to program.
    Unknown,
    /// There is no terminal.
    None,
}

/// Expectations of one agent program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Strategy {
    /// Quality of its echo.
    pub echo: EchoSupport,
    /// The channel that normally comes first. A figure only.
    pub primary: Channel,
    /// Channels whose silence counts, where they can work.
    pub required: RequiredChannels,
    /// Upper bound of re-injections; more than [`MAX_REINJECTIONS`] counts as that.
    pub max_reinjections: u32,
    /// Treatment of silence.
    pub silent: UnverifiedPolicy,
}

impl Strategy {
    /// Returns the rules for one delivery to an agent of which `usable` channels can work.
    ///
    /// The file channel can work if the agent was shown the hint, its ack folder exists and the delivery id is a
    /// plain file name ([`AckFile::path`](crate::ack_file::AckFile::path)); MCP, if our server was configured for the
    /// agent. Echo and the API of a headless agent always can.
    pub fn rules(&self, usable: RequiredChannels, learned: &Learned, minimum: Level) -> DeliveryRules {
        let mut required = self.required.intersection(usable);
        let mut max_reinjections = self.max_reinjections.min(MAX_REINJECTIONS);
        let mut policy = self.silent;
        if !learned.is_echo_reliable() {
            required.echo = false;
            max_reinjections = 0;
            // Silence is no failure where echoes get lost. Without a terminal there is no prompt at which to settle.
            if policy == UnverifiedPolicy::Failed && self.echo != EchoSupport::None {
                policy = UnverifiedPolicy::Settled;
            }
        }
        if self.echo != EchoSupport::Reliable {
            max_reinjections = 0;
        }
        if required.is_empty() && policy != UnverifiedPolicy::Strict {
            // Nothing could ever confirm it.
            policy = UnverifiedPolicy::Written;
        }
        let attempt = AttemptRules { required, echo_window: learned.echo_window() };
        DeliveryRules { attempt, max_reinjections, policy, minimum }
    }

    /// Returns `true` if the next injection waits for the verdict on the one before: only where a verdict is expected,
    /// and not where it was learned that the echo does not come.
    pub fn waits_for_verdict(&self, learned: &Learned) -> bool {
        !self.required.is_empty() && learned.is_echo_reliable()
    }
}

#[cfg(test)]
mod tests;
