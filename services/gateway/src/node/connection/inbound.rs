//! [`Inbound`]: reading side of a node's socket, within the memory that its workspace may take.

use axum::{
    Error,
    extract::ws::{Message, WebSocket},
};
use futures::{StreamExt as _, stream::SplitStream};
use relay_domain::WorkspaceId;
use relay_tasks::byte_budget::ByteLease;

use crate::connections::RequestBodies;

/// A message, and the memory that it takes until it was handled, if it is large.
type Received = Result<(Message, Option<ByteLease>), Error>;

pub(super) struct Inbound {
    socket: SplitStream<WebSocket>,
    bodies: RequestBodies,
    workspace: WorkspaceId,
    /// Message that waits for memory.
    unread: Option<Message>,
}

impl Inbound {
    pub(super) const fn new(socket: SplitStream<WebSocket>, bodies: RequestBodies, workspace: WorkspaceId) -> Self {
        Self { socket, bodies, workspace, unread: None }
    }

    /// Returns the next message, once there is memory for it. Until then the socket is not read, which slows the sender
    /// down. May be cancelled.
    pub(super) async fn next(&mut self) -> Option<Received> {
        if self.unread.is_none() {
            match self.socket.next().await? {
                Ok(message) => self.unread = Some(message),
                Err(error) => return Some(Err(error)),
            }
        }
        let bytes = if let Some(Message::Text(text)) = &self.unread { text.len() } else { 0 };
        let memory = self.bodies.reserve_frame(self.workspace, bytes).await;
        self.unread.take().map(|message| Ok((message, memory)))
    }

    /// Reads and drops what arrives.
    pub(super) async fn drain(&mut self) {
        while let Some(Ok(_)) = self.socket.next().await {}
    }
}
