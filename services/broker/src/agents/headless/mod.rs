//! Agents without a terminal: a program that is started for each message, or a session of an app server. One message at
//! a time; the answer of the program or the server is the proof that it arrived. Main types: [`Headless`], the way to
//! the agent, and [`HeadlessTask`], its task.

mod app_server;
mod program;
mod task;

use relay_verification::delivery::FailureReason;
use serde::{Deserialize, Serialize};

pub(crate) use app_server::AppServer;
pub(super) use task::HeadlessTask;

/// Way to a headless agent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Headless {
    /// The program of the agent, started with these arguments in front of its own and the message behind them.
    Program(Vec<String>),
    AppServer(AppServer),
}

/// Failed handover of a message to the program or the server.
#[derive(Debug, thiserror::Error)]
#[error("{problem}")]
struct HandoverError {
    reason: FailureReason,
    problem: String,
}

impl HandoverError {
    /// The program or the server has not said that it has the message.
    fn new(problem: String) -> Self {
        Self { reason: FailureReason::VerificationFailed, problem }
    }
}
