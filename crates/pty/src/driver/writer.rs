//! The entry that is being written: its steps, its pauses, and whether the program takes it.

use std::{collections::VecDeque, os::fd::AsFd, time::Duration};

use bytes::{Buf, Bytes};
use tokio::time::Instant;

use crate::{
    PtyError, WriteId, WriteReceipt,
    input::{EntryTicket, Step},
    linux,
};

/// Writes one entry at a time.
pub(super) struct Writer {
    stall_after: Duration,
    current: Option<CurrentWrite>,
}

struct CurrentWrite {
    /// None for answers of the terminal.
    ticket: Option<EntryTicket>,
    steps: VecDeque<Step>,
    state: WriteState,
    /// Before its first byte, and at its last progress.
    began_at: Instant,
    progressed_at: Instant,
    stall_reported: bool,
    bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WriteState {
    /// Waits until the consumer has received its announcement.
    Announced,
    Writing,
    PausedUntil(Instant),
}

/// A write that has made no progress for too long.
pub(super) struct WriteStall {
    pub(super) id: Option<WriteId>,
    pub(super) since: Instant,
}

/// Result of one pass of writing.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    pub(super) wrote: bool,
    /// The terminal takes no more for now.
    pub(super) full: bool,
}

impl Writer {
    pub(super) fn new(stall_after: Duration) -> Self {
        Self { stall_after, current: None }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.current.is_none()
    }

    pub(super) fn begin_answers(&mut self, answers: Bytes) {
        self.begin(None, [Step::Write(answers)].into(), WriteState::Writing);
    }

    pub(super) fn begin_keys(&mut self, ticket: EntryTicket, keys: Bytes) {
        self.begin(Some(ticket), [Step::Write(keys)].into(), WriteState::Writing);
    }

    /// Begins an injection, which waits for [`Writer::start`].
    pub(super) fn begin_injection(&mut self, ticket: EntryTicket, steps: Vec<Step>) {
        self.begin(Some(ticket), steps.into(), WriteState::Announced);
    }

    fn begin(&mut self, ticket: Option<EntryTicket>, steps: VecDeque<Step>, state: WriteState) {
        let now = Instant::now();
        let (began_at, progressed_at) = (now, now);
        self.current =
            Some(CurrentWrite { ticket, steps, state, began_at, progressed_at, stall_reported: false, bytes: 0 });
    }

    /// Returns true while an injection waits for [`Writer::start`].
    pub(super) fn is_announced(&self) -> bool {
        self.current.as_ref().is_some_and(|current| current.state == WriteState::Announced)
    }

    /// Starts an announced injection.
    pub(super) fn start(&mut self) {
        if let Some(current) = self.current.as_mut().filter(|current| current.state == WriteState::Announced) {
            let now = Instant::now();
            (current.state, current.began_at, current.progressed_at) = (WriteState::Writing, now, now);
        }
    }

    /// Gives up the current entry: the program has ended or is being ended.
    pub(super) fn abort(&mut self) {
        self.finish(Err(PtyError::Ended));
    }

    pub(super) fn wants_write(&self) -> bool {
        self.current.as_ref().is_some_and(|current| current.state == WriteState::Writing)
    }

    /// Does not write before `instant`.
    pub(super) fn pause_until(&mut self, instant: Instant) {
        if let Some(current) = &mut self.current {
            current.state = WriteState::PausedUntil(instant);
        }
    }

    /// Instant of the end of a pause, or of the report of a stall.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let current = self.current.as_ref()?;
        match current.state {
            WriteState::PausedUntil(instant) => Some(instant),
            WriteState::Writing => (!current.stall_reported).then(|| current.progressed_at + self.stall_after),
            // The consumer holds it up, not the program: no stall of the terminal.
            WriteState::Announced => None,
        }
    }

    /// Ends a pause that is over; reports a stall once.
    pub(super) fn poll(&mut self, now: Instant) -> Option<WriteStall> {
        let current = self.current.as_mut()?;
        match current.state {
            WriteState::PausedUntil(instant) if instant <= now => current.state = WriteState::Writing,
            WriteState::Writing if !current.stall_reported && current.progressed_at + self.stall_after <= now => {
                current.stall_reported = true;
                let id = current.ticket.as_ref().map(|ticket| ticket.id);
                return Some(WriteStall { id, since: current.progressed_at });
            }
            WriteState::PausedUntil(_) | WriteState::Writing | WriteState::Announced => {}
        }
        None
    }

    /// Writes until the terminal is full, a pause comes or the entry is done.
    pub(super) fn write(&mut self, master: impl AsFd) -> Progress {
        let mut progress = Progress::default();
        while let Some(current) = self.current.as_mut().filter(|current| current.state == WriteState::Writing) {
            match current.steps.front_mut() {
                None => self.finish(Ok(())),
                Some(Step::Pause(pause)) => {
                    current.state = WriteState::PausedUntil(Instant::now() + *pause);
                    current.steps.pop_front();
                }
                Some(Step::Write(bytes)) if bytes.is_empty() => {
                    current.steps.pop_front();
                }
                Some(Step::Write(bytes)) => match linux::write_available(&master, bytes) {
                    Ok(0) => {
                        progress.full = true;
                        return progress;
                    }
                    Ok(written) => {
                        bytes.advance(written);
                        current.bytes += written;
                        (current.progressed_at, current.stall_reported) = (Instant::now(), false);
                        progress.wrote = true;
                    }
                    Err(error) => self.finish(Err(PtyError::Terminal(error))),
                },
            }
        }
        progress
    }

    fn finish(&mut self, result: Result<(), PtyError>) {
        let Some(current) = self.current.take() else { return };
        let Some(ticket) = current.ticket else { return };
        let receipt = WriteReceipt { began_at: current.began_at, finished_at: Instant::now(), bytes: current.bytes };
        // A caller that no longer waits has dropped its ticket.
        let _ = ticket.done.send(result.map(|()| receipt));
    }
}
