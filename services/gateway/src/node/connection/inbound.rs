//! [`Inbound`]: reading side of a node's socket, within the memory that its workspace may take.

use axum::{
    Error,
    extract::ws::{Message, WebSocket},
};
use futures::{StreamExt as _, stream::SplitStream};
use relay_domain::WorkspaceId;
use relay_runtime::server::ReadGate;
use relay_tasks::byte_budget::ByteLease;

use crate::{
    connections::RequestBodies,
    node::upgrade::{FRAME_LIMIT, READ_LIMIT},
};

/// Bytes of an incomplete message that a socket may hold without a lease.
const UNLEASED_BYTES: usize = 64 * 1024;
/// Header of the smallest frame of a client.
const FRAME_HEADER_BYTES: usize = 6;

/// A message, and the memory that it takes until it was handled, if it is large.
type Received = Result<(Message, Option<ByteLease>), Error>;

pub(super) struct Inbound {
    socket: SplitStream<WebSocket>,
    gate: ReadGate,
    bodies: RequestBodies,
    workspace: WorkspaceId,
    /// Memory of the message that is arriving.
    memory: Option<ByteLease>,
    /// Message that waits for memory.
    unread: Option<Message>,
}

impl Inbound {
    pub(super) fn new(
        socket: SplitStream<WebSocket>,
        gate: ReadGate,
        bodies: RequestBodies,
        workspace: WorkspaceId,
    ) -> Self {
        gate.allow(UNLEASED_BYTES);
        Self { socket, gate, bodies, workspace, memory: None, unread: None }
    }

    /// Returns the next message, once there is memory for it. Until then the socket is not read, which slows the sender
    /// down. May be cancelled.
    pub(super) async fn next(&mut self) -> Option<Received> {
        while self.unread.is_none() {
            tokio::select! {
                biased;
                message = self.socket.next() => match message? {
                    Ok(message) => self.unread = Some(message),
                    Err(error) => return Some(Err(error)),
                },
                () = self.gate.closed() => self.reserve_more().await,
            }
        }
        let bytes = match &self.unread {
            Some(Message::Text(text)) => text.len(),
            Some(Message::Binary(bytes)) => bytes.len(),
            // May stand between the parts of a message, so it allows no more than it took.
            Some(Message::Ping(payload) | Message::Pong(payload)) => {
                self.gate.allow_more(FRAME_HEADER_BYTES + payload.len());
                return self.unread.take().map(|message| Ok((message, None)));
            }
            Some(Message::Close(_)) | None => 0,
        };
        match &mut self.memory {
            Some(memory) => memory.shrink_to(bytes),
            None => self.memory = self.bodies.reserve_frame(self.workspace, bytes).await,
        }
        self.gate.allow(UNLEASED_BYTES);
        let memory = self.memory.take();
        self.unread.take().map(|message| Ok((message, memory)))
    }

    /// Waits for the memory of a message of which more has arrived than a socket may hold.
    async fn reserve_more(&mut self) {
        let bytes = if self.memory.is_some() { READ_LIMIT } else { FRAME_LIMIT };
        // Sockets that held memory while they wait would wait for each other.
        self.memory = None;
        self.memory = Some(self.bodies.reserve_message(self.workspace, bytes).await);
        self.gate.allow(bytes);
    }

    /// Reads and drops what arrives, without more memory.
    pub(super) async fn drain(mut self) {
        self.gate.allow(UNLEASED_BYTES);
        while let Some(Ok(_)) = self.socket.next().await {}
    }
}
