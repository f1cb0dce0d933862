//! Due work: wakes the loops of this process when there is something to do. Main types: [`DueWork`] and [`WorkWatch`].
//!
//! One statement a turn asks for the work of all loops, so that an idle process costs a few statements a second,
//! whatever the number of its loops. The read has no authority: a loop that it wakes reads its rows itself.

use std::{sync::Weak, time::Duration};

use relay_store::StoreResult;
pub use relay_store::maintenance::due_work::WorkKind;
use tokio::sync::watch;

use crate::Inner;

/// Time after which loops look themselves while a read goes on. A migration may hold a lock on one of its tables, or
/// there may be many subscriptions.
const SLOW_READ: Duration = Duration::from_millis(500);

/// Kinds of work that loops wait for, and the outcome of the last read.
#[derive(Debug)]
pub struct DueWork {
    /// Kinds that loops of this process wait for, with the longest time between two reads that each can bear.
    wanted: watch::Sender<AwaitedKinds>,
    last_read: watch::Sender<ReadOutcome>,
    /// Counts the reads that succeeded.
    reads: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct AwaitedKinds {
    kinds: Vec<WorkKind>,
    every: Option<Duration>,
}

#[derive(Debug, PartialEq, Eq)]
enum ReadOutcome {
    Work(Vec<WorkKind>),
    /// The read failed or is slow. All loops are to look, and to report a failure.
    Unknown,
}

impl Default for DueWork {
    fn default() -> Self {
        let last_read = watch::Sender::new(ReadOutcome::Work(Vec::new()));
        Self { wanted: watch::Sender::default(), last_read, reads: watch::Sender::default() }
    }
}

impl DueWork {
    /// Includes work of a kind in the reads, and makes them at least every `every`.
    #[must_use]
    pub fn watch(&self, kind: WorkKind, every: Duration) -> WorkWatch {
        self.wanted.send_modify(|wanted| {
            if !wanted.kinds.contains(&kind) {
                wanted.kinds.push(kind);
            }
            wanted.every = Some(wanted.every.map_or(every, |shortest| shortest.min(every)));
        });
        WorkWatch { kind, last_read: self.last_read.subscribe() }
    }

    /// Changes with each read that succeeded: a sign of life of storage.
    #[must_use]
    pub fn watch_reads(&self) -> watch::Receiver<u64> {
        self.reads.subscribe()
    }

    /// Waits for a read and wakes the loops that are concerned. A slow read goes on after all of them were woken, so
    /// that no more than one connection waits for a lock.
    async fn record_read(&self, read: impl Future<Output = StoreResult<Vec<WorkKind>>>) -> StoreResult<()> {
        tokio::pin!(read);
        let answer = match tokio::time::timeout(SLOW_READ, &mut read).await {
            Ok(answer) => answer,
            Err(_) => {
                tracing::debug!("read of due work is slow, every loop polls");
                self.publish(ReadOutcome::Unknown);
                read.await
            }
        };
        match answer {
            Ok(due) => {
                self.reads.send_modify(|count| *count += 1);
                self.publish(ReadOutcome::Work(due));
                Ok(())
            }
            Err(error) => {
                self.publish(ReadOutcome::Unknown);
                Err(error)
            }
        }
    }

    /// Wakes the loops that an outcome concerns. Those that wait for something else sleep on.
    fn publish(&self, outcome: ReadOutcome) {
        // A loop looks at the last outcome before it waits, so an equal one need not wake it.
        self.last_read.send_if_modified(|last| {
            let is_new = *last != outcome;
            *last = outcome;
            is_new
        });
    }
}

/// Wakes a loop.
#[derive(Debug, Clone)]
pub struct WorkWatch {
    kind: WorkKind,
    last_read: watch::Receiver<ReadOutcome>,
}

impl WorkWatch {
    /// Waits until the last read has found such work, has failed or is slow. Returns `false` when the engine was
    /// dropped.
    pub async fn wait(&mut self) -> bool {
        let is_due = |outcome: &ReadOutcome| match outcome {
            ReadOutcome::Work(kinds) => kinds.contains(&self.kind),
            ReadOutcome::Unknown => true,
        };
        self.last_read.wait_for(is_due).await.is_ok()
    }
}

/// Reads due work until the engine is dropped.
pub(crate) async fn run(engine: Weak<Inner>) {
    let Some(mut wanted) = engine.upgrade().map(|inner| inner.due_work.wanted.subscribe()) else { return };
    let mut is_failing = false;
    loop {
        let Ok(Some(every)) = wanted.wait_for(|wanted| wanted.every.is_some()).await.map(|wanted| wanted.every) else {
            return;
        };
        tokio::time::sleep(every).await;
        let Some(inner) = engine.upgrade() else { return };
        // Cloned: a borrow that lasts over the read would block loops that begin to watch.
        let kinds = wanted.borrow().kinds.clone();
        match inner.due_work.record_read(inner.core.store.due_work(&kinds)).await {
            Ok(()) => is_failing = false,
            Err(error) => {
                // Logged once per outage.
                if !is_failing {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(error, "failed to read due work, every loop polls");
                }
                is_failing = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use tokio::time::Instant;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test]
    async fn a_loop_wakes_when_its_work_is_found_or_the_read_has_failed() {
        let due = DueWork::default();
        let mut redrives = due.watch(WorkKind::DueRedrives, SECOND);
        let mut triggers = due.watch(WorkKind::UnscannedTriggers, SECOND);
        let is_awake = |watch: &mut WorkWatch| watch.wait().now_or_never().is_some();
        assert!(!is_awake(&mut redrives), "nothing was read yet");
        due.last_read.send_replace(ReadOutcome::Work(vec![WorkKind::DueRedrives]));
        assert!(is_awake(&mut redrives) && is_awake(&mut redrives), "as long as there is some");
        assert!(!is_awake(&mut triggers));
        due.last_read.send_replace(ReadOutcome::Unknown);
        assert!(is_awake(&mut redrives) && is_awake(&mut triggers));
        due.last_read.send_replace(ReadOutcome::Work(Vec::new()));
        assert!(!is_awake(&mut redrives) && !is_awake(&mut triggers));
    }

    #[tokio::test(start_paused = true)]
    async fn loops_look_themselves_while_a_read_is_slow() {
        let due = DueWork::default();
        let mut redrives = due.watch(WorkKind::DueRedrives, SECOND);
        let began = Instant::now();
        let slow_read = async {
            tokio::time::sleep(8 * SECOND).await;
            Ok(Vec::new())
        };
        let (read, woken_after) = tokio::join!(due.record_read(slow_read), async {
            assert!(redrives.wait().await);
            began.elapsed()
        });
        read.unwrap();
        assert_eq!((woken_after, began.elapsed()), (SLOW_READ, 8 * SECOND));
        assert!(redrives.wait().now_or_never().is_none(), "the answer counts");
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
