//! One child process: started, watched, signalled, restarted, and never left behind.
//!
//! Children are spawned from one thread that lives as long as this process and carry a parent-death signal, so
//! they end with it even on `kill -9`. They have a process group of their own: a Ctrl-C at the terminal reaches
//! the harness only, which then stops them in order.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::os;

/// What to run; applied anew at each start.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Name in messages and in the log file's name.
    pub name: String,
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// Environment on top of ours; `None` removes a variable.
    pub env: Vec<(String, Option<String>)>,
    /// Working directory.
    pub cwd: Option<PathBuf>,
    /// User and group to run as.
    pub run_as: Option<(u32, u32)>,
    /// Where stdout and stderr are appended.
    pub log: PathBuf,
    /// Sent when the harness itself dies, and first in `Drop`.
    pub last_signal: i32,
}

impl Spec {
    /// A child that is killed outright at the end.
    pub fn new(name: impl Into<String>, program: impl Into<PathBuf>, log: impl Into<PathBuf>) -> Self {
        Self {
            name: name.into(),
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            cwd: None,
            run_as: None,
            log: log.into(),
            last_signal: libc::SIGKILL,
        }
    }

    fn command(&self) -> Result<Command> {
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.log)
            .with_context(|| format!("open {}", self.log.display()))?;
        let mut command = Command::new(&self.program);
        command.args(&self.args).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        command.process_group(0);
        for (key, value) in &self.env {
            match value {
                Some(value) => command.env(key, value),
                None => command.env_remove(key),
            };
        }
        if let Some(cwd) = &self.cwd {
            command.current_dir(cwd);
        }
        if let Some((uid, gid)) = self.run_as {
            command.uid(uid).gid(gid);
        }
        os::signal_on_parent_death(&mut command, self.last_signal);
        Ok(command)
    }
}

/// A child process that can be started again with the same specification.
#[derive(Debug)]
pub struct Process {
    spec: Spec,
    child: Mutex<Option<Child>>,
}

impl Process {
    /// Starts the child. Returns once it was executed, not once it is ready.
    pub fn start(spec: Spec) -> Result<Self> {
        let process = Self { spec, child: Mutex::new(None) };
        process.start_again()?;
        Ok(process)
    }

    /// Starts the child anew; it must have ended.
    pub fn start_again(&self) -> Result<()> {
        let mut slot = self.slot();
        if let Some(child) = slot.as_mut()
            && child.try_wait()?.is_none()
        {
            bail!("{} is still running as pid {}", self.spec.name, child.id());
        }
        let command = self.spec.command()?;
        let child =
            spawn(command).with_context(|| format!("start {} ({})", self.spec.name, self.spec.program.display()))?;
        *slot = Some(child);
        Ok(())
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// The current (or last) process id; 0 if it never ran.
    pub fn pid(&self) -> u32 {
        self.slot().as_ref().map_or(0, Child::id)
    }

    /// The exit status once it has ended, `None` while it runs.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        self.slot().as_mut().and_then(|child| child.try_wait().ok().flatten())
    }

    /// Whether it runs (a stopped process counts as running).
    pub fn is_running(&self) -> bool {
        self.slot().as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Sends a signal; nothing happens if it has ended.
    pub fn signal(&self, signal: i32) {
        // Under the lock, so that the pid cannot have been reaped and reused.
        let mut slot = self.slot();
        if let Some(child) = slot.as_mut()
            && matches!(child.try_wait(), Ok(None))
        {
            let _ = os::kill(child.id(), signal);
        }
    }

    /// `kill -9`, and waits until the process is gone.
    pub fn kill9(&self) {
        if let Some(child) = self.slot().as_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Freezes the process.
    pub fn sigstop(&self) {
        self.signal(libc::SIGSTOP);
    }

    /// Wakes a frozen process.
    pub fn sigcont(&self) {
        self.signal(libc::SIGCONT);
    }

    /// Sends `signal` and waits for the end; after `timeout` it is killed and the call fails.
    pub async fn stop_with(&self, signal: i32, timeout: Duration) -> Result<ExitStatus> {
        self.signal(signal);
        self.sigcont();
        let started = Instant::now();
        loop {
            if let Some(status) = self.exit_status() {
                return Ok(status);
            }
            if self.pid() == 0 {
                bail!("{} never ran", self.spec.name);
            }
            if started.elapsed() > timeout {
                self.kill9();
                bail!("{} ignored signal {signal} for {timeout:?} and was killed", self.spec.name);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Where its output goes.
    pub fn log(&self) -> &Path {
        &self.spec.log
    }

    /// The last lines of its output, for error messages.
    pub fn log_tail(&self, lines: usize) -> String {
        tail(&self.spec.log, lines).unwrap_or_default()
    }

    fn slot(&self) -> MutexGuard<'_, Option<Child>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.spec.last_signal != libc::SIGKILL {
            self.signal(self.spec.last_signal);
            self.sigcont();
            let started = Instant::now();
            while self.is_running() && started.elapsed() < Duration::from_secs(5) {
                #[expect(clippy::disallowed_methods, reason = "Drop cannot await")]
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        self.kill9();
    }
}

/// Reads the last `lines` lines within the last 64 KiB of a file.
pub fn tail(path: &Path, lines: usize) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(64 * 1024)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().collect();
    Ok(all[all.len().saturating_sub(lines)..].join("\n"))
}

type Request = (Command, SyncSender<io::Result<Child>>);

/// Spawns on the one long-lived thread: the parent-death signal is bound to the spawning *thread*, and a thread
/// of a test's runtime ends before the process does.
fn spawn(command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<SyncSender<Request>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        os::raise_open_file_limit();
        let (requests, inbox) = sync_channel::<Request>(16);
        let serve = move || {
            for (mut command, reply) in inbox {
                let _ = reply.send(command.spawn());
            }
        };
        // Without a thread the channel is closed and every spawn fails with the message below.
        let _ = std::thread::Builder::new().name("spawner".into()).spawn(serve);
        requests
    });
    let gone = || io::Error::other("the spawner thread is gone");
    let (reply, answer) = sync_channel(1);
    spawner.send((command, reply)).map_err(|_| gone())?;
    answer.recv().map_err(|_| gone())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper(dir: &Path) -> Spec {
        let mut spec = Spec::new("sleeper", "/bin/sh", dir.join("sleeper.log"));
        spec.args = vec!["-c".into(), "echo up; exec sleep 60".into()];
        spec
    }

    #[tokio::test]
    async fn a_process_can_be_killed_started_again_and_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let process = Process::start(sleeper(dir.path())).unwrap();
        let first = process.pid();
        assert!(process.is_running());
        process.kill9();
        assert!(!process.is_running());
        process.start_again().unwrap();
        assert_ne!(process.pid(), first);
        process.sigstop();
        process.stop_with(libc::SIGTERM, Duration::from_secs(5)).await.unwrap();
        assert!(!process.is_running());
    }

    #[tokio::test]
    async fn a_dropped_process_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let process = Process::start(sleeper(dir.path())).unwrap();
        let pid = process.pid();
        drop(process);
        assert!(os::kill(pid, 0).is_err());
    }
}
