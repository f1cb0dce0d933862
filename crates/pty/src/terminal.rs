//! The handle of one terminal, its events, and the state that handle and driver share.

use std::{
    fmt,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    io::unix::AsyncFd,
    sync::{mpsc, watch},
    time::Instant,
};

use crate::{
    EndReport, Injection, InputModes, OutputChunk, ProcessIdentity, PtyError, ScreenSnapshot, SnapshotFormat,
    TerminalSize, TreeUsage, WriteId, WriteTicket,
    input::InputQueue,
    linux::{self, RootProcess, Signal},
    screen::Screen,
    tree::{Tree, Trees},
};

/// Exit status of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// It returned this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
    /// The status was lost: another part of this process waited for the program.
    Unknown,
}

/// The end of a program, after all its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExitReport {
    /// Exit status.
    pub exit: Exit,
    /// Bytes of output since the start.
    pub output_bytes: u64,
}

/// Event in a terminal. Events come in the order in which they happened.
#[derive(Debug)]
pub enum TerminalEvent {
    /// The program wrote.
    Output(OutputChunk),
    /// The first byte of an injection is about to be written. Everything that could be read before went out as output
    /// before this event, so an echo can only come after it.
    InjectionBegan {
        /// The injection.
        id: WriteId,
        /// Bytes of output before it.
        output_offset: u64,
    },
    /// The program has not taken its input for [`crate::Limits::write_stall`]. The write stays first in the queue;
    /// this is reported again only after it has made progress.
    WriteStalled {
        /// The entry that waits; none for answers of the terminal.
        id: Option<WriteId>,
    },
    /// The program has ended. The last event.
    Exited(ExitReport),
}

/// Events of one terminal. While they are not taken, the program's output is not read; once the stream is dropped,
/// output is read and discarded.
#[derive(Debug)]
pub struct EventStream(pub(crate) mpsc::Receiver<TerminalEvent>);

impl EventStream {
    /// Waits for the next event; none after [`TerminalEvent::Exited`]. Safe to cancel.
    pub async fn next(&mut self) -> Option<TerminalEvent> {
        self.0.recv().await
    }
}

/// State of the write queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InputStatus {
    /// Bytes of user input that were not written yet.
    pub input_bytes: usize,
    /// Injections that were not written yet.
    pub injection_count: usize,
    /// Answers to terminal queries that were dropped because the program does not read them.
    pub dropped_answers: u64,
    /// Since when the first entry makes no progress, if that was reported.
    pub stalled_since: Option<Instant>,
}

/// A program in its terminal. Clones are handles of the same terminal; dropping them does not end the program.
#[derive(Clone)]
pub struct Terminal {
    pub(crate) shared: Arc<Shared>,
    pub(crate) trees: Arc<Trees>,
}

impl Terminal {
    /// The program's process id and start time.
    pub fn identity(&self) -> ProcessIdentity {
        self.shared.tree.root
    }

    /// Queues keystrokes; waits while the queue is full. The bytes are typed as they are.
    pub async fn write_input(&self, keys: impl Into<Bytes>) -> Result<WriteTicket, PtyError> {
        self.shared.queue.push_keys(keys.into()).await
    }

    /// Queues an injection; refused while the queue is full.
    pub fn inject(&self, injection: Injection) -> Result<WriteTicket, PtyError> {
        self.shared.queue.push_injection(injection)
    }

    /// Takes an entry out of the queue; its ticket reports [`PtyError::Ended`] then. False if its first byte may have
    /// been written: then it is written whole.
    pub fn withdraw(&self, id: WriteId) -> bool {
        self.shared.queue.withdraw(id)
    }

    /// State of the write queue.
    pub fn input_status(&self) -> InputStatus {
        let (input_bytes, injection_count, dropped_answers) = self.shared.queue.counts();
        let stalled_since = *lock(&self.shared.stalled_since);
        InputStatus { input_bytes, injection_count, dropped_answers, stalled_since }
    }

    /// Modes that decide how text is typed. Fails after the program has ended.
    pub fn input_modes(&self) -> Result<InputModes, PtyError> {
        self.shared.input_modes()
    }

    /// Sets the size of window and screen at once; the foreground processes receive SIGWINCH.
    pub fn resize(&self, size: TerminalSize) -> Result<(), PtyError> {
        let mut display = lock(&self.shared.display);
        let master = display.master.as_ref().ok_or(PtyError::Ended)?;
        // The window first: if the kernel refuses, the screen keeps the size that the program still sees.
        linux::set_size(master.get_ref(), size).map_err(PtyError::Terminal)?;
        display.screen.resize(size);
        Ok(())
    }

    /// The screen at this moment; after the end, the last one.
    pub fn snapshot(&self, format: SnapshotFormat) -> ScreenSnapshot {
        lock(&self.shared.display).screen.snapshot(format)
    }

