//! [`AgentCommand`]: everything that others ask of an agent's task, and [`AgentHandle`], through which they do.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use relay_pty::{PtyError, Terminal, WriteTicket};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::time::{Duration, Instant, timeout_at};

use super::{AgentBinding, AgentError, AgentInfo, AgentSpec, ResultSchema};
use crate::{
    api::types::PendingMessage,
    injection::{AckAnswer, DeliveryMode},
    mailbox::Message,
};

/// Commands that wait for one agent's task. Callers wait for room beyond it.
pub(super) const COMMANDS: usize = 64;
/// Streams of keys to one agent.
pub(super) const INPUT_STREAMS: usize = 16;
/// Maximum time for the program to take input.
const INPUT_TIMEOUT: Duration = Duration::from_secs(10);

/// Request to an agent's task.
#[derive(Debug)]
pub(crate) enum AgentCommand {
    SetMode {
        mode: DeliveryMode,
        reply: oneshot::Sender<ModeChange>,
    },
    Flush {
        reply: oneshot::Sender<usize>,
    },
    Pending {
        reply: oneshot::Sender<Vec<PendingMessage>>,
    },
    /// Messages that were typed and have no outcome, and those that wait.
    Undelivered {
        reply: oneshot::Sender<Vec<UndeliveredMessage>>,
    },
    Ack {
        delivery_id: Option<String>,
        event_id: Option<String>,
        reply: oneshot::Sender<AckAnswer>,
    },
    /// Types a message that failed once more. The answer is `false` if its dead letter was taken before.
    Redeliver {
        delivery_id: String,
        reply: oneshot::Sender<bool>,
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
pub(crate) struct ModeChange {
    pub(crate) mode: DeliveryMode,
    pub(crate) count: usize,
}

/// A message without an outcome, without its body: many of them are shown at once.
#[derive(Debug, Clone)]
pub(crate) struct UndeliveredMessage {
    pub(crate) delivery_id: String,
    pub(crate) event_id: String,
    pub(crate) from: String,
    pub(crate) target: String,
    /// 0 until it is typed.
    pub(crate) attempts: u32,
    pub(crate) queued_at_ms: i64,
}

impl UndeliveredMessage {
    pub(super) fn new(message: &Message, attempts: u32) -> Self {
        Self {
            delivery_id: message.delivery_id.clone(),
            event_id: message.event_id.clone(),
            from: message.author.name.clone(),
            target: message.target.clone(),
            attempts,
            queued_at_ms: message.queued_at_ms,
        }
    }
}

/// A running agent. Clones are the same agent.
#[derive(Debug, Clone)]
pub(crate) struct AgentHandle {
    pub(crate) spec: Arc<AgentSpec>,
    pub(crate) binding: Arc<AgentBinding>,
    pub(crate) token: String,
    pub(crate) harness: String,
    /// Secret by which the agent confirms messages.
    pub(crate) ack_token: String,
    /// Secret by which the agent hands in its result.
    pub(crate) result_token: String,
    /// Shape of its result, if one is asked for.
    pub(crate) result_schema: Option<Arc<ResultSchema>>,
    pub(crate) info: watch::Receiver<AgentInfo>,
    /// Channels that it is in.
    pub(crate) channels: Arc<Mutex<Vec<String>>>,
    /// Places for streams of keys.
    pub(crate) input_streams: Arc<Semaphore>,
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
        // The reply is dropped if the task gives none, or ends.
        answer.await.map_err(|_| AgentError::Disappeared)
    }

    /// Commands that wait for the agent's task.
    pub(crate) fn waiting_commands(&self) -> usize {
        self.commands.max_capacity() - self.commands.capacity()
    }

    /// Channels that it is in now.
    pub(crate) fn channels(&self) -> Vec<String> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes the channels that it is in now.
    pub(crate) fn set_channels(&self, channels: Vec<String>) {
        *self.channels.lock().unwrap_or_else(PoisonError::into_inner) = channels;
    }

    /// The terminal of the running process.
    pub(crate) fn terminal(&self) -> Result<Terminal, AgentError> {
        if self.spec.headless.is_some() {
            return Err(AgentError::UnsupportedRuntime);
        }
        self.info.borrow().terminal.clone().ok_or(AgentError::Disappeared)
    }

    /// Types keys and waits until the program's terminal has taken them. Returns their number of bytes. Keys that are
    /// not taken in time are not typed later.
    pub(crate) async fn type_keys(&self, keys: Bytes) -> Result<usize, AgentError> {
        // One deadline for both waits, for room in the queue and for the write.
        let deadline = Instant::now() + INPUT_TIMEOUT;
        let queued = timeout_at(deadline, self.terminal()?.write_input(keys.clone())).await;
        let ticket = queued.map_err(|_| AgentError::NotTaken)?.map_err(write_error)?;
        wait_written(ticket, deadline).await?;
        // Only keys that the program has received: the pipeline types no message into a line that they have begun.
        self.note_keys(&keys);
        Ok(keys.len())
    }

    /// Types keys as [`Self::type_keys`], as long as the caller waits. Keys that it has given up are not typed later.
    pub(crate) async fn type_keys_unhurried(&self, keys: Bytes) -> Result<usize, AgentError> {
        let ticket = self.terminal()?.write_input(keys.clone()).await.map_err(write_error)?;
        PendingWrite(Some(ticket)).written().await.map_err(write_error)?;
        self.note_keys(&keys);
        Ok(keys.len())
    }

    fn note_keys(&self, keys: &Bytes) {
        // A full queue means a busy agent, which can do without the hint.
        let _ = self.commands.try_send(AgentCommand::Keys(keys.clone()));
    }
}

/// Waits until an entry was written, and takes it back at the deadline: its sender is going to repeat it.
pub(crate) async fn wait_written(ticket: WriteTicket, deadline: Instant) -> Result<(), AgentError> {
    let mut pending = PendingWrite(Some(ticket));
    match timeout_at(deadline, pending.written()).await {
        Ok(written) => written.map_err(write_error),
        Err(_) if pending.withdraw() => Err(AgentError::NotTaken),
        Err(_) => Err(AgentError::PartlyTaken),
    }
}

/// An entry whose sender waits. Dropping it takes the entry back: a sender that has left does not expect it any more.
struct PendingWrite(Option<WriteTicket>);

impl PendingWrite {
    async fn written(&mut self) -> Result<(), PtyError> {
        match &mut self.0 {
            Some(ticket) => ticket.written().await.map(drop),
            None => Ok(()),
        }
    }

    /// Takes the entry back, if its first byte was not written.
    fn withdraw(&mut self) -> bool {
        self.0.take().is_some_and(WriteTicket::withdraw)
    }
}

impl Drop for PendingWrite {
    fn drop(&mut self) {
        self.withdraw();
    }
}

/// The error of a write that the terminal did not take.
pub(crate) fn write_error(error: PtyError) -> AgentError {
    match error {
        PtyError::Ended => AgentError::Disappeared,
        PtyError::InjectionQueueFull => AgentError::NotTaken,
        PtyError::InvalidSize { .. }
        | PtyError::PrepareHost(_)
        | PtyError::AlreadyHosting
        | PtyError::ShuttingDown
        | PtyError::OpenTerminal(_)
        | PtyError::WorkingDirectory { .. }
        | PtyError::Execute { .. }
        | PtyError::Terminal(_)
        | PtyError::ProcessTable(_) => AgentError::SpawnFailed(error.to_string()),
    }
}
