//! The end of process trees: a signal to stop, a grace, then SIGKILL until nothing is left.

use std::{ffi::OsString, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep, timeout};

use super::{Tree, Trees, with_descendants};
use crate::{
    Exit, ProcessIdentity, PtyError,
    linux::{ProcessEntry, ProcessTable, Signal, reap_adopted, send_signal},
    terminal::Shared,
};

/// Interval between looks at processes that are about to end.
const POLL: Duration = Duration::from_millis(25);
/// After the grace, the maximum wait for processes that were sent SIGKILL. Only one in uninterruptible sleep needs it.
const KILL_TIME: Duration = Duration::from_millis(1500);

/// A process tree that an earlier process of this program left behind.
#[derive(Debug, Clone)]
pub struct Leftover {
    /// Its program.
    pub root: ProcessIdentity,
    /// Value of the marker variable it was started with.
    pub marker: OsString,
}

/// Result of ending a process tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndReport {
    /// Exit status of the program; none for trees whose program this process did not start.
    pub exit: Option<Exit>,
    /// Processes that needed SIGKILL.
    pub killed: usize,
    /// Processes that could not be ended in time, by id.
    pub survivors: Vec<i32>,
}

/// Processes to end together.
pub(crate) enum Selection<'a> {
    /// Processes of one terminal of this host.
    Tree(&'a Tree),
    /// Processes of terminals of an earlier process, whose parents are unknown.
    Leftovers(&'a [Tree]),
    /// All orphans of terminals, also those whose terminal is not known.
    Orphans,
}

impl Trees {
    /// Ends the processes of one terminal.
    pub(crate) async fn end_terminal(&self, shared: &Arc<Shared>, grace: Duration) -> Result<EndReport, PtyError> {
        let deadline = Instant::now() + grace;
        if shared.exit().is_none() {
            // To the group first: the kernel reaches a child that is being forked right now as well. A stopped
            // process acts on the signals when it continues.
            for signal in [Signal::HUP, Signal::TERM, Signal::CONT] {
                shared.signal_group(signal);
            }
        }
        let mut report = self.end(&Selection::Tree(&shared.tree), deadline).await?;
        // Its status is taken at once; only a program in uninterruptible sleep has none.
        let _ = timeout(KILL_TIME, shared.reaped()).await;
        report.exit = shared.exit();
        Ok(report)
    }

    /// Asks the selected processes to end, and kills the remaining ones at `deadline`.
    pub(crate) async fn end(&self, selection: &Selection<'_>, deadline: Instant) -> Result<EndReport, PtyError> {
        let mut alive = self.select(selection).await?;
        let began_with_grace = Instant::now() < deadline;
        if began_with_grace {
            for process in &alive {
                send_signal(process.identity, Signal::TERM);
                send_signal(process.identity, Signal::CONT);
            }
        }
        while !alive.is_empty() && Instant::now() < deadline {
            sleep(POLL.min(deadline.saturating_duration_since(Instant::now()))).await;
            alive = self.select(selection).await?;
        }
        let mut killed = std::collections::HashSet::new();
        let kill_until = Instant::now() + KILL_TIME;
        // Again and again: a process may be forked between a scan and its signals.
        while !alive.is_empty() {
            killed.extend(alive.iter().map(|process| process.identity).filter(|id| send_signal(*id, Signal::KILL)));
            if Instant::now() >= kill_until {
                break;
            }
            sleep(POLL).await;
            alive = self.select(selection).await?;
        }
        let survivors = alive.iter().map(|process| process.identity.pid).collect();
        Ok(EndReport { exit: None, killed: killed.len(), survivors })
    }

    /// The selected processes that live. Orphans among them that have ended are reaped.
    async fn select(&self, selection: &Selection<'_>) -> Result<Vec<ProcessEntry>, PtyError> {
        let table = match selection {
            Selection::Tree(_) | Selection::Orphans => self.scan().await?,
            Selection::Leftovers(_) => self.scan_everything().await?,
        };
        let members = match selection {
            Selection::Tree(tree) => tree.members(&table),
            Selection::Leftovers(trees) => trees.iter().flat_map(|tree| tree.members(&table)).collect(),
            Selection::Orphans => with_descendants(&table, |entry| self.is_orphan(&table, entry)),
        };
        let (ended, alive): (Vec<_>, Vec<_>) = members.into_iter().partition(|entry| entry.zombie);
        for entry in ended.into_iter().filter(|entry| self.is_orphan(&table, entry)) {
            reap_adopted(entry.identity);
        }
        Ok(alive.into_iter().cloned().collect())
    }

    /// Returns true for a process of some terminal that lost its parent and was adopted by this process.
    pub(crate) fn is_orphan(&self, table: &ProcessTable, entry: &ProcessEntry) -> bool {
        table.is_adopted(entry) && !self.roots().contains(&entry.identity.pid)
    }
}
