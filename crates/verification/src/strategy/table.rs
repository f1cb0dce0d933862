//! The agent programs known to us. Rows from `claude` to `goose` are the proposal's that this verification
//! implements; the others are our choice.

use super::{EchoSupport, Strategy};
use crate::delivery::{MAX_REINJECTIONS, UnverifiedPolicy};
use crate::{Channel, RequiredChannels};

const ECHO_AND_FILE: RequiredChannels = RequiredChannels { echo: true, file: true, ..RequiredChannels::NONE };

/// Programs of which a typed line is always visible: silence means that it did not arrive.
const RELIABLE: Strategy = Strategy {
    echo: EchoSupport::Reliable,
    primary: Channel::Echo,
    required: ECHO_AND_FILE,
    max_reinjections: MAX_REINJECTIONS,
    silent: UnverifiedPolicy::Failed,
};

/// Programs that show a typed line only sometimes: a second copy would do more harm than a missing echo.
const PARTIAL: Strategy = Strategy {
    echo: EchoSupport::Partial,
    primary: Channel::File,
    required: ECHO_AND_FILE,
    max_reinjections: 0,
    silent: UnverifiedPolicy::Settled,
};

impl Strategy {
    /// Returns the strategy for a harness by the name of its entry; [`Self::OTHER`] for names that are not known.
    pub fn builtin(harness: &str) -> Self {
        match harness {
            "claude" => Self { required: RequiredChannels { mcp: true, ..ECHO_AND_FILE }, ..RELIABLE },
            "aider" => RELIABLE,
            "codex" | "gemini" => PARTIAL,
            "goose" | "cursor" | "droid" | "grok" | "opencode" => Self { echo: EchoSupport::Unknown, ..PARTIAL },
            _ => Self::OTHER,
        }
    }

    /// Agents without a terminal, driven through an API of their own.
    pub const HEADLESS: Self = Self {
        echo: EchoSupport::None,
        primary: Channel::Api,
        required: RequiredChannels { api: true, ..RequiredChannels::NONE },
        max_reinjections: 0,
        silent: UnverifiedPolicy::Failed,
    };

    /// Programs without an entry. Whatever comes is accepted, nothing is expected, and nothing is typed twice.
    pub const OTHER: Self = Self {
        echo: EchoSupport::Unknown,
        primary: Channel::Echo,
        required: RequiredChannels::NONE,
        max_reinjections: 0,
        silent: UnverifiedPolicy::Written,
    };
}