    /// Text of the cursor's row up to the cursor, with its blanks: the prompt, if the program waits at one.
    pub fn text_before_cursor(&self) -> String {
        lock(&self.shared.display).screen.text_before_cursor()
    }

    /// Waits for the program's end. Its last output may not have been delivered yet; see [`TerminalEvent::Exited`].
    pub async fn exited(&self) -> Exit {
        self.shared.exited().await
    }

    /// Processor time, memory and threads of the program and all its descendants.
    pub async fn usage(&self) -> Result<TreeUsage, PtyError> {
        self.trees.usage(&self.shared.tree).await
    }

    /// Ends the program and all its descendants, also those in sessions of their own, and waits until they have ended:
    /// SIGHUP and SIGTERM, then SIGKILL for the remaining ones after `grace`. Input that was not written fails. Works
    /// after the program's own end, too, for descendants that outlived it.
    pub async fn end(&self, grace: Duration) -> Result<EndReport, PtyError> {
        self.shared.queue.close();
        self.trees.end_terminal(&self.shared, grace).await
    }
}

impl fmt::Debug for Terminal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Terminal").field("root", &self.identity()).finish_non_exhaustive()
    }
}

/// Stage of the program's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lifecycle {
    Running,
    /// Ended, its process id still reserved.
    Ended(Exit),
    Reaped(Exit),
}

/// State of one terminal that its handles, its driver and the host use.
pub(crate) struct Shared {
    pub(crate) tree: Tree,
    pub(crate) queue: Arc<InputQueue>,
    pub(crate) display: Mutex<Display>,
    pub(crate) stalled_since: Mutex<Option<Instant>>,
    lifecycle: watch::Sender<Lifecycle>,
    /// The program until it is reaped. The lock keeps signals to its group from racing the reaping.
    root: Mutex<Option<Arc<RootProcess>>>,
}

/// Window and screen, which change size together.
pub(crate) struct Display {
    pub(crate) screen: Screen,
    /// The terminal until it is closed.
    pub(crate) master: Option<Arc<AsyncFd<OwnedFd>>>,
}

impl Shared {
    pub(crate) fn new(tree: Tree, queue: InputQueue, display: Display, root: Arc<RootProcess>) -> Self {
        Self {
            tree,
            queue: Arc::new(queue),
            display: Mutex::new(display),
            stalled_since: Mutex::new(None),
            lifecycle: watch::Sender::new(Lifecycle::Running),
            root: Mutex::new(Some(root)),
        }
    }

    pub(crate) fn input_modes(&self) -> Result<InputModes, PtyError> {
        let display = lock(&self.display);
        let master = display.master.as_ref().ok_or(PtyError::Ended)?;
        let line = linux::line_mode(master.get_ref()).map_err(PtyError::Terminal)?;
        let screen = &display.screen;
        Ok(InputModes { line, bracketed_paste: screen.bracketed_paste(), alternate_screen: screen.alternate_screen() })
    }

    /// Signals the program's process group, unless the program was reaped.
    pub(crate) fn signal_group(&self, signal: Signal) {
        if let Some(root) = &*lock(&self.root) {
            root.signal_group(signal);
        }
    }

    pub(crate) fn set_ended(&self, exit: Exit) {
        // Not `send`, which stores nothing while there is no receiver.
        self.lifecycle.send_replace(Lifecycle::Ended(exit));
    }

    /// Frees the process id of the ended program.
    pub(crate) fn reap(&self, exit: Exit) {
        if let Some(root) = lock(&self.root).take() {
            root.reap();
        }
        self.lifecycle.send_replace(Lifecycle::Reaped(exit));
    }

    pub(crate) async fn exited(&self) -> Exit {
        let mut lifecycle = self.lifecycle.subscribe();
        let ended = lifecycle.wait_for(|state| *state != Lifecycle::Running).await.map(|state| *state);
        match ended {
            Ok(Lifecycle::Ended(exit) | Lifecycle::Reaped(exit)) => exit,
            // Cannot happen: the wait ends with another state, and the sender lives as long as `self`.
            Ok(Lifecycle::Running) | Err(_) => Exit::Unknown,
        }
    }

    pub(crate) async fn reaped(&self) {
        let mut lifecycle = self.lifecycle.subscribe();
        // The sender is a field of self, so the channel cannot be closed.
        let _ = lifecycle.wait_for(|state| matches!(state, Lifecycle::Reaped(_))).await;
    }

    /// The exit, once there is one.
    pub(crate) fn exit(&self) -> Option<Exit> {
        match *self.lifecycle.borrow() {
            Lifecycle::Running => None,
            Lifecycle::Ended(exit) | Lifecycle::Reaped(exit) => Some(exit),
        }
    }
}

/// Locks; a panic elsewhere leaves these states usable.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
