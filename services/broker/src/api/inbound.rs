//! [`Inbound`]: what comes from the client of a socket of this API.

use axum::{
    Error,
    extract::ws::{CloseFrame, Message, WebSocket, close_code},
};

/// Maximum bytes of a frame that is accepted.
const MAX_FRAME: usize = 1 << 20;
/// Maximum bytes of a frame that is read, so that a longer one than allowed is answered with a close code. Beyond it
/// the connection breaks.
pub(crate) const MAX_READ: usize = 4 * MAX_FRAME;

/// Outcome of a read.
#[derive(Debug)]
pub(crate) enum Inbound {
    Frame(Message),
    /// A frame above the bound: the socket is to be closed with [`close_too_large`].
    TooLarge,
    /// The client has closed the socket, or it broke.
    Ended,
}

impl From<Option<Result<Message, Error>>> for Inbound {
    fn from(read: Option<Result<Message, Error>>) -> Self {
        match read {
            Some(Ok(Message::Close(_)) | Err(_)) | None => Self::Ended,
            Some(Ok(frame)) if size(&frame) > MAX_FRAME => Self::TooLarge,
            Some(Ok(frame)) => Self::Frame(frame),
        }
    }
}

/// Bytes of a frame's content.
pub(crate) fn size(frame: &Message) -> usize {
    match frame {
        Message::Text(text) => text.len(),
        Message::Binary(bytes) | Message::Ping(bytes) | Message::Pong(bytes) => bytes.len(),
        Message::Close(_) => 0,
    }
}

/// Tells the client that its frame was too large.
pub(crate) async fn close_too_large(socket: &mut WebSocket) {
    let frame = CloseFrame { code: close_code::SIZE, reason: "a frame has at most 1 MiB".into() };
    // The client may have closed first.
    let _ = socket.send(Message::Close(Some(frame))).await;
}
