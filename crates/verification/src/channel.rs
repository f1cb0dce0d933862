//! [`Channel`]: the ways in which evidence of a message arrives, [`RequiredChannels`], and the marks in time that all
//! channels share.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Level;

/// Without an echo for this long, file or MCP is the primary channel and the next message may be typed.
/// From the proposal; published brokers show most real echoes well before it.
pub const ECHO_PATIENCE: Duration = Duration::from_secs(2);

/// A signal counts if it comes less than this long after the first byte of the injection. From the proposal.
pub const SIGNAL_WINDOW: Duration = Duration::from_secs(15);

/// A way in which evidence arrives. All channels run in parallel from the first byte of the injection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Channel {
    /// The message appeared in the agent's output.
    Echo,
    /// The agent wrote an ack file.
    File,
    /// The agent called the tool `relay_ack`, or read the message through MCP.
    Mcp,
    /// The own API of a headless agent took the message.
    Api,
    /// The agent works on something, after it was shown to have the message. Never an ack by itself.
    Activity,
}

impl Channel {
    /// The level that a signal on this channel proves.
    pub fn level(self) -> Level {
        match self {
            Self::Echo => Level::Echoed,
            Self::File | Self::Mcp | Self::Api => Level::InContext,
            Self::Activity => Level::Active,
        }
    }

    /// Returns `true` if a signal on this channel may acknowledge a message. Activity says that an agent works, not
    /// on which message.
    pub fn acknowledges(self) -> bool {
        match self {
            Self::Echo | Self::File | Self::Mcp | Self::Api => true,
            Self::Activity => false,
        }
    }

    /// The word for the method in events and figures. Without any signal the method is [`INJECTED_METHOD`].
    pub fn method(self) -> &'static str {
        match self {
            Self::Echo => "echo",
            Self::File => "file",
            Self::Mcp => "mcp",
            Self::Api => "api",
            Self::Activity => "activity",
        }
    }

    /// The confidence word in events. Without any signal it is [`INJECTED_METHOD`].
    pub fn confidence(self) -> &'static str {
        match self {
            Self::Echo => "echoed",
            Self::File => "file_acked",
            Self::Mcp => "mcp_acked",
            Self::Api => "api_acked",
            Self::Activity => "active",
        }
    }
}

/// Method and confidence word of a message for which no signal came.
pub const INJECTED_METHOD: &str = "injected";

/// The channels whose silence counts against a delivery. Signals on other channels are accepted all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RequiredChannels {
    /// The agent is expected to show the message.
    pub echo: bool,
    /// The agent is expected to write an ack file.
    pub file: bool,
    /// The agent is expected to call `relay_ack`.
    pub mcp: bool,
    /// The own API of a headless agent is expected to answer.
    pub api: bool,
}

impl RequiredChannels {
    /// No channel at all: nothing can be concluded from silence.
    pub const NONE: Self = Self { echo: false, file: false, mcp: false, api: false };

    /// Returns `true` if no channel is required.
    pub fn is_empty(self) -> bool {
        self == Self::NONE
    }

    /// Returns the channels that are in both sets.
    pub fn intersection(self, other: Self) -> Self {
        Self {
            echo: self.echo && other.echo,
            file: self.file && other.file,
            mcp: self.mcp && other.mcp,
            api: self.api && other.api,
        }
    }
}
