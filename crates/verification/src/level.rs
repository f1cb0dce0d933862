//! [`Level`]: the proven progress of a message, and [`Proof`]: the signal that showed it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Channel;

/// Progress of a message as far as it is proven. Levels only rise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub enum Level {
    /// Text and Enter were taken by the terminal. Proves nothing about the agent.
    #[default]
    #[serde(rename = "L0")]
    Injected,
    /// The message appeared in the agent's output.
    #[serde(rename = "L1")]
    Echoed,
    /// The agent has the message in its context.
    #[serde(rename = "L2")]
    InContext,
    /// The agent acts on the message.
    #[serde(rename = "L3")]
    Active,
}

impl Level {
    /// The word for this level in events and state files: `L0` to `L3`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Injected => "L0",
            Self::Echoed => "L1",
            Self::InContext => "L2",
            Self::Active => "L3",
        }
    }
}

/// A signal that raised the level of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Proof {
    /// Channel on which the signal came; it determines the level.
    pub channel: Channel,
    /// Time from the first byte of the injection to the signal.
    pub elapsed: Duration,
}

impl Proof {
    /// The level that the signal proves.
    pub fn level(self) -> Level {
        self.channel.level()
    }
}

/// Level of a proof; [`Level::Injected`] without one.
pub(crate) fn level_of(proof: Option<Proof>) -> Level {
    proof.map_or(Level::Injected, Proof::level)
}
