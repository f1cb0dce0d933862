//! The program at the root of a terminal: start, exit status, and the reaping that frees its process id.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    process::{Command, Stdio},
};

use rustix::{
    io::Errno,
    process::{Pid, PidfdFlags, WaitId, WaitIdOptions},
};
use tokio::io::{Interest, unix::AsyncFd};

use super::{ProcessIdentity, Signal, process, unsafe_calls};
use crate::{Exit, PtyError, SpawnRequest};

/// A started program. Its process id stays reserved until [`RootProcess::reap`], so that signals to its group cannot
/// reach a stranger.
#[derive(Debug)]
pub(crate) struct RootProcess {
    pub(crate) identity: ProcessIdentity,
    pidfd: AsyncFd<OwnedFd>,
}

/// Starts the program on its side of a terminal. Blocks until the program was executed.
pub(crate) fn start(
    request: &SpawnRequest,
    marker_variable: &std::ffi::OsStr,
    program_side: OwnedFd,
) -> Result<RootProcess, PtyError> {
    if let Some(path) = &request.working_directory {
        // The standard library enters the directory before the closure that takes the account's rights, that is, as
        // root. So the account's right to enter it is checked here.
        let _access = request.account.as_ref().map(|account| account.file_access());
        check_directory(path).map_err(|source| PtyError::WorkingDirectory { path: path.clone(), source })?;
    }
    let execute = |source| PtyError::Execute { program: request.program.clone(), source };
    if let Some(account) = &request.account {
        // Programs open their terminal again by its name.
        std::os::unix::fs::fchown(&program_side, Some(account.uid()), None).map_err(PtyError::OpenTerminal)?;
    }
    let mut command = Command::new(&request.program);
    command
        .args(&request.args)
        .env_clear()
        .envs(request.complete_environment(marker_variable))
        .stdin(Stdio::from(program_side.try_clone().map_err(PtyError::OpenTerminal)?))
        .stdout(Stdio::from(program_side.try_clone().map_err(PtyError::OpenTerminal)?))
        .stderr(Stdio::from(program_side));
    if let Some(path) = &request.working_directory {
        command.current_dir(path);
    }
    if let Some(account) = &request.account {
        account.apply(&mut command);
    }
    let child = unsafe_calls::spawn_session_leader(&mut command).map_err(execute)?;
    // Dropping a `Child` neither ends nor reaps it; from here on its id is watched instead.
    let pid = Pid::from_child(&child);
    watch(pid).inspect_err(|_| {
        // Nothing refers to the program yet, so it must not run on. It is unreaped: the id is still its own.
        let _ = rustix::process::kill_process_group(pid, Signal::KILL);
        let _ = rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED);
    })
}

fn check_directory(path: &Path) -> io::Result<()> {
    // The entry in it needs the right to enter it.
    if std::fs::metadata(path.join("."))?.is_dir() { Ok(()) } else { Err(io::ErrorKind::NotADirectory.into()) }
}

fn watch(pid: Pid) -> Result<RootProcess, PtyError> {
    let pidfd =
        rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(|error| PtyError::PrepareHost(error.into()))?;
    let identity = process::identity(pid.as_raw_pid()).map_err(PtyError::ProcessTable)?;
    let pidfd = unsafe_calls::register(pidfd, Interest::READABLE).map_err(PtyError::PrepareHost)?;
    Ok(RootProcess { identity, pidfd })
}

impl RootProcess {
    /// Waits until the program has ended, without reaping it. Safe to cancel.
    pub(crate) async fn ended(&self) -> Exit {
        loop {
            // Fails only when the runtime shuts down.
            let Ok(mut ready) = self.pidfd.readable().await else {
                return Exit::Unknown;
            };
            match self.exit(WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT) {
                Some(exit) => return exit,
                None => ready.clear_ready(),
            }
        }
    }

    /// Sends `signal` to the program's own process group. Only before [`RootProcess::reap`].
    pub(crate) fn signal_group(&self, signal: Signal) {
        if let Some(group) = Pid::from_raw(self.identity.pid) {
            // ESRCH: the group has no living process.
            let _ = rustix::process::kill_process_group(group, signal);
        }
    }

    /// Frees the process id of a program that has ended.
    pub(crate) fn reap(&self) {
        // `ended` has reported the status already; this call only takes it.
        let _ = self.exit(WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
    }

    fn exit(&self, options: WaitIdOptions) -> Option<Exit> {
        let status = loop {
            match rustix::process::waitid(WaitId::PidFd(self.pidfd.get_ref().as_fd()), options) {
                Ok(status) => break status?,
                Err(Errno::INTR) => {}
                // Another part of this process has taken the status.
                Err(_) => return Some(Exit::Unknown),
            }
        };
        let code = status.exit_status().map(Exit::Code);
        Some(code.or_else(|| status.terminating_signal().map(Exit::Signal)).unwrap_or(Exit::Unknown))
    }
}
