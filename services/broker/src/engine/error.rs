//! [`EngineError`]: failed calls of the engine.

use std::error::Error as _;

/// Refusals of a registration that a retry does not change. Any other is transient: the storage was unavailable, a
/// limit was reached, or a later engine has a code that is not known here.
const PERMANENT_REFUSALS: [&str; 8] = [
    "invalid_request",
    "invalid_message",
    "agent_already_exists",
    "agent_identity_mismatch",
    "agent_location_conflict",
    "agent_provider_conflict",
    "spawn_denied",
    "spawn_failed",
];

/// Code of a refusal that has none.
pub(super) const NO_CODE: &str = "http_error";

/// Returns whether a refusal with this code is permanent.
pub(crate) fn is_permanent(code: &str) -> bool {
    PERMANENT_REFUSALS.contains(&code)
}

/// Failed call of the engine.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum EngineError {
    /// No answer: the connection failed or broke.
    #[error("cannot reach {url}: {reason}")]
    Unreachable { url: String, reason: String },
    /// No answer in time.
    #[error("{url} has not answered in time")]
    TimedOut { url: String },
    /// The engine refused the request.
    #[error("the engine refused the request: {message} ({code}, {status})")]
    Refused { status: u16, code: String, message: String },
    /// The answer is not what the protocol says.
    #[error("the engine's answer cannot be read: {0}")]
    Unreadable(String),
}

impl EngineError {
    pub(super) fn from_transport(url: &str, error: &reqwest::Error) -> Self {
        if error.is_timeout() {
            return Self::TimedOut { url: url.to_owned() };
        }
        // The innermost cause is the operating system's reason.
        let mut reason = error.to_string();
        let mut cause = error.source();
        while let Some(next) = cause {
            reason = next.to_string();
            cause = next.source();
        }
        Self::Unreachable { url: url.to_owned(), reason }
    }

    /// Status and code of a refusal.
    pub(crate) fn refusal(&self) -> Option<(u16, &str)> {
        match self {
            Self::Refused { status, code, .. } => Some((*status, code)),
            Self::Unreachable { .. } | Self::TimedOut { .. } | Self::Unreadable(_) => None,
        }
    }

    /// Returns whether the engine refused with this code.
    pub(crate) fn has_code(&self, code: &str) -> bool {
        self.refusal().is_some_and(|(_, refused)| refused == code)
    }

    /// Returns whether a retry may succeed.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            // What cannot be read is not of the engine: a proxy in front of it has answered.
            Self::Unreachable { .. } | Self::TimedOut { .. } | Self::Unreadable(_) => true,
            // The engine's refusals have a code: one without a code comes from a proxy as well.
            Self::Refused { status, code, .. } => *status >= 500 || *status == 429 || code == NO_CODE,
        }
    }
}
