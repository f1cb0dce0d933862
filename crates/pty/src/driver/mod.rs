//! The task of one terminal: reads, writes, paces output and notices the program's end. It never blocks.

mod events;
mod writer;

use std::{io, os::fd::OwnedFd, sync::Arc, time::Duration};

use tokio::{
    io::unix::{AsyncFd, AsyncFdReadyGuard},
    sync::mpsc::Permit,
    time::{Instant, sleep_until},
};

pub(crate) use events::EventSender;
use writer::Writer;

use crate::{
    Exit, ExitReport, Injection, TerminalEvent,
    input::{EntryTicket, NextWrite},
    linux::{self, ReadOutcome, RootProcess, Signal},
    output::CHUNK_BYTES,
    terminal::{Shared, lock},
};

/// Pause before a terminal that no process has open is looked at again: a program may reopen it.
const CLOSED_RETRY: Duration = Duration::from_millis(100);
/// After the program's end, silence that ends the reading while some descendant still has the terminal open.
const DRAIN_SILENCE: Duration = Duration::from_millis(500);
/// After the program's end, the longest reading from descendants that never fall silent, and the most bytes. What the
/// program itself left in the kernel's buffers is less than a tenth of that.
const DRAIN_TIME: Duration = Duration::from_secs(5);
const DRAIN_BYTES: u64 = 1 << 20;

pub(crate) struct Driver {
    shared: Arc<Shared>,
    root: Arc<RootProcess>,
    master: Arc<AsyncFd<OwnedFd>>,
    events: EventSender,
    writer: Writer,
    reading: ReadState,
    /// Set once the program has ended.
    draining: Option<DrainState>,
}

/// State of the terminal's output side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReadState {
    Open,
    /// No process has it open; looked at again at this instant.
    ClosedUntil(Instant),
    /// Nothing comes any more.
    Finished,
}

struct DrainState {
    exit: Exit,
    since: Instant,
    last_output: Instant,
    /// Bytes of output at the program's end, and at `last_output`.
    end_offset: u64,
    last_offset: u64,
    /// Everything was read at least once since the end.
    emptied: bool,
}

