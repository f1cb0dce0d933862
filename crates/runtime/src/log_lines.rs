//! [`LogLines`]: log lines on stderr that no reader of stderr can delay. One thread writes them from a bounded queue;
//! with a full queue lines are dropped and counted.

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::Duration,
};

use tracing_subscriber::fmt::MakeWriter;

/// Lines that wait to be written.
const QUEUE: usize = 4096;
/// Longest line; the rest is cut off.
const MAX_LINE: usize = 64 << 10;
/// An ending process waits so long for its last lines.
const FLUSH_WITHIN: Duration = Duration::from_millis(500);

/// Queue of the lines. Clones are the same queue.
#[derive(Debug, Clone)]
pub(crate) struct LogLines {
    queue: SyncSender<Entry>,
    dropped: Arc<AtomicU64>,
}

#[derive(Debug)]
enum Entry {
    Line(Box<[u8]>),
    /// Everything before it was written.
    Flush(SyncSender<()>),
}

impl LogLines {
    /// Starts the thread, which ends with the process.
    pub(crate) fn start(target: impl Write + Send + 'static) -> io::Result<Self> {
        let (queue, entries) = sync_channel(QUEUE);
        let dropped = Arc::<AtomicU64>::default();
        let counted = dropped.clone();
        thread::Builder::new().name("log-lines".to_owned()).spawn(move || write_all(target, &entries, &counted))?;
        Ok(Self { queue, dropped })
    }

    /// Waits for the lines that are in the queue, for a limited time.
    pub(crate) fn flush(&self) {
        let (written, wait) = sync_channel(1);
        // A full queue is not going to be written in time.
        if self.queue.try_send(Entry::Flush(written)).is_ok() {
            let _ = wait.recv_timeout(FLUSH_WITHIN);
        }
    }
}

/// Writes until all queues are dropped. A closed stderr takes nothing and is no error.
fn write_all(mut target: impl Write, entries: &Receiver<Entry>, dropped: &AtomicU64) {
    while let Ok(entry) = entries.recv() {
        match entry {
            Entry::Line(line) => {
                let _ = target.write_all(&line);
                // Reported here and not where lines are dropped, because the queue is full then.
                let count = dropped.swap(0, Ordering::Relaxed);
                if count > 0 {
                    let _ = writeln!(target, "{{\"level\":\"WARN\",\"message\":\"{count} log lines were dropped\"}}");
                }
            }
            Entry::Flush(written) => {
                let _ = target.flush();
                // The process may have stopped to wait.
                let _ = written.send(());
            }
        }
    }
}

impl Write for LogLines {
    /// Takes one event's line.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut kept = line[..line.len().min(MAX_LINE)].to_vec();
        if kept.len() < line.len() {
            // The next line begins on a line of its own.
            kept[MAX_LINE - 1] = b'\n';
        }
        if let Err(TrySendError::Full(_)) = self.queue.try_send(Entry::Line(kept.into())) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for LogLines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// A reader that takes nothing while it is locked.
    #[derive(Clone, Default)]
    struct Slow(Arc<Mutex<Vec<u8>>>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("a lock").write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_long_line_is_cut_and_still_ends() {
        let whole = Slow::default();
        let mut lines = LogLines::start(whole.clone()).expect("a thread");
        for line in ["x".repeat(MAX_LINE - 1), "y".repeat(MAX_LINE), "z".to_owned()] {
            lines.write_all(format!("{line}\n").as_bytes()).expect("room");
        }
        lines.flush();
        let written = String::from_utf8(whole.0.lock().expect("a lock").clone()).expect("text");
        let lengths: Vec<usize> = written.lines().map(str::len).collect();
        assert_eq!(lengths, [MAX_LINE - 1, MAX_LINE - 1, 1]);
    }

    #[test]
    fn a_reader_that_takes_nothing_delays_no_caller_and_sees_the_loss() {
        let slow = Slow::default();
        let mut lines = LogLines::start(slow.clone()).expect("a thread");
        let taken = slow.0.lock().expect("a lock");
        for number in 0..QUEUE + 100 {
            lines.write_all(format!("line {number}\n").as_bytes()).expect("taken or dropped");
        }
        drop(taken);
        loop {
            lines.flush();
            let written = String::from_utf8(slow.0.lock().expect("a lock").clone()).expect("text");
            // A flush has no effect while the queue is full.
            if written.contains(&format!("line {}\n", QUEUE - 1)) {
                assert!(written.contains("log lines were dropped"), "{}", written.len());
                assert!(!written.contains(&format!("line {}\n", QUEUE + 99)));
                return;
            }
        }
    }
}
