//! The one place with unsafe code: three calls that their libraries offer in no safe form.

#![expect(unsafe_code, reason = "steps between fork and exec, and registration of a descriptor")]

use std::{
    io,
    os::{fd::OwnedFd, unix::process::CommandExt},
    process::{Child, Command},
};

use tokio::io::{Interest, unix::AsyncFd};

use super::Account;

/// Registers a descriptor with the runtime's reactor. Needs to be on a runtime.
pub(crate) fn register(descriptor: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd always returns the same descriptor and keeps it open until it is dropped, which the AsyncFd
    // does after deregistering it.
    let registered = unsafe { AsyncFd::register_with_interest(descriptor, interest) };
    Ok(registered?)
}

/// Lets `command` take the rights of a user before it is executed.
pub(super) fn run_as(command: &mut Command, account: Account) {
    // SAFETY: as below; the account was read before the fork, and taking its rights is three system calls.
    unsafe {
        command.pre_exec(move || account.assume());
    }
}

/// Starts `command` as the leader of a session of its own whose controlling terminal is its standard input.
///
/// The standard library has put the terminal on descriptors 0 to 2, emptied the signal mask and restored SIGPIPE when
/// the closure runs. It does not restore other signals that this process was started with as ignored (`nohup` ignores
/// SIGHUP), and it does not close descriptors that this process inherited without the close-on-exec flag.
pub(super) fn spawn_session_leader(command: &mut Command) -> io::Result<Child> {
    // SAFETY: between fork and exec in a process with several threads only async-signal-safe functions may run. These
    // are plain system calls: no allocation, no lock, no panic.
    unsafe {
        command.pre_exec(|| {
            for signal in 1..=libc::SIGRTMAX() {
                // Fails for SIGKILL, SIGSTOP and the two signals that libc reserves; those cannot be ignored either.
                libc::signal(signal, libc::SIG_DFL);
            }
            rustix::process::setsid()?;
            rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
            // Marks instead of closing: the standard library reports a failed exec through a descriptor of its own.
            let marked = libc::syscall(
                libc::SYS_close_range,
                3_u32,
                libc::c_uint::MAX,
                libc::CLOSE_RANGE_CLOEXEC as libc::c_uint,
            );
            if marked == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
        });
    }
    command.spawn()
}
