//! System calls without a safe wrapper in std.
#![expect(unsafe_code, reason = "kill, setrlimit, and prctl between fork and exec, have no safe wrapper in std")]

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::{fs, io};

/// Sends `signal` to `pid`.
pub(crate) fn kill(pid: u32, signal: i32) -> io::Result<()> {
    let pid = i32::try_from(pid).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: kill has no memory effects; a wrong pid is an error value.
    match unsafe { libc::kill(pid, signal) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Kills a process and its children at once: a child that outlived it would notice that and act on it.
pub(crate) fn kill9_with_children(pid: u32) -> io::Result<()> {
    // Stopped, it starts no further child.
    kill(pid, libc::SIGSTOP)?;
    for child in children_of(pid)? {
        // Fails if it has ended since the scan.
        let _ = kill(child, libc::SIGKILL);
    }
    kill(pid, libc::SIGKILL)
}

fn children_of(parent: u32) -> io::Result<Vec<u32>> {
    let mut children = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // It may have ended meanwhile.
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        // The name, in parentheses, may contain anything; state and parent follow it.
        let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
        if fields.split(' ').nth(1) == Some(parent.to_string().as_str()) {
            children.push(pid);
        }
    }
    Ok(children)
}

/// Raises the limit of open files to the maximum for this process and its later children: both hold thousands of
/// sockets, and the usual soft limit is 1024.
pub(crate) fn raise_open_file_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls only read or write the struct they are given.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            // If this fails, the lower limit stays, and only tests with very many sockets fail.
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}

/// Returns the effective user of this process.
pub(crate) fn effective_uid() -> u32 {
    // SAFETY: geteuid cannot fail and touches no memory.
    unsafe { libc::geteuid() }
}

/// Makes the kernel send `signal` to the child when the *thread* that spawned it ends.
///
/// std changes the user before it runs this hook; the other order would lose the setting.
pub(crate) fn signal_on_parent_death(command: &mut Command, signal: i32) {
    let parent = std::process::id();
    let hook = move || {
        // SAFETY: prctl and getppid are async-signal-safe and touch no memory of ours.
        let (set, now) =
            unsafe { (libc::prctl(libc::PR_SET_PDEATHSIG, signal as libc::c_ulong, 0, 0, 0), libc::getppid()) };
        if set != 0 {
            return Err(io::Error::last_os_error());
        }
        // The parent may have died between fork and prctl, in which case the signal would never arrive.
        if u32::try_from(now) != Ok(parent) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(())
    };
    // SAFETY: the hook allocates nothing and calls only async-signal-safe functions.
    unsafe { command.pre_exec(hook) };
}
