//! [`AgentError`]: failed operations on an agent. The API maps it to codes.

use crate::{
    engine::{EngineError, is_permanent},
    engine_link::LinkError,
};

/// Failed operation on an agent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AgentError {
    #[error("no agent named \"{name}\" runs here")]
    NotFound { name: String },
    #[error("an agent named \"{name}\" already exists")]
    AlreadyExists { name: String },
    #[error("the agent has no terminal: its runtime is headless")]
    UnsupportedRuntime,
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    SpawnFailed(String),
    #[error("this broker hosts at most {max} agents")]
    CapacityExceeded { max: u32 },
    #[error("the agent does not take its input, and nothing of it was typed")]
    NotTaken,
    #[error("the agent has taken a part of its input and gets the rest when it reads again: do not repeat it")]
    PartlyTaken,
    #[error("the agent has ended")]
    Disappeared,
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("the broker's state cannot be written: {0}")]
    State(String),
}

impl AgentError {
    /// Returns whether a retry of the same operation may succeed, without a change here.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            // The engine may come back, and a full disk may get room.
            Self::Link(LinkError::Unavailable) | Self::State(_) => true,
            Self::Link(LinkError::Refused(refused)) => !is_permanent(&refused.code),
            Self::Engine(error) => error.is_transient(),
            Self::NotFound { .. }
            | Self::AlreadyExists { .. }
            | Self::UnsupportedRuntime
            | Self::Invalid(_)
            | Self::SpawnFailed(_)
            | Self::CapacityExceeded { .. }
            | Self::NotTaken
            | Self::PartlyTaken
            | Self::Disappeared => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use relay_wire::nodes::engine_frame::ErrorReply;

    use super::*;

    #[test]
    fn only_permanent_refusals_end_the_attempts() {
        let refused = |code: &str| {
            let reply = serde_json::json!({ "id": "b1", "code": code, "message": "no" });
            let reply: ErrorReply = serde_json::from_value(reply).expect("an error frame");
            AgentError::Link(LinkError::Refused(reply))
        };
        for code in ["workspace_busy", "database_overloaded", "internal_error", "rate_limit_exceeded", "of tomorrow"] {
            assert!(refused(code).is_transient(), "{code}");
        }
        for code in ["agent_location_conflict", "agent_already_exists", "invalid_request"] {
            assert!(!refused(code).is_transient(), "{code}");
        }
    }
}
