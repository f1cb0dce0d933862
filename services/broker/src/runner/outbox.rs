//! [`Outbox`]: frames that wait to be written to a runner, bounded in number and in bytes.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// Frames that wait; a runner that reads nothing gets no more.
const MAX_FRAMES: usize = 512;
/// Bytes of these frames. A larger frame waits until it is alone.
const MAX_BYTES: usize = 8 << 20;

/// Sending side. Clones are the same outbox.
#[derive(Debug, Clone)]
pub(super) struct Outbox {
    frames: mpsc::Sender<OutgoingFrame>,
    room: Arc<Semaphore>,
}

/// A frame that waits. It takes up its room until it is dropped.
#[derive(Debug)]
pub(super) struct OutgoingFrame {
    pub(super) text: String,
    _room: OwnedSemaphorePermit,
}

impl Outbox {
    /// An empty outbox, and the side from which its frames are taken.
    pub(super) fn new() -> (Self, mpsc::Receiver<OutgoingFrame>) {
        let (frames, outgoing) = mpsc::channel(MAX_FRAMES);
        (Self { frames, room: Arc::new(Semaphore::new(MAX_BYTES)) }, outgoing)
    }

    /// Frames that wait.
    pub(super) fn waiting(&self) -> usize {
        self.frames.max_capacity() - self.frames.capacity()
    }

    /// Adds a frame if there is room. Returns whether it did.
    pub(super) fn try_send(&self, text: String) -> bool {
        match self.room.clone().try_acquire_many_owned(units(&text)) {
            Ok(room) => self.frames.try_send(OutgoingFrame { text, _room: room }).is_ok(),
            Err(_) => false,
        }
    }

    /// Adds a frame as soon as there is room; drops it if the runner leaves before.
    pub(super) async fn send(&self, text: String) {
        if let Ok(room) = self.room.clone().acquire_many_owned(units(&text)).await {
            // A runner that has left needs no answer.
            let _ = self.frames.send(OutgoingFrame { text, _room: room }).await;
        }
    }
}

fn units(text: &str) -> u32 {
    u32::try_from(text.len().min(MAX_BYTES)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn frames_are_bounded_in_bytes_and_one_above_the_bound_goes_alone() {
        let (outbox, mut outgoing) = Outbox::new();
        let megabyte = || "x".repeat(1 << 20);
        assert!((0..8).all(|_| outbox.try_send(megabyte())));
        assert_eq!(outbox.waiting(), 8);
        assert!(!outbox.try_send("x".to_owned()));
        drop(outgoing.recv().await);
        assert!(outbox.try_send("x".to_owned()) && !outbox.try_send(megabyte()));
        let large = outbox.send("x".repeat(MAX_BYTES + 1));
        let reading = async {
            let mut texts = Vec::new();
            while texts.len() < 9 {
                texts.extend(outgoing.recv().await.map(|frame| frame.text.len()));
            }
            texts
        };
        let ((), texts) = tokio::join!(large, reading);
        assert_eq!(texts.last(), Some(&(MAX_BYTES + 1)));
    }

    #[tokio::test]
    async fn frames_are_bounded_in_number_and_a_sender_does_not_wait_for_a_runner_that_has_left() {
        let (outbox, outgoing) = Outbox::new();
        assert!((0..MAX_FRAMES).all(|_| outbox.try_send(String::new())) && !outbox.try_send(String::new()));
        let waiting = outbox.send("late".to_owned());
        let ((), ()) = tokio::join!(waiting, async { drop(outgoing) });
        assert!(!outbox.try_send(String::new()));
    }
}
