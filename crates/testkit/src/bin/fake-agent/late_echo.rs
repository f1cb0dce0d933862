//! [`LateEcho`]: output of a program that shows messages long after it has taken them.

use std::{
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};

/// Texts that wait. Beyond it the program does not read on.
const MAX_WAITING: usize = 1024;

/// Prints texts after a while, in order.
#[derive(Debug)]
pub(crate) struct LateEcho {
    delay: Duration,
    texts: SyncSender<(Instant, String)>,
}

impl LateEcho {
    /// Starts the thread that prints.
    pub(crate) fn start(delay: Duration, print: impl Fn(&str) -> Result<()> + Send + 'static) -> Result<Self> {
        let (texts, due) = sync_channel(MAX_WAITING);
        thread::Builder::new().spawn(move || print_when_due(&due, print)).context("start the late echo")?;
        Ok(Self { delay, texts })
    }

    /// Prints a text when the delay is over.
    pub(crate) fn print(&self, text: String) -> Result<()> {
        self.texts.send((Instant::now() + self.delay, text)).context("the terminal is closed")
    }
}

fn print_when_due(due: &Receiver<(Instant, String)>, print: impl Fn(&str) -> Result<()>) {
    while let Ok((at, text)) = due.recv() {
        #[expect(clippy::disallowed_methods, reason = "the delay is what is played, on a thread of its own")]
        thread::sleep(at.saturating_duration_since(Instant::now()));
        if print(&text).is_err() {
            return;
        }
    }
}
