//! Child processes: started, watched, signalled, restarted, and never left behind. Main types: [`Spec`] and
//! [`Process`].
//!
//! Children are spawned from one thread that lives as long as this process and have a parent-death signal, so they end
//! with it even on `kill -9`. They have their own process group: a Ctrl-C at the terminal reaches only the parent,
//! which then stops them gracefully.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::{os, wait};

/// Specification of a process, evaluated at each start.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Name in messages and in the log file's name.
    pub name: String,
    /// Path of the program.
    pub program: PathBuf,
    /// Arguments of the program.
    pub args: Vec<String>,
    /// Environment in addition to that of this process; `None` removes a variable.
    pub env: Vec<(String, Option<String>)>,
    /// Working directory, if not the current one.
    pub cwd: Option<PathBuf>,
    /// User and group to run as.
    pub run_as: Option<(u32, u32)>,
    /// File that stdout and stderr are appended to.
    pub log: PathBuf,
    /// Signal sent when the parent dies, and first in `Drop`.
    pub last_signal: i32,
}

impl Spec {
    /// Creates a specification of a process that is killed at the end.
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

/// Child process that can be restarted with the same specification.
#[derive(Debug)]
pub struct Process {
    spec: Spec,
    child: Mutex<Option<Child>>,
}

impl Process {
    /// Starts the child. Returns when it was executed, which is before it is ready.
    pub fn start(spec: Spec) -> Result<Self> {
        let process = Self { spec, child: Mutex::new(None) };
        process.start_again()?;
        Ok(process)
    }

    /// Restarts the child after it has exited.
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

    /// Returns the name of the process.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Returns the current or last process id; 0 if it never ran.
    pub fn pid(&self) -> u32 {
        self.slot().as_ref().map_or(0, Child::id)
    }

    /// Returns the exit status, or `None` while it runs.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        self.slot().as_mut().and_then(|child| child.try_wait().ok().flatten())
    }

    /// Returns whether it runs (a stopped process counts as running).
    pub fn is_running(&self) -> bool {
        self.slot().as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Sends a signal; has no effect after the exit.
    pub fn signal(&self, signal: i32) {
        // Under the lock, so that the pid cannot have been reaped and reused.
        let mut slot = self.slot();
        if let Some(child) = slot.as_mut()
            && matches!(child.try_wait(), Ok(None))
        {
            let _ = os::kill(child.id(), signal);
        }
    }

    /// Sends SIGKILL and waits for the exit.
    pub fn kill9(&self) {
        if let Some(child) = self.slot().as_mut() {
            // Neither fails for a child that has ended: std keeps its status, and killing it again has no effect.
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

    /// Sends `signal` and waits for the exit; after `timeout` the process is killed and the call fails.
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

    /// Polls `probe` until it succeeds. Fails with the last log lines if the process ends or `timeout` passes.
    pub async fn wait_until_ready<F, Fut>(&self, timeout: Duration, mut probe: F) -> Result<()>
    where
        F: FnMut() -> Fut,
        Fut: Future<Output = Result<()>>,
    {
        let what = format!("{} to be ready", self.spec.name);
        let ready = wait::until_ok(&what, timeout, || {
            let outcome = self.is_running().then(&mut probe);
            async move {
                match outcome {
                    Some(probe) => probe.await.map(|()| true),
                    // Polling ends, because a process that has exited will not become ready.
                    None => Ok(false),
                }
            }
        })
        .await;
        match ready {
            Ok(true) => Ok(()),
            Ok(false) => bail!("{} ended while starting:\n{}", self.spec.name, self.log_tail(25)),
            Err(error) => bail!("{error:#}; its log ends:\n{}", self.log_tail(25)),
        }
    }

    /// Returns the path of its log.
    pub fn log(&self) -> &Path {
        &self.spec.log
    }

    /// Returns the last lines of its output, for error messages.
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
            // A frozen process acts on the signal when it continues.
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

/// Implements the process controls of a type with a field `process: Process`.
macro_rules! impl_process_controls {
    ($type:ty) => {
        impl $type {
            /// Returns the process id.
            pub fn pid(&self) -> u32 {
                self.process.pid()
            }

            /// Returns whether the process runs.
            pub fn is_running(&self) -> bool {
                self.process.is_running()
            }

            /// Sends SIGKILL and waits for the exit.
            pub fn kill9(&self) {
                self.process.kill9();
            }

            /// Freezes the process: its connections stay open.
            pub fn sigstop(&self) {
                self.process.sigstop();
            }

            /// Wakes a frozen process.
            pub fn sigcont(&self) {
                self.process.sigcont();
            }
        }
    };
}
pub(crate) use impl_process_controls;

type Request = (Command, SyncSender<io::Result<Child>>);

/// Spawns on one long-lived thread: the parent-death signal is bound to the spawning *thread*, and a thread of a test's
/// runtime ends before the process does.
fn spawn(command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<SyncSender<Request>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        os::raise_open_file_limit();
        let (requests, inbox) = sync_channel::<Request>(16);
        let serve = move || {
            for (mut command, reply) in inbox {
                // Cannot fail: the caller waits for the answer.
                let _ = reply.send(command.spawn());
            }
        };
        // Without a thread the channel is closed and every spawn fails with the message below.
        let _ = std::thread::Builder::new().name("spawner".into()).spawn(serve);
        requests
    });
    let ended = || io::Error::other("the spawner thread has ended");
    let (reply, answer) = sync_channel(1);
    spawner.send((command, reply)).map_err(|_| ended())?;
    answer.recv().map_err(|_| ended())?
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
    async fn a_dropped_process_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let process = Process::start(sleeper(dir.path())).unwrap();
        let pid = process.pid();
        drop(process);
        assert!(os::kill(pid, 0).is_err());
    }
}
