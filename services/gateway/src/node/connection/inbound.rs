//! [`Inbound`]: reading side of a node's socket, within the memory that its family of workspaces may take.

use std::time::Duration;

use axum::{
    Error,
    extract::ws::{Message, WebSocket},
};
use futures::{StreamExt as _, stream::SplitStream};
use relay_domain::workspaces::family::FamilyId;
use relay_runtime::server::ReadGate;
use relay_tasks::byte_budget::ByteLease;
use tokio::time::{Instant, sleep_until};

use super::effects::Close;
use crate::{
    connections::{FrameMemory, RequestBodies},
    node::upgrade::FRAME_LIMIT,
};

/// Part of a message that is read without memory of its family. Most messages are smaller.
const UNLEASED_BYTES: usize = 16 * 1024;
/// Bytes of a message beyond its text: headers of its parts.
const HEADER_BYTES: usize = 64 * 1024;
/// Time for a larger message, as for the body of a request.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of a control frame besides its payload: its header, and the mask of clients.
const CONTROL_HEADER_BYTES: usize = 6;

/// Close of a socket whose message is too large.
pub(super) const TOO_LARGE: Close = (1009, "frame too large");
const TOO_SLOW: Close = (1013, "frame took too long");

/// Arrival on a socket.
pub(super) enum ReadOutcome {
    /// Message, with the memory that it takes until it was handled, unless it is small.
    Message(Message, Option<FrameMemory>),
    /// The socket cannot be read.
    Failed(Error),
    /// The peer sends what it must not.
    Refused(Close),
}

pub(super) struct Inbound {
    socket: SplitStream<WebSocket>,
    gate: ReadGate,
    bodies: RequestBodies,
    family: FamilyId,
    /// Message that waits for memory.
    unread: Option<Message>,
    /// Memory of a large message that is arriving, and the time by which it must be complete.
    arriving: Option<(ByteLease, Instant)>,
}

impl Inbound {
    pub(super) fn new(socket: SplitStream<WebSocket>, gate: ReadGate, bodies: RequestBodies, family: FamilyId) -> Self {
        gate.set_limit(UNLEASED_BYTES);
        Self { socket, gate, bodies, family, unread: None, arriving: None }
    }

    /// Returns the next message, once there is memory for it. Until then the socket is not read, which slows the sender
    /// down. May be cancelled.
    pub(super) async fn next(&mut self) -> Option<ReadOutcome> {
        while self.unread.is_none() {
            let due = self.arriving.as_ref().map(|(_, due)| *due);
            tokio::select! {
                biased;
                // First: a message that is complete needs no memory for a rest.
                message = self.socket.next() => match message? {
                    Ok(message) => self.on_message(message),
                    Err(error) => return Some(ReadOutcome::Failed(error)),
                },
                () = self.gate.full() => {
                    // More than the largest frame has arrived without the end of a message.
                    if self.arriving.is_some() {
                        return Some(ReadOutcome::Refused(TOO_LARGE));
                    }
                    // For the largest frame: the size of this one is unknown before its end.
                    let memory = self.bodies.reserve_frame(self.family, FRAME_LIMIT).await;
                    self.arriving = memory.map(|memory| (memory, Instant::now() + MESSAGE_TIMEOUT));
                    self.gate.set_limit(FRAME_LIMIT + HEADER_BYTES);
                }
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    return Some(ReadOutcome::Refused(TOO_SLOW));
                }
            }
        }
        let (bytes, frame) = match self.unread.as_ref()? {
            Message::Text(text) => (text.len(), text.as_str()),
            // Refused without being parsed.
            Message::Binary(bytes) => (bytes.len(), ""),
            // A large message may still be arriving around it.
            Message::Ping(_) | Message::Pong(_) | Message::Close(_) => {
                return self.unread.take().map(|message| ReadOutcome::Message(message, None));
            }
        };
        // The message stays in `unread` during these waits: a cancelled call must not lose it.
        let text = match self.arriving.take() {
            Some((mut memory, _)) => {
                memory.shrink_to(bytes);
                Some(memory)
            }
            None => self.bodies.reserve_frame(self.family, bytes).await,
        };
        let memory = match text {
            Some(text) => Some(self.bodies.reserve_values(self.family, text, frame).await),
            None => None,
        };
        self.unread.take().map(|message| ReadOutcome::Message(message, memory))
    }

    fn on_message(&mut self, message: Message) {
        match &message {
            Message::Ping(payload) | Message::Pong(payload) => {
                self.gate.on_control_frame(payload.len() + CONTROL_HEADER_BYTES);
            }
            Message::Text(_) | Message::Binary(_) | Message::Close(_) => {
                self.gate.on_message();
                self.gate.set_limit(UNLEASED_BYTES);
            }
        }
        self.unread = Some(message);
    }

    /// Reads and drops what arrives.
    pub(super) async fn drain(&mut self) {
        self.gate.discard();
        while let Some(Ok(_)) = self.socket.next().await {}
    }
}
