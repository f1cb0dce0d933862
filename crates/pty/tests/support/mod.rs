//! A runtime and a host that the tests of one file share, and a program in a terminal with what it has said so far.

#![allow(dead_code, reason = "every test file uses another part")]

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    sync::{
        LazyLock,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use relay_pty::{
    EventStream, ExitReport, HostSettings, Limits, PtyHost, SpawnRequest, Terminal, TerminalEvent, WriteId,
};
use tokio::{runtime::Runtime, time::Instant};

/// Longest wait for a condition.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const MARKER_VARIABLE: &str = "RELAY_PTY_TEST_ID";

/// Runtime and host. A process has one host, so the tests of a file share it.
pub(crate) struct Stage {
    pub(crate) runtime: Runtime,
    pub(crate) host: PtyHost,
}

impl Stage {
    pub(crate) fn new(limits: Limits) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).max_blocking_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let entered = runtime.enter();
        let host = PtyHost::new(HostSettings { limits, ..HostSettings::new(MARKER_VARIABLE) }).expect("a host");
        drop(entered);
        Self { runtime, host }
    }

    pub(crate) fn run<T>(&'static self, test: impl Future<Output = T>) -> T {
        self.runtime.block_on(async { tokio::time::timeout(4 * PATIENCE, test).await.expect("the test hangs") })
    }

    /// Starts a shell script.
    pub(crate) async fn sh(&self, script: &str) -> Session {
        self.start(request("sh", &["-c", script])).await
    }

    /// Starts a Python program with arguments.
    pub(crate) async fn python(&self, program: &str, args: &[&str]) -> Session {
        let args: Vec<&str> = ["-c", program].into_iter().chain(args.iter().copied()).collect();
        self.start(request("python3", &args)).await
    }

    pub(crate) async fn start(&self, request: SpawnRequest) -> Session {
        let (terminal, events) = self.host.spawn(request).await.expect("the program starts");
        Session { terminal, events, output: Vec::new(), chunks: 0, began: Vec::new(), stalled: 0, exit: None }
    }
}

pub(crate) static STAGE: LazyLock<Stage> = LazyLock::new(|| Stage::new(Limits::default()));

pub(crate) fn request(program: &str, args: &[&str]) -> SpawnRequest {
    static LAST: AtomicU32 = AtomicU32::new(0);
    let marker = format!("{}-{}", std::process::id(), LAST.fetch_add(1, Ordering::Relaxed));
    let path = std::env::var_os("PATH").expect("PATH is set");
    let environment = BTreeMap::from([(OsString::from("PATH"), path)]);
    SpawnRequest { args: args.iter().map(OsString::from).collect(), environment, ..SpawnRequest::new(program, marker) }
}

pub(crate) struct Session {
    pub(crate) terminal: Terminal,
    events: EventStream,
    pub(crate) output: Vec<u8>,
    pub(crate) chunks: usize,
    /// Injections that began, each with the length of the output before it.
    pub(crate) began: Vec<(WriteId, usize)>,
    pub(crate) stalled: usize,
    pub(crate) exit: Option<ExitReport>,
}

impl Session {
    /// Takes one event.
    pub(crate) async fn step(&mut self) {
        let event = tokio::time::timeout(PATIENCE, self.events.next()).await;
        let event = event.unwrap_or_else(|_| panic!("no event after {:?}", self.tail()));
        match event.expect("an event before the stream's end") {
            TerminalEvent::Output(chunk) => {
                assert_eq!(chunk.offset(), self.output.len() as u64, "chunks are contiguous");
                assert!(!chunk.text().is_empty() && self.exit.is_none());
                self.output.extend_from_slice(chunk.bytes());
                self.chunks += 1;
            }
            TerminalEvent::InjectionBegan { id, output_offset } => {
                assert_eq!(output_offset, self.output.len() as u64, "everything before it was handed out");
                self.began.push((id, self.output.len()));
            }
            TerminalEvent::WriteStalled { .. } => self.stalled += 1,
            TerminalEvent::Exited(report) => self.exit = Some(report),
        }
    }

    pub(crate) async fn wait_until(&mut self, what: &str, met: impl Fn(&Self) -> bool) {
        while !met(self) {
            assert!(self.exit.is_none(), "ended before {what}: {:?}", self.tail());
            self.step().await;
        }
    }

    pub(crate) async fn wait_for(&mut self, text: &str) {
        self.wait_until(text, |session| session.text().contains(text)).await;
    }

    /// Takes events until the program has ended.
    pub(crate) async fn finish(&mut self) -> ExitReport {
        loop {
            if let Some(report) = self.exit {
                assert_eq!(report.output_bytes, self.output.len() as u64);
                return report;
            }
            self.step().await;
        }
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.output).into_owned()
    }

    /// The end of the output, for messages.
    fn tail(&self) -> String {
        String::from_utf8_lossy(&self.output[self.output.len().saturating_sub(500)..]).into_owned()
    }

    /// Types and waits until the terminal has taken it.
    pub(crate) async fn type_keys(&self, keys: &str) {
        let mut ticket = self.terminal.write_input(keys.to_owned()).await.expect("room");
        ticket.written().await.expect("written");
    }
}

/// Waits for a condition that no event announces.
pub(crate) async fn eventually(what: &str, mut met: impl FnMut() -> bool) {
    let started = Instant::now();
    while !met() {
        assert!(started.elapsed() < PATIENCE, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Returns true while a process with this id exists and has not ended.
pub(crate) fn is_alive(pid: i32) -> bool {
    let process = procfs::process::Process::new(pid).and_then(|process| process.stat());
    process.is_ok_and(|stat| !matches!(stat.state, 'Z' | 'X'))
}

/// Returns true while a living process carries this marker.
pub(crate) fn is_marked(marker: &OsStr) -> bool {
    let processes = procfs::process::all_processes().expect("the process table");
    let mut environments = processes.filter_map(|process| process.ok()?.environ().ok());
    environments.any(|environment| environment.get(OsStr::new(MARKER_VARIABLE)).is_some_and(|value| value == marker))
}

/// Numbers behind `key` in the output, such as `pids 12 13`.
pub(crate) fn numbers(text: &str, key: &str) -> Vec<i32> {
    let line = text.lines().find_map(|line| line.trim().strip_prefix(key)).expect("the line");
    line.split_whitespace().map(|number| number.parse().expect("a number")).collect()
}

/// Python: raw mode, then as many bytes of input as the first argument says into the file of the second.
pub(crate) const RECORD: &str = r#"
import os, sys, tty
tty.setraw(0)
os.write(1, sys.argv[3].encode() + b"READY")
left = int(sys.argv[1])
with open(sys.argv[2], "wb") as record:
    while left > 0:
        data = os.read(0, 700)
        record.write(data)
        left -= len(data)
os.write(1, b"RECORDED")
"#;