/// Reason for another round of the driver.
enum Wake<'a> {
    Readable(io::Result<AsyncFdReadyGuard<'a, OwnedFd>>),
    Writable(io::Result<AsyncFdReadyGuard<'a, OwnedFd>>),
    Exited(Exit),
    Slot(Permit<'a, TerminalEvent>),
    ConsumerGone,
    /// Queue, budget or timer: the next round examines them.
    Recheck,
}

impl Driver {
    pub(crate) fn new(
        shared: Arc<Shared>,
        root: Arc<RootProcess>,
        master: Arc<AsyncFd<OwnedFd>>,
        events: EventSender,
        write_stall: Duration,
    ) -> Self {
        let writer = Writer::new(write_stall);
        Self { shared, root, master, events, writer, reading: ReadState::Open, draining: None }
    }

    /// Runs until the program has ended and its last output was delivered.
    pub(crate) async fn run(mut self) {
        let exit = self.serve().await;
        self.finish(exit).await;
    }

    async fn serve(&mut self) -> Exit {
        // Clones, because the futures below borrow them while `handle` needs all of `self`.
        let (master, root, shared) = (self.master.clone(), self.root.clone(), self.shared.clone());
        let sender = self.events.sender();
        let mut exceeded = self.events.budget_state();
        loop {
            // Marks this state as seen, so that `changed` below fires for a later one only, and none in between is
            // lost.
            let paused = *exceeded.borrow_and_update();
            self.prepare(paused);
            if let Some(exit) = self.drained(paused) {
                return exit;
            }
            let deadline = self.deadline(paused);
            let wake = tokio::select! {
                ready = master.readable(), if self.may_read(paused) => Wake::Readable(ready),
                ready = master.writable(), if self.writer.wants_write() => Wake::Writable(ready),
                // The descriptor of an ended program stays readable until it is reaped: waiting again would spin.
                exit = root.ended(), if self.draining.is_none() => Wake::Exited(exit),
                // A slot first, then the event: a cancelled branch cannot lose an event.
                slot = sender.reserve(), if self.events.has_pending() => slot.map_or(Wake::ConsumerGone, Wake::Slot),
                () = shared.queue.changed() => Wake::Recheck,
                // Only the end of a pause needs a wake-up: its beginning is seen in the round after the next read.
                _ = exceeded.changed(), if paused => Wake::Recheck,
                // `select!` evaluates the expression even if the condition is false, so it needs some instant.
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => Wake::Recheck,
            };
            self.handle(wake);
        }
    }

    fn handle(&mut self, wake: Wake<'_>) {
        match wake {
            Wake::Readable(Ok(mut ready)) => {
                if self.read() == ReadOutcome::Empty {
                    if ready.ready().is_read_closed() {
                        // It was closed once and reopened. The runtime reports it as ready for ever.
                        self.reading = ReadState::ClosedUntil(Instant::now() + CLOSED_RETRY);
                    } else {
                        ready.clear_ready();
                    }
                }
            }
            Wake::Writable(Ok(mut ready)) => {
                if self.write() {
                    // As for reading: a side that was closed once is reported as ready for ever.
                    if ready.ready().is_write_closed() {
                        self.writer.pause_until(Instant::now() + CLOSED_RETRY);
                    } else {
                        ready.clear_ready();
                    }
                }
            }
            // Only when the runtime shuts down; the task is dropped with it.
            Wake::Readable(Err(_)) | Wake::Writable(Err(_)) => self.reading = ReadState::Finished,
            Wake::Exited(exit) => self.begin_draining(exit),
            Wake::Slot(slot) => self.events.send_next(slot),
            Wake::ConsumerGone => self.events.discard(),
            Wake::Recheck => {}
        }
    }

    /// Moves due output into the outbox and the next entry into the writer.
    fn prepare(&mut self, paused: bool) {
        let now = Instant::now();
        self.events.take_due(now);
        if let ReadState::ClosedUntil(retry_at) = self.reading
            && retry_at <= now
        {
            self.reading = ReadState::Open;
        }
        if let Some(draining) = &mut self.draining
            && (paused || self.events.is_full())
        {
            // Nothing is read, so there is no silence to measure.
            draining.last_output = now;
        }
        if self.shared.queue.is_closed() {
            self.writer.abort();
        } else if self.writer.is_idle() {
            self.begin_next();
        }
        if self.writer.is_announced() && !self.events.has_pending() {
            self.writer.start();
        }
        if let Some(stalled) = self.writer.poll(now) {
            *lock(&self.shared.stalled_since) = Some(stalled.since);
            self.events.push(TerminalEvent::WriteStalled { id: stalled.id });
        }
    }

    fn begin_next(&mut self) {
        match self.shared.queue.take_next() {
            None => {}
            Some(NextWrite::Answers(answers)) => self.writer.begin_answers(answers),
            Some(NextWrite::Keys(ticket, keys)) => self.writer.begin_keys(ticket, keys),
            Some(NextWrite::Injection(ticket, injection)) => self.announce(ticket, &injection),
        }
    }

    /// Reads and hands out everything from before an injection, then announces it. The writer starts when consumers
    /// have taken these events.
    fn announce(&mut self, ticket: EntryTicket, injection: &Injection) {
        // Bounded: a program that floods its output would otherwise keep this task here.
        self.read();
        self.events.take_all(Instant::now());
        match self.shared.input_modes() {
            Ok(modes) => {
                let output_offset = self.events.offset();
                self.events.push(TerminalEvent::InjectionBegan { id: ticket.id, output_offset });
                self.writer.begin_injection(ticket, injection.steps(modes));
            }
            Err(error) => {
                // A caller that no longer waits has no use for the reason.
                let _ = ticket.done.send(Err(error));
            }
        }
    }

    fn may_read(&self, paused: bool) -> bool {
        // Between the announcement of an injection and its first byte nothing is read, so that no older output counts
        // as an answer to it.
        self.reading == ReadState::Open && !paused && !self.events.is_full() && !self.writer.is_announced()
    }

    fn read(&mut self) -> ReadOutcome {
        if self.reading != ReadState::Open {
            return ReadOutcome::Empty;
        }
        let now = Instant::now();
        let (events, shared) = (&mut self.events, &self.shared);
        let outcome = linux::read_available(self.master.get_ref(), CHUNK_BYTES, |bytes| {
            // The screen first: a consumer that takes a snapshot after a chunk expects the chunk's bytes to be part of
            // it. The lock ends with this statement, so it is never held together with the lock of the queue.
            let answers = lock(&shared.display).screen.process(bytes);
            if !answers.is_empty() {
                shared.queue.push_answers(&answers);
            }
            events.push_output(bytes, now);
        });
        let outcome = outcome.unwrap_or_else(|error| {
            tracing::warn!(pid = self.shared.tree.root.pid, %error, "reading a terminal failed, treating it as closed");
            ReadOutcome::Closed
        });
        if let Some(draining) = &mut self.draining {
            draining.emptied |= outcome != ReadOutcome::More;
            if self.events.offset() > draining.last_offset {
                (draining.last_offset, draining.last_output) = (self.events.offset(), now);
            }
        }
        if outcome == ReadOutcome::Closed {
            let ended = self.draining.is_some();
            self.reading = if ended { ReadState::Finished } else { ReadState::ClosedUntil(now + CLOSED_RETRY) };
        }
        outcome
    }

    /// Writes; true if the terminal is full.
    fn write(&mut self) -> bool {
        let progress = self.writer.write(self.master.get_ref());
        if progress.wrote {
            *lock(&self.shared.stalled_since) = None;
        }
        progress.full
    }

    fn begin_draining(&mut self, exit: Exit) {
        let now = Instant::now();
        self.shared.set_ended(exit);
        self.shared.queue.close();
        // The last bytes may have come with the end; a terminal that was closed is looked at at once.
        self.reading = ReadState::Open;
        let offset = self.events.offset();
        self.draining = Some(DrainState {
            exit,
            since: now,
            last_output: now,
            end_offset: offset,
            last_offset: offset,
            emptied: false,
        });
        if !self.events.is_full() {
            self.read();
        }
    }

    /// The exit, once nothing more has to be read.
    fn drained(&self, paused: bool) -> Option<Exit> {
        let draining = self.draining.as_ref()?;
        let silent_until = draining.last_output + DRAIN_SILENCE;
        let now = Instant::now();
        // Silence counts only while output is read, and the time limit only once everything was read since the end. The
        // limit has no timer of its own: each round checks it.
        let over = self.reading == ReadState::Finished
            || (!paused && silent_until <= now)
            || (draining.emptied && draining.since + DRAIN_TIME <= now)
            || self.events.offset() - draining.end_offset >= DRAIN_BYTES;
        over.then_some(draining.exit)
    }

    fn deadline(&self, paused: bool) -> Option<Instant> {
        let retry_at = match self.reading {
            ReadState::ClosedUntil(retry_at) => Some(retry_at),
            ReadState::Open | ReadState::Finished => None,
        };
        let silent_until =
            self.draining.as_ref().filter(|_| !paused).map(|draining| draining.last_output + DRAIN_SILENCE);
        [self.events.due_at(), self.writer.deadline(), retry_at, silent_until].into_iter().flatten().min()
    }

    async fn finish(self, exit: Exit) {
        // Before the reaping, which frees the id of the group.
        self.shared.signal_group(Signal::HUP);
        // Drops the last references and so closes the terminal. Processes that have it open receive a hang-up.
        lock(&self.shared.display).master = None;
        drop(self.master);
        // Before the last events: a slow consumer must not keep the process id and the callers of `end` waiting.
        self.shared.reap(exit);
        let report = ExitReport { exit, output_bytes: self.events.offset() };
        self.events.finish(report).await;
    }
}
