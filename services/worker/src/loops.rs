//! Loops of the worker: which use case of the engine runs when.
//!
//! Each tick is idempotent: it reads rows, does a bounded amount of work and returns true if more is due. Any number of
//! workers may run the same loops at once, and any of them may crash at any line. `runner` calls each loop on its
//! period.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use relay_dispatch::{QueueError, destinations::Destinations, subscriptions::SubscriptionDispatcher};
use relay_engine::{
    Engine, EngineError, actions, agents,
    due_work::{WorkKind, WorkWatch},
    mailboxes::{self, expiry::expire_due_deliveries},
    maintenance::{self, AnalyzedTables, Retention},
    messages::{outbox_relay::relay_unpublished_batches, read_models},
    nodes::silence,
    push::sweep::sweep_mailboxes,
    tick::TickOutcome,
    workspaces,
};
use tokio::time::Instant;

use crate::{dispatch::EngineSubscriptionQueue, uptime::Uptime};

/// A tick does a bounded amount of work; a longer one waits for a response that will not come.
pub(crate) const TICK_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Loop {
    /// Publishes commit batches that their gateway did not.
    OutboxRelay,
    /// Dead-letters deliveries whose TTL has passed.
    Expiry,
    /// Disconnects providers that went silent.
    Liveness,
    /// Marks silent agents offline.
    Presence,
    /// Removes the objects of files that are no longer needed.
    Files,
    /// Moves invocations of lost or silent nodes on.
    Invocations,
    /// Disconnects the providers of gateways whose lease expired.
    ExpiredGateways,
    /// Makes partitions ahead of time and drops those past their retention.
    Partitions,
    /// Removes settlements that the ack floor has made redundant.
    Compaction,
    /// Removes old keys, published batches, expired leases and surplus events, and re-encrypts secrets of former keys.
    Pruning,
    /// Puts messages into the search index.
    SearchIndex,
    /// Moves last-read pointers up behind the ack floors.
    ReadPointers,
    /// Writes receipts for deliveries that retention is about to drop.
    ReadReceipts,
    /// Sends events to the addresses of subscriptions.
    Subscriptions,
    /// Sends dead letters again, as operators ask.
    Redrives,
    /// Finds due http_push mailboxes that no worker serves.
    PushSweep,
    /// Invokes actions for messages that match triggers.
    Triggers,
    /// Empties the mailboxes of ended sessions, and deletes agents that were released permanently.
    Sessions,
    /// Aggregates usage by the minute.
    Usage,
    /// Removes every row of workspaces that were deleted or expired 30 days ago.
    Erasing,
    /// Analyzes tables that have grown.
    Statistics,
}

impl Loop {
    pub(crate) const ALL: [Self; 21] = [
        Self::OutboxRelay,
        Self::Expiry,
        Self::Liveness,
        Self::Presence,
        Self::Files,
        Self::Invocations,
        Self::ExpiredGateways,
        Self::Partitions,
        Self::Compaction,
        Self::Pruning,
        Self::SearchIndex,
        Self::ReadPointers,
        Self::ReadReceipts,
        Self::Subscriptions,
        Self::Redrives,
        Self::PushSweep,
        Self::Triggers,
        Self::Sessions,
        Self::Usage,
        Self::Erasing,
        Self::Statistics,
    ];

