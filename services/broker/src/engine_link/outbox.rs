//! [`Outbox`]: frames that wait to be written to the node socket, and the task that writes them.

use futures::{SinkExt as _, stream::SplitSink};
use relay_wire::nodes::frame::{InboundFrame, encode_from_node};
use tokio::{sync::mpsc, task::JoinSet};
use tokio_tungstenite::tungstenite::{Message, protocol::CloseFrame};

use super::dial::Socket;

/// Maximum number of frames that wait to be written. A socket that exceeds it is closed.
const MAX_FRAMES: usize = 4096;

/// Writing side of one connection. Dropping it ends the writing.
#[derive(Debug)]
pub(super) struct Outbox {
    frames: mpsc::Sender<Message>,
    writer: JoinSet<()>,
}

impl Outbox {
    pub(super) fn new(mut sink: SplitSink<Socket, Message>) -> Self {
        let (frames, mut waiting) = mpsc::channel(MAX_FRAMES);
        let mut writer = JoinSet::new();
        writer.spawn(async move {
            while let Some(frame) = waiting.recv().await {
                if sink.send(frame).await.is_err() {
                    return;
                }
            }
            // The peer may have closed first.
            let _ = sink.close().await;
        });
        Self { frames, writer }
    }

    /// Encodes a frame and queues it.
    pub(super) fn send(&self, id: Option<&str>, frame: &InboundFrame) -> Result<(), String> {
        match encode_from_node(id, frame) {
            Some(text) => self.post(Message::text(text)),
            None => Ok(()),
        }
    }

    pub(super) fn post(&self, message: Message) -> Result<(), String> {
        // Never waits: a reader that waits for its own writer locks up, as published brokers do with 256 acks
        // (ADR 0002).
        self.frames.try_send(message).map_err(|_| "the engine takes no frames any more".to_owned())
    }

    /// Waits until the socket takes no frames any more.
    pub(super) async fn broken(&mut self) {
        // The set is empty once its only end was reported.
        if self.writer.join_next().await.is_none() {
            std::future::pending().await
        }
    }

    /// Writes what waits and a close frame.
    pub(super) async fn close(mut self, frame: CloseFrame) {
        // A full outbox means that the engine reads nothing: there is nobody to say goodbye to.
        let _ = self.frames.try_send(Message::Close(Some(frame)));
        drop(self.frames);
        self.writer.join_next().await;
    }

    /// The queue, to look at its length as long as the connection lasts.
    pub(super) fn queue(&self) -> mpsc::WeakSender<Message> {
        self.frames.downgrade()
    }
}
