//! [`AgentError`]: why an operation on an agent failed. The API maps it to codes.

use crate::{engine::EngineError, engine_link::LinkError};

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
    #[error("the agent does not take its input")]
    NotTaken,
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
    /// Returns whether the same operation may succeed later, without a change here.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Link(LinkError::Unavailable) | Self::State(_) => true,
            Self::Engine(error) => error.is_passing(),
            Self::NotFound { .. }
            | Self::AlreadyExists { .. }
            | Self::UnsupportedRuntime
            | Self::Invalid(_)
            | Self::SpawnFailed(_)
            | Self::CapacityExceeded { .. }
            | Self::NotTaken
            | Self::Disappeared
            | Self::Link(LinkError::Refused(_)) => false,
        }
    }
}
