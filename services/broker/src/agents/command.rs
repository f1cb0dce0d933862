//! [`AgentCommand`]: everything that others ask of an agent's task, and [`AgentHandle`], through which they do.

use std::sync::Arc;

use bytes::Bytes;
use relay_pty::{PtyError, Terminal};
use serde::Serialize;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Duration, timeout};

use super::{AgentError, AgentInfo, AgentSpec, ResultSchema};
use crate::{
    injection::{AckAnswer, DeliveryMode},
    mailbox::Message,
};

/// Commands that wait for one agent's task. Callers wait for room beyond it.
pub(super) const COMMANDS: usize = 64;
/// The program has so long to take input.
const INPUT_TIMEOUT: Duration = Duration::from_secs(10);

/// Request to an agent's task.
#[derive(Debug)]
pub(crate) enum AgentCommand {
    SetMode {
        mode: DeliveryMode,
        reply: oneshot::Sender<Drained>,
    },
    Flush {
        reply: oneshot::Sender<usize>,
    },
    Pending {
        reply: oneshot::Sender<Vec<PendingMessage>>,
    },
    Unsettled {
        reply: oneshot::Sender<Vec<(PendingMessage, u32)>>,
    },
    Ack {
        delivery_id: Option<String>,
        event_id: Option<String>,
        reply: oneshot::Sender<AckAnswer>,
    },
    /// Types a message that failed once more.
    Redeliver {
        message: Box<Message>,
        reply: oneshot::Sender<()>,
    },
    /// A person has typed; the keys are in the terminal already.
    Keys(Bytes),
    Release {
        reason: Option<String>,
        reply: oneshot::Sender<()>,
    },
}

/// Result of a change of mode.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Drained {
    pub(crate) mode: DeliveryMode,
    pub(crate) count: usize,
}

/// A message that waits, as drivers are shown it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct PendingMessage {
    pub(crate) from: String,
    pub(crate) body: String,
    pub(crate) target: String,
    pub(crate) priority: u8,
    pub(crate) mode: &'static str,
    pub(crate) queued_at_ms: i64,
    pub(crate) event_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) thread_id: Option<String>,
    pub(crate) workspace_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) workspace_alias: Option<String>,
    pub(crate) delivery_id: String,
}

/// A running agent. Clones are the same agent.
#[derive(Debug, Clone)]
pub(crate) struct AgentHandle {
    pub(crate) spec: Arc<AgentSpec>,
    pub(crate) agent_id: String,
    pub(crate) token: String,
    pub(crate) harness: String,
    /// Secret by which the agent confirms messages.
    pub(crate) ack_token: String,
    /// Secret by which the agent hands in its result.
    pub(crate) result_token: String,
    /// Shape of its result, if one is asked for.
    pub(crate) result_schema: Option<Arc<ResultSchema>>,
    pub(crate) info: watch::Receiver<AgentInfo>,
    pub(super) commands: mpsc::Sender<AgentCommand>,
}

impl AgentHandle {
    /// Sends a command and waits for its answer.
    pub(crate) async fn ask<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> AgentCommand,
    ) -> Result<T, AgentError> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.map_err(|_| AgentError::Disappeared)?;
        answer.await.map_err(|_| AgentError::Disappeared)
    }

    /// The terminal of the running process.
    pub(crate) fn terminal(&self) -> Result<Terminal, AgentError> {
        if self.spec.headless.is_some() {
            return Err(AgentError::UnsupportedRuntime);
        }
        self.info.borrow().terminal.clone().ok_or(AgentError::Disappeared)
    }

    /// Types keys and waits until the program's terminal has taken them. Returns their number of bytes.
    pub(crate) async fn type_keys(&self, keys: Bytes) -> Result<usize, AgentError> {
        let terminal = self.terminal()?;
        let count = keys.len();
        let typing = async {
            let mut ticket = terminal.write_input(keys.clone()).await?;
            ticket.written().await
        };
        match timeout(INPUT_TIMEOUT, typing).await {
            Ok(Ok(_)) => {
                // A full queue means a busy agent, which can do without the hint.
                let _ = self.commands.try_send(AgentCommand::Keys(keys));
                Ok(count)
            }
            Ok(Err(PtyError::Ended)) => Err(AgentError::Disappeared),
            Ok(Err(error)) => Err(AgentError::SpawnFailed(error.to_string())),
            Err(_) => Err(AgentError::NotTaken),
        }
    }
}