    /// Name in logs and metrics.
    #[must_use]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::OutboxRelay => "outbox_relay",
            Self::Expiry => "expiry",
            Self::Liveness => "liveness",
            Self::Presence => "presence",
            Self::Files => "files",
            Self::Invocations => "invocations",
            Self::ExpiredGateways => "dead_gateways",
            Self::Partitions => "partitions",
            Self::Compaction => "compaction",
            Self::Pruning => "pruning",
            Self::SearchIndex => "search_index",
            Self::ReadPointers => "read_pointers",
            Self::ReadReceipts => "read_receipts",
            Self::Subscriptions => "subscriptions",
            Self::Redrives => "redrives",
            Self::PushSweep => "push_sweep",
            Self::Triggers => "triggers",
            Self::Sessions => "sessions",
            Self::Usage => "usage",
            Self::Erasing => "erasing",
            Self::Statistics => "statistics",
        }
    }

    /// Pause after a tick that left nothing due.
    #[must_use]
    pub(crate) const fn period(self) -> Duration {
        match self {
            Self::OutboxRelay | Self::Invocations => Duration::from_millis(500),
            // Searches read messages that are not in the index yet from their table.
            Self::SearchIndex => Duration::from_secs(1),
            Self::Expiry | Self::ExpiredGateways | Self::PushSweep | Self::Sessions => Duration::from_secs(1),
            Self::Liveness | Self::Usage => Duration::from_secs(5),
            Self::Compaction | Self::Files | Self::Erasing => Duration::from_secs(10),
            Self::Presence => Duration::from_secs(15),
            Self::Pruning | Self::ReadReceipts => Duration::from_secs(60),
            Self::Subscriptions | Self::Redrives | Self::Triggers => Duration::from_millis(250),
            // A new table has thousands of rows a few seconds after its first one, and reading the sizes takes 0.6 ms.
            Self::ReadPointers | Self::Statistics => Duration::from_secs(2),
            Self::Partitions => Duration::from_secs(3600),
        }
    }

    /// Pause after a tick that found nothing, if the loop waits for no work.
    #[must_use]
    pub(crate) const fn idle_period(self) -> Duration {
        // A search reads 5000 texts itself: what 1000 messages a second are until then.
        if matches!(self, Self::SearchIndex) { Duration::from_secs(5) } else { self.period() }
    }

    /// Work that the loop waits for after a tick that found nothing.
    #[must_use]
    pub(crate) const fn awaited_work(self) -> Option<WorkKind> {
        match self {
            Self::OutboxRelay => Some(WorkKind::UnpublishedBatches),
            Self::Invocations => Some(WorkKind::OpenInvocations),
            Self::ExpiredGateways => Some(WorkKind::OrphanedProviders),
            Self::ReadPointers => Some(WorkKind::UnfoldedAcks),
            Self::Subscriptions => Some(WorkKind::OpenSubscriptions),
            Self::Redrives => Some(WorkKind::DueRedrives),
            Self::PushSweep => Some(WorkKind::SweptPushMailboxes),
            Self::Triggers => Some(WorkKind::UnscannedTriggers),
            Self::Sessions => Some(WorkKind::EndedSessions),
            Self::Expiry
            | Self::Liveness
            | Self::Presence
            | Self::Files
            | Self::Partitions
            | Self::Compaction
            | Self::Pruning
            | Self::SearchIndex
            | Self::ReadReceipts
            | Self::Usage
            | Self::Erasing
            | Self::Statistics => None,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum TickError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Queue(#[from] QueueError),
}

impl TickError {
    const fn is_unavailable(&self) -> bool {
        match self {
            Self::Engine(error) => matches!(error, EngineError::Unavailable(_)),
            Self::Queue(error) => matches!(error, QueueError::Unavailable(_)),
        }
    }
}

pub(crate) struct Loops {
    engine: Engine,
    retention: Retention,
    uptime: Mutex<Uptime>,
    analyzed: tokio::sync::Mutex<AnalyzedTables>,
    subscriptions: SubscriptionDispatcher<EngineSubscriptionQueue>,
}

impl Loops {
    /// Creates the loops. Retention below the minimum is raised to it.
    #[must_use]
    pub(crate) fn new(engine: Engine, retention: Retention, destinations: Arc<Destinations>) -> Self {
        let delivery_days = retention.delivery_days.max(Retention::LEAST_DAYS);
        // Deliveries refer to messages, so a message must not be dropped before its last delivery.
        let message_days = retention.message_days.max(delivery_days);
        let uptime = Mutex::new(Uptime::default());
        let queue = Arc::new(EngineSubscriptionQueue(engine.clone()));
        let subscriptions = SubscriptionDispatcher::new(queue, destinations);
        let retention = Retention { delivery_days, message_days, ..retention };
        Self { engine, retention, uptime, analyzed: tokio::sync::Mutex::default(), subscriptions }
    }

    /// Records each answer of storage to a read of due work, since loops that wait for work do not reach it themselves.
    pub(crate) async fn record_reads(&self) {
        let mut reads = self.engine.due_work().watch_reads();
        while reads.changed().await.is_ok() {
            self.record_up();
        }
    }

    fn record_up(&self) {
        let readiness = self.engine.recovery().readiness();
        self.uptime.lock().unwrap_or_else(PoisonError::into_inner).record_up(readiness, Instant::now());
    }

    /// Returns what wakes a loop that has found nothing.
    pub(crate) fn watch_work(&self, which: Loop) -> Option<WorkWatch> {
        which.awaited_work().map(|kind| self.engine.due_work().watch(kind, which.period()))
    }

    /// Ends the tasks that ticks have started. Call once, after the last tick.
    pub(crate) async fn drain(&self) {
        self.subscriptions.drain().await;
    }

    /// Waits while recovery keeps storage closed: the rows of a restored database may be outdated until the repair.
    pub(crate) async fn wait_until_ready(&self) {
        self.engine.recovery().wait_until_ready().await;
    }

    /// Runs one tick of one loop.
    ///
    /// # Errors
    /// When Postgres or NATS is unavailable or a transaction lost a race. Nothing is half done: tick again.
    #[tracing::instrument(name = "worker.loop.tick", level = "debug", skip_all, fields(loop.name = which.name()))]
    pub(crate) async fn tick(&self, which: Loop) -> Result<TickOutcome, TickError> {
        let work = async {
            let done = match which {
                Loop::OutboxRelay => relay_unpublished_batches(&self.engine).await,
                Loop::Expiry => expire_due_deliveries(&self.engine).await,
                Loop::Liveness => silence::disconnect_silent(&self.engine, self.storage_up_for()).await,
                Loop::Presence => silence::mark_silent_offline(&self.engine, self.storage_up_for()).await,
                Loop::Files => self.engine.files().remove_unneeded_objects().await,
                Loop::Invocations => actions::redispatch::redispatch_lost_invocations(&self.engine).await,
                Loop::ExpiredGateways => {
                    silence::disconnect_expired_gateways(&self.engine, self.storage_up_for()).await
                }
                Loop::Partitions => maintenance::maintain_partitions(&self.engine, self.retention).await,
                Loop::Compaction => maintenance::compact_settlements(&self.engine).await,
                Loop::Pruning => maintenance::prune_rows(&self.engine, self.retention).await,
                Loop::SearchIndex => read_models::index_messages(&self.engine).await,
                Loop::ReadPointers => read_models::move_read_pointers(&self.engine).await,
                Loop::ReadReceipts => read_models::write_receipts(&self.engine, self.retention).await,
                Loop::Redrives => mailboxes::redrives::step_redrives(&self.engine).await,
                // Returns early because it fails with errors of the queue, not of the engine.
                Loop::Subscriptions => return Ok(self.call_subscriptions().await?),
                Loop::PushSweep => sweep_mailboxes(&self.engine).await,
                Loop::Triggers => actions::trigger_scans::scan_triggers(&self.engine).await,
                Loop::Sessions => agents::ended_sessions::settle_ended_sessions(&self.engine).await,
                Loop::Usage => workspaces::usage_rollup::roll_up_usage(&self.engine).await,
                Loop::Erasing => workspaces::erasure::erase_due_workspaces(&self.engine).await,
                Loop::Statistics => {
                    // Only this loop takes the lock, so it may hold it over the statements.
                    maintenance::analyze_grown_tables(&self.engine, &mut *self.analyzed.lock().await).await
                }
            };
            Ok(done?)
        };
        // A connection that broke without notice must not end the loop.
        let done = tokio::time::timeout(TICK_TIMEOUT, work).await;
        let done = done.unwrap_or_else(|_| Err(TickError::Engine(EngineError::storage_timeout("ticking"))));
        match &done {
            Err(error) if error.is_unavailable() => {
                self.uptime.lock().unwrap_or_else(PoisonError::into_inner).record_down();
            }
            Ok(_) => self.record_up(),
            // A lost race or a corrupt row says nothing about whether Postgres can be reached.
            Err(_) => {}
        }
        done
    }

    async fn call_subscriptions(&self) -> Result<TickOutcome, QueueError> {
        let round = self.subscriptions.serve_due().await?;
        // `more` stays false: free permits, not ticks, limit the claims.
        Ok(TickOutcome { worked: round.claimed, lag: Some(round.lag), ..TickOutcome::default() })
    }

    /// True if Postgres answered this worker within the last seconds.
    #[must_use]
    pub(crate) fn storage_is_up(&self) -> bool {
        self.uptime.lock().unwrap_or_else(PoisonError::into_inner).is_up(Instant::now())
    }

    /// Time for which this worker has reached Postgres without a gap.
    fn storage_up_for(&self) -> Duration {
        self.uptime.lock().unwrap_or_else(PoisonError::into_inner).up_for(Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::Loop;

    const RUNBOOK: &str = include_str!("../../../docs/operations/runbooks/loop-stalled.md");
    const METRICS: &str = include_str!("../../../docs/metrics.md");

    #[test]
    fn every_loop_is_documented() {
        let listed = METRICS.split("\nLoops: ").nth(1).and_then(|rest| rest.split(". ").next()).unwrap();
        for name in Loop::ALL.map(|which| format!("`{}`", which.name())) {
            let rows = RUNBOOK.lines().filter(|line| line.starts_with("| `"));
            let in_runbook =
                rows.filter(|row| row.split(" | ").next().is_some_and(|cell| cell.contains(&name))).count();
            assert_eq!(in_runbook, 1, "rows of loop-stalled.md for {name}");
            assert!(listed.contains(&name), "metrics.md does not list {name}");
        }
    }
}
