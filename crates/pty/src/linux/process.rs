//! The process table as `/proc` shows it, signals that cannot reach a stranger, and adopted orphans.

use std::{
    collections::{HashMap, HashSet},
    ffi::{OsStr, OsString},
    io,
    time::Duration,
};

use procfs::{ProcError, process::Process};
pub(crate) use rustix::process::Signal;
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions};

/// Process id together with the start time, which distinguishes a process from later ones with the same id. Valid until
/// the machine is restarted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProcessIdentity {
    /// Process id.
    pub pid: i32,
    /// Start time in clock ticks since the machine's start.
    pub start_ticks: u64,
}

impl ProcessIdentity {
    /// Identity of no process. Leftovers with it are found by their marker only.
    pub const NONE: Self = Self { pid: -1, start_ticks: 0 };
}

/// One process at the moment of the scan.
#[derive(Debug, Clone)]
pub(crate) struct ProcessEntry {
    pub(crate) identity: ProcessIdentity,
    pub(crate) parent: i32,
    pub(crate) session: i32,
    /// It has ended and waits to be reaped.
    pub(crate) zombie: bool,
    pub(crate) cpu: Duration,
    pub(crate) resident_bytes: u64,
    pub(crate) threads: u64,
    /// Value of the marker variable at its exec, if the scan looked.
    pub(crate) marker: Option<OsString>,
}

/// Processes whose environment a scan reads. It costs more than all the rest of the scan.
#[derive(Debug, Clone)]
pub(crate) enum Scope {
    /// Orphans that this process has adopted; every other member of a tree is known by its session or parent.
    Adopted {
        /// Programs that were started by this process, whose marker is known.
        roots: HashSet<i32>,
    },
    /// Every process, for trees of an earlier process.
    Everything,
}

/// All processes of the machine, by id.
#[derive(Debug, Default)]
pub(crate) struct ProcessTable {
    pub(crate) entries: HashMap<i32, ProcessEntry>,
    pub(crate) own_pid: i32,
    /// Session of this process; 0 if its leader lives outside this process's PID namespace.
    pub(crate) own_session: i32,
}

impl ProcessTable {
    /// Reads `/proc`. Blocks for about 20 µs per process.
    pub(crate) fn read(marker_variable: &OsStr, scope: &Scope) -> io::Result<Self> {
        let own_pid = rustix::process::getpid().as_raw_pid();
        // Not `getsid`: in a container the session may belong to the host. The kernel then reports 0, which rustix
        // rejects.
        let own_session = Process::myself().and_then(|process| process.stat()).map_err(into_io)?.session;
        let mut table = Self { entries: HashMap::new(), own_pid, own_session };
        for process in procfs::process::all_processes().map_err(into_io)? {
            // A process that ends during the scan is left out.
            let Some(process) = process.ok() else { continue };
            let Some(mut entry) = entry(&process) else { continue };
            let marked = match scope {
                Scope::Adopted { roots } => table.is_adopted(&entry) && !roots.contains(&entry.identity.pid),
                Scope::Everything => entry.identity.pid != own_pid,
            };
            if marked && !entry.zombie {
                // Unreadable for processes of other users, unless this process is root. They count as unmarked.
                entry.marker = process.environ().ok().and_then(|mut variables| variables.remove(marker_variable));
            }
            table.entries.insert(entry.identity.pid, entry);
        }
        Ok(table)
    }

    /// Returns true for a child of this process outside its session: a program that was started in a terminal,
    /// or an orphan of one. A tree can leave its session only for a new one, never for that of this process.
    pub(crate) fn is_adopted(&self, entry: &ProcessEntry) -> bool {
        entry.parent == self.own_pid && entry.session != self.own_session
    }
}

fn entry(process: &Process) -> Option<ProcessEntry> {
    let stat = process.stat().ok()?;
    let ticks = (stat.utime + stat.stime) as f64 / procfs::ticks_per_second() as f64;
    Some(ProcessEntry {
        identity: ProcessIdentity { pid: stat.pid, start_ticks: stat.starttime },
        parent: stat.ppid,
        session: stat.session,
        zombie: matches!(stat.state, 'Z' | 'X'),
        cpu: Duration::from_secs_f64(ticks),
        resident_bytes: stat.rss * procfs::page_size(),
        threads: u64::try_from(stat.num_threads).unwrap_or(0),
        marker: None,
    })
}

fn into_io(error: ProcError) -> io::Error {
    if let ProcError::Io(source, _) = error { source } else { io::Error::other(error) }
}

/// Identity of a living process.
pub(super) fn identity(pid: i32) -> io::Result<ProcessIdentity> {
    let stat = Process::new(pid).and_then(|process| process.stat()).map_err(into_io)?;
    Ok(ProcessIdentity { pid, start_ticks: stat.starttime })
}

/// Sends a signal to exactly this process; false if it has ended.
pub(crate) fn send_signal(target: ProcessIdentity, signal: Signal) -> bool {
    let Some(pid) = Pid::from_raw(target.pid) else { return false };
    let Ok(pidfd) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { return false };
    // The descriptor pins one process. Only a start time read afterwards shows that it is the intended one.
    if !identity(target.pid).is_ok_and(|found| found == target) {
        return false;
    }
    rustix::process::pidfd_send_signal(&pidfd, signal).is_ok()
}

/// Orphans of this process's descendants become its children instead of those of process 1.
pub(crate) fn become_subreaper() -> io::Result<()> {
    Ok(rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?)
}

/// Frees the id of an adopted orphan that has ended.
pub(crate) fn reap_adopted(orphan: ProcessIdentity) {
    if let Some(pid) = Pid::from_raw(orphan.pid) {
        // Fails for a process that is no child of this one; nothing is to be done then.
        let _ = rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
    }
}
