//! Ordered delivery of events to the consumer: paced output and announcements.

use std::collections::VecDeque;

use tokio::sync::{
    mpsc::{Permit, Sender},
    watch,
};
use tokio::time::Instant;

use crate::{
    ExitReport, OutputChunk, TerminalEvent,
    output::{CHUNK_BYTES, Coalescer, OutputBudget, PacedBytes},
};

/// Coalesced output, and the few events that wait for room in the consumer's channel.
pub(crate) struct EventSender {
    sender: Sender<TerminalEvent>,
    budget: OutputBudget,
    coalescer: Coalescer,
    /// At most two chunks, an announcement and a stall report: the driver reads and begins nothing while it is not
    /// empty.
    outbox: VecDeque<TerminalEvent>,
    /// Bytes read, and bytes put into chunks.
    offset: u64,
    chunked: u64,
    discarding: bool,
}

impl EventSender {
    pub(crate) fn new(sender: Sender<TerminalEvent>, budget: OutputBudget) -> Self {
        let (coalescer, outbox) = (Coalescer::default(), VecDeque::new());
        Self { sender, budget, coalescer, outbox, offset: 0, chunked: 0, discarding: false }
    }

    pub(super) fn sender(&self) -> Sender<TerminalEvent> {
        self.sender.clone()
    }

    pub(super) fn budget_state(&self) -> watch::Receiver<bool> {
        self.budget.subscribe()
    }

    /// Bytes of output since the start.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    pub(super) fn push_output(&mut self, bytes: &[u8], now: Instant) {
        // Counted even when discarded: offsets of snapshots and the report of the exit cover all output.
        self.offset += bytes.len() as u64;
        if !self.discarding {
            self.coalescer.push(bytes, now);
        }
    }

    pub(super) fn push(&mut self, event: TerminalEvent) {
        if !self.discarding {
            self.outbox.push_back(event);
        }
    }

    /// Returns true while reading has to wait for the consumer.
    pub(super) fn is_full(&self) -> bool {
        self.coalescer.len() >= CHUNK_BYTES
    }

    pub(super) fn has_pending(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Instant at which output is due that is not held up by the consumer.
    pub(super) fn due_at(&self) -> Option<Instant> {
        self.coalescer.due_at().filter(|_| self.outbox.is_empty())
    }

    pub(super) fn take_due(&mut self, now: Instant) {
        // One chunk at a time: the rest stays in the coalescer, whose length stops the reading.
        if self.outbox.is_empty()
            && let Some(paced) = self.coalescer.take_due(now)
        {
            self.push_chunk(paced);
        }
    }

    /// Moves all whole characters into the outbox, due or not.
    pub(super) fn take_all(&mut self, now: Instant) {
        while let Some(paced) = self.coalescer.take_complete(now) {
            self.push_chunk(paced);
        }
    }

    fn push_chunk(&mut self, paced: PacedBytes) {
        let length = paced.bytes.len() as u64;
        let chunk = OutputChunk::new(paced.bytes, self.chunked, paced.read_at, &self.budget);
        self.chunked += length;
        self.outbox.push_back(TerminalEvent::Output(chunk));
    }

    pub(super) fn send_next(&mut self, slot: Permit<'_, TerminalEvent>) {
        if let Some(event) = self.outbox.pop_front() {
            slot.send(event);
        }
    }

    /// Discards events from now on: the consumer has dropped its stream. Output is still read, so that the program can
    /// continue.
    pub(super) fn discard(&mut self) {
        self.discarding = true;
        // At once: the chunks in it would count towards the output bound of all terminals.
        self.outbox.clear();
        self.coalescer = Coalescer::default();
    }

    /// Sends the remaining output, then the end.
    pub(super) async fn finish(mut self, report: ExitReport) {
        while let Some(paced) = self.coalescer.take_rest(Instant::now()) {
            self.push_chunk(paced);
        }
        self.outbox.push_back(TerminalEvent::Exited(report));
        for event in self.outbox {
            if self.sender.send(event).await.is_err() {
                return;
            }
        }
    }
}
