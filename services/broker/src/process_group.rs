//! [`ProcessGroup`]: the processes of a program without a terminal, which end with it. Used for runs of headless agents
//! and for supervised runners.

use std::time::Duration;

use relay_pty::{Leftover, ProcessIdentity, PtyHost};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};

use crate::agents::MARKER;

/// Processes of a program that was started by [`Self::start`]. Dropping it kills those that have not left the group.
pub(crate) struct ProcessGroup {
    id: Option<Pid>,
    marker: String,
    host: PtyHost,
}

impl ProcessGroup {
    /// Starts a program in a group of its own. Its processes are found by `marker` when they leave the group.
    pub(crate) fn start(command: &mut Command, marker: String, host: PtyHost) -> std::io::Result<(Child, Self)> {
        // A session of its own would make it an orphan of a terminal.
        let child = command.env(MARKER, &marker).process_group(0).kill_on_drop(true).spawn()?;
        let id = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        Ok((child, Self { id, marker, host }))
    }

    /// Asks the processes of the group to end.
    pub(crate) fn terminate(&self) {
        self.send(Signal::TERM);
    }

    /// Kills the group and the processes that have left it.
    pub(crate) async fn end(mut self) {
        self.send(Signal::KILL);
        // Another group may have its id from now on.
        self.id = None;
        end_marked(&self.host, &self.marker).await;
    }

    fn send(&self, signal: Signal) {
        // Without a process that is left there is no group.
        let _ = self.id.map(|group| kill_process_group(group, signal));
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.send(Signal::KILL);
    }
}

/// Kills all processes that were started with a marker.
pub(crate) async fn end_marked(host: &PtyHost, marker: &str) {
    let leftover = Leftover { root: ProcessIdentity::NONE, marker: marker.into() };
    match host.end_leftovers(&[leftover], Duration::ZERO).await {
        Ok(report) if report.survivors.is_empty() => {}
        Ok(report) => tracing::error!(survivors = ?report.survivors, "failed to end all processes of a program"),
        Err(error) => tracing::error!(%error, "the processes that a program has left could not be ended"),
    }
}
