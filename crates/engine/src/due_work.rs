//! Due work: wakes the loops of this process when there is something to do. Main types: [`DueWork`] and [`WorkWatch`].
//!
//! One statement a turn asks for the work of all loops, so that an idle process costs a few statements a second, whatever
//! the number of its loops. The read has no authority: a loop that it wakes reads its rows itself.

use std::{sync::Weak, time::Duration};

pub use relay_store::maintenance::due_work::WorkKind;
use tokio::sync::watch;

use crate::Inner;

/// Work that loops wait for, and what the last read has found of it.
#[derive(Debug)]
pub struct DueWork {
    /// Kinds that loops of this process wait for, with the longest time between two reads that each can bear.
    wanted: watch::Sender<Wanted>,
    found: watch::Sender<Found>,
    /// Counts the reads that succeeded.
    reads: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Wanted {
    kinds: Vec<WorkKind>,
    every: Option<Duration>,
}

/// Result of a read.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    Work(Vec<WorkKind>),
    /// The read failed. All loops are to look, and to report the failure.
    Unknown,
}

impl Default for DueWork {
    fn default() -> Self {
        let nothing = Found::Work(Vec::new());
        Self { wanted: watch::Sender::default(), found: watch::Sender::new(nothing), reads: watch::Sender::default() }
    }
}

impl DueWork {
    /// Has the reads ask for work of a kind, at least every so often.
    #[must_use]
    pub fn watch(&self, kind: WorkKind, every: Duration) -> WorkWatch {
        self.wanted.send_modify(|wanted| {
            if !wanted.kinds.contains(&kind) {
                wanted.kinds.push(kind);
            }
            wanted.every = Some(wanted.every.map_or(every, |shortest| shortest.min(every)));
        });
        WorkWatch { kind, found: self.found.subscribe() }
    }

    /// Changes with each read that succeeded: a sign of life of storage.
    #[must_use]
    pub fn watch_reads(&self) -> watch::Receiver<u64> {
        self.reads.subscribe()
    }
}

/// Wakes a loop.
#[derive(Debug, Clone)]
pub struct WorkWatch {
    kind: WorkKind,
    found: watch::Receiver<Found>,
}

impl WorkWatch {
    /// Waits until the last read has found such work, or has failed. Returns `false` when the engine was dropped.
    pub async fn wait(&mut self) -> bool {
        let is_due = |found: &Found| match found {
            Found::Work(kinds) => kinds.contains(&self.kind),
            Found::Unknown => true,
        };
        self.found.wait_for(is_due).await.is_ok()
    }
}

/// Reads due work until the engine is dropped.
pub(crate) async fn run(engine: Weak<Inner>) {
    let Some(mut wanted) = engine.upgrade().map(|inner| inner.due_work.wanted.subscribe()) else { return };
    loop {
        let Ok(every) = wanted.wait_for(|wanted| wanted.every.is_some()).await.map(|wanted| wanted.every) else {
            return;
        };
        tokio::time::sleep(every.unwrap_or_default()).await;
        let Some(inner) = engine.upgrade() else { return };
        let kinds = wanted.borrow().kinds.clone();
        let found = match inner.core.store.due_work(&kinds).await {
            Ok(due) => {
                inner.due_work.reads.send_modify(|count| *count += 1);
                Found::Work(due)
            }
            Err(error) => {
                // Logged once per outage.
                if *inner.due_work.found.borrow() != Found::Unknown {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(error, "due work not read, all loops look themselves");
                }
                Found::Unknown
            }
        };
        // Loops that wait for something else sleep on.
        inner.due_work.found.send_if_modified(|last| {
            let is_new = *last != found;
            *last = found;
            is_new
        });
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test]
    async fn a_loop_wakes_when_its_work_is_found_or_the_read_has_failed() {
        let due = DueWork::default();
        let mut redrives = due.watch(WorkKind::DueRedrives, SECOND);
        let mut triggers = due.watch(WorkKind::UnscannedTriggers, SECOND);
        let is_awake = |watch: &mut WorkWatch| watch.wait().now_or_never().is_some();
        assert!(!is_awake(&mut redrives), "nothing was read yet");
        due.found.send_replace(Found::Work(vec![WorkKind::DueRedrives]));
        assert!(is_awake(&mut redrives) && is_awake(&mut redrives), "as long as there is some");
        assert!(!is_awake(&mut triggers));
        due.found.send_replace(Found::Unknown);
        assert!(is_awake(&mut redrives) && is_awake(&mut triggers));
        due.found.send_replace(Found::Work(Vec::new()));
        assert!(!is_awake(&mut redrives) && !is_awake(&mut triggers));
    }

    #[tokio::test]
    async fn a_waiting_loop_ends_with_the_engine() {
        let due = DueWork::default();
        let mut redrives = due.watch(WorkKind::DueRedrives, SECOND);
        drop(due);
        assert!(!redrives.wait().await);
    }

    #[test]
    fn reads_ask_once_for_each_kind_as_often_as_the_most_urgent_loop_needs() {
        let due = DueWork::default();
        let _watches = [
            due.watch(WorkKind::DueRedrives, SECOND),
            due.watch(WorkKind::UnscannedTriggers, SECOND / 4),
            due.watch(WorkKind::DueRedrives, SECOND / 2),
        ];
        let wanted = due.wanted.borrow();
        assert_eq!(wanted.kinds, [WorkKind::DueRedrives, WorkKind::UnscannedTriggers]);
        assert_eq!(wanted.every, Some(SECOND / 4));
    }
}
