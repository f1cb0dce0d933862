//! Reaping of orphans that this process has adopted.

use std::{collections::HashSet, sync::Arc, time::Duration};

use tokio::{signal::unix::Signal, time::sleep};

use super::Trees;
use crate::{ProcessIdentity, linux::reap_adopted};

/// Time for which an ended child is left to another part of this process that may wait for it.
const PATIENCE: Duration = Duration::from_secs(1);

/// Frees the ids of orphans that have ended. `children` is the stream of SIGCHLD.
///
/// A child is taken for an orphan if it left the session of this process, was not started in a terminal by this
/// process, and has been waiting to be reaped for two looks: another part of this process that waits for a child of
/// its own has done so by then.
pub(crate) async fn run(trees: Arc<Trees>, mut children: Signal) {
    let mut suspects: HashSet<ProcessIdentity> = HashSet::new();
    loop {
        // With suspects there is a second look to take, which needs no further signal.
        if suspects.is_empty() && children.recv().await.is_none() {
            return;
        }
        sleep(PATIENCE).await;
        let table = match trees.scan().await {
            Ok(table) => table,
            Err(error) => {
                tracing::warn!(%error, "scanning the process table failed, orphans are reaped later");
                continue;
            }
        };
        let ended = table.entries.values().filter(|entry| entry.zombie && trees.is_orphan(&table, entry));
        let ended: HashSet<ProcessIdentity> = ended.map(|entry| entry.identity).collect();
        for orphan in ended.intersection(&suspects) {
            reap_adopted(*orphan);
        }
        // Suspects of the last look have just been reaped.
        suspects = ended.difference(&suspects).copied().collect();
    }
}
