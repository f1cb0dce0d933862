//! Tasks of a process: [`TaskSet`] for the long-running ones, whose end stops the process, [`spawn_isolated`] for
//! those of one request, connection, mailbox or endpoint, whose panic must not, [`batches`] for queues that one task
//! empties, [`newest`] for values of which only the newest counts, and [`byte_budget`] for message bodies in memory.
//!
//! Used by the engine, the dispatcher, the runtime and the services. No other crate of these calls `tokio::spawn`; a
//! library crate owns a `JoinSet` (`cargo xtask tidy`).

pub mod batches;
pub mod byte_budget;
pub mod metric_names;
pub mod newest;

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, OnceLock},
};

use futures::FutureExt as _;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::metric_names::TASK_PANICS;

/// Long-running tasks of one process. Cheap to clone; all clones are the same set.
#[derive(Debug, Clone)]
pub struct TaskSet {
    stopping: CancellationToken,
    /// First task that ended unexpectedly: the cause, from which the ends of others may follow.
    ended: Arc<OnceLock<&'static str>>,
}

/// A long-running task ended before the process was to stop.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the task {0} ended unexpectedly")]
pub struct TaskEnded(pub &'static str);

impl TaskSet {
    /// Creates an empty set. Cancelling `stopping` stops the process: from then on tasks are expected to end. The set
    /// cancels it itself when a task ends earlier.
    #[must_use]
    pub fn new(stopping: CancellationToken) -> Self {
        Self { stopping, ended: Arc::default() }
    }

    /// Starts a task that lives as long as the process.
    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        let set = self.clone();
        tokio::spawn(async move {
            isolate(name, task).await;
            set.on_end(name);
        })
    }

    fn on_end(&self, name: &'static str) {
        if self.stopping.is_cancelled() {
            return;
        }
        tracing::error!(task.name = name, "long-running task ended, stopping the process");
        // Fails if another task ended before, which is the cause then. Before the cancellation, so that `check` finds
        // it.
        let _ = self.ended.set(name);
        self.stopping.cancel();
    }

    /// Tells at the end of the process whether it had to stop because of a task.
    ///
    /// # Errors
    /// With the name of the task that ended.
    pub fn check(&self) -> Result<(), TaskEnded> {
        self.ended.get().map_or(Ok(()), |name| Err(TaskEnded(name)))
    }
}

/// Starts a task of one request, connection, mailbox or endpoint. A panic ends this task only: it is counted under
/// `kind`, and the handle yields the error.
pub fn spawn_isolated<T: Send + 'static>(
    kind: &'static str,
    task: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    // A combinator: an async block would have room for the task twice, as it was captured and as it is awaited.
    tokio::spawn(AssertUnwindSafe(task).catch_unwind().map(move |output| {
        output.unwrap_or_else(|panic| {
            count_panic(kind);
            // Raised again, so that the handle yields the panic as its error.
            std::panic::resume_unwind(panic)
        })
    }))
}

/// Runs a part of a task whose cleanup must follow even if the part panics: then `None`, counted under `kind`.
pub fn isolate<T>(kind: &'static str, part: impl Future<Output = T>) -> impl Future<Output = Option<T>> {
    AssertUnwindSafe(part).catch_unwind().map(move |output| {
        if output.is_err() {
            count_panic(kind);
        }
        output.ok()
    })
}

/// Counts a panic that was caught where its request, connection, mailbox or endpoint is known.
pub fn count_panic(task: &'static str) {
    metrics::counter!(TASK_PANICS, "task" => task).increment(1);
    tracing::error!(task.name = task, "task panicked");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_end_stops_the_process_whether_by_return_or_by_panic() {
        let stopping = CancellationToken::new();
        let set = TaskSet::new(stopping.clone());
        set.spawn("endless", std::future::pending());
        assert_eq!(set.check(), Ok(()));
        set.spawn("returns", std::future::ready(()));
        stopping.cancelled().await;
        let _ = set.spawn("panics", async { panic!("on purpose") }).await;
        assert_eq!(set.check(), Err(TaskEnded("returns")));

        let stopping = CancellationToken::new();
        let set = TaskSet::new(stopping.clone());
        set.spawn("panics", async { panic!("on purpose") });
        stopping.cancelled().await;
        assert_eq!(set.check(), Err(TaskEnded("panics")));
    }

    #[tokio::test]
    async fn a_stopping_process_expects_ends() {
        let stopping = CancellationToken::new();
        let set = TaskSet::new(stopping.clone());
        stopping.cancel();
        let _ = set.spawn("returns", std::future::ready(())).await;
        assert_eq!(set.check(), Ok(()));
    }

    #[tokio::test]
    async fn an_isolated_panic_reaches_its_own_handle_only() {
        let bad = spawn_isolated("request", async { panic!("on purpose") });
        let good = spawn_isolated("request", async { 7 });
        assert!(bad.await.is_err_and(|error: tokio::task::JoinError| error.is_panic()));
        assert_eq!(good.await.ok(), Some(7));
        assert_eq!(isolate("mailbox", async { panic!("on purpose") }).await, None::<()>);
    }
}
