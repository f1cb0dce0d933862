//! The worker's loops. Each is an idempotent tick: it reads rows, does a bounded amount of work and says
//! whether more is waiting. Any number of workers may run the same loops at once, and any of them may die
//! at any line.
//!
//! `services/worker` calls them, each on its period. Nothing here sleeps.

mod connections;
mod erasing;
mod expiry;
mod files;
mod invocations;
mod outbox_relay;
mod push;
mod reading;
mod redrives;
mod rows;
mod sealing;
mod sessions;
mod subscriptions;
mod triggers;
mod uptime;
mod usage;

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use relay_store::StoreError;

use crate::{Engine, EngineError, EngineResult, recovery::Standing};

use uptime::Uptime;

/// A tick does a bounded amount of work. One that takes longer waits for an answer that will not come.
const TICK_AT_MOST: Duration = Duration::from_secs(60);

/// The loops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Loop {
    /// Publishes commit batches that their gateway did not.
    OutboxRelay,
    /// Dead-letters deliveries whose time is up.
    Expiry,
    /// Disconnects providers that went silent.
    Liveness,
    /// Marks agents offline that have not been heard of for long.
    Presence,
    /// Removes the bytes of files that nobody needs any more.
    Files,
    /// Moves invocations on whose node was lost or silent.
    Invocations,
    /// Disconnects the providers of gateways whose lease is gone.
    DeadGateways,
    /// Makes partitions ahead of time and drops those past their retention.
    Partitions,
    /// Removes exceptions that the ack floor has made redundant.
    Compaction,
    /// Removes old keys, published batches, forgotten leases and what is too much of event logs, and seals with the
    /// current key what former ones have sealed.
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
    /// Finds mailboxes to be pushed that nobody serves.
    PushSweep,
    /// Invokes actions for messages that match triggers.
    Triggers,
    /// Empties the mailboxes of sessions that are gone, and deletes who was released for good.
    Sessions,
    /// Adds up what workspaces use, by the minute.
    Usage,
    /// Removes every row of workspaces that were deleted or expired 30 days ago.
    Erasing,
}

impl Loop {
    /// All loops.
    pub const ALL: [Self; 20] = [
        Self::OutboxRelay,
        Self::Expiry,
        Self::Liveness,
        Self::Presence,
        Self::Files,
        Self::Invocations,
        Self::DeadGateways,
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
    ];

    /// The name in logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OutboxRelay => "outbox_relay",
            Self::Expiry => "expiry",
            Self::Liveness => "liveness",
            Self::Presence => "presence",
            Self::Files => "files",
            Self::Invocations => "invocations",
            Self::DeadGateways => "dead_gateways",
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
        }
    }

    /// How long to pause when nothing more was waiting.
    #[must_use]
    pub const fn period(self) -> Duration {
        match self {
            Self::OutboxRelay | Self::Invocations => Duration::from_millis(500),
            Self::Expiry | Self::DeadGateways | Self::PushSweep | Self::Sessions => Duration::from_secs(1),
            Self::Liveness | Self::Usage => Duration::from_secs(5),
            Self::Compaction | Self::Files | Self::Erasing => Duration::from_secs(10),
            Self::Presence => Duration::from_secs(15),
            Self::Pruning | Self::ReadReceipts => Duration::from_secs(60),
            Self::SearchIndex | Self::Subscriptions | Self::Redrives | Self::Triggers => Duration::from_millis(250),
            Self::ReadPointers => Duration::from_secs(2),
            Self::Partitions => Duration::from_secs(3600),
        }
    }
}

/// What a tick did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ticked {
    /// How many things it dealt with.
    pub worked: u64,
    /// Whether more is waiting right now.
    pub more: bool,
    /// How long the oldest thing that it deals with has been waiting, where that can be told; else what counts is
    /// how late the tick is.
    pub lag: Option<Duration>,
}

/// How long rows are kept. Lowering one frees disk at the next tick and cannot be undone.
#[derive(Debug, Clone, Copy)]
pub struct Retention {
    /// Days of deliveries and ack log, today not counted. At least 8: the longest TTL is 6 days, and every
    /// expired row must have become a dead letter before it goes.
    pub delivery_days: u32,
    /// Days of messages, today not counted. At least as many as of deliveries, which refer to them.
    pub message_days: u32,
    /// Days of the event log, today not counted.
    pub event_days: u32,
    /// Events that each workspace's log keeps at most.
    pub workspace_events: u32,
}

impl Retention {
    /// The least that may be kept of anything, in days.
    pub const LEAST_DAYS: u32 = 8;
}

impl Default for Retention {
    fn default() -> Self {
        Self { delivery_days: Self::LEAST_DAYS, message_days: 90, event_days: 7, workspace_events: 1_000_000 }
    }
}

/// The loops of one worker process.
pub struct Loops {
    engine: Engine,
    retention: Retention,
    uptime: Mutex<Uptime>,
    subscriptions: subscriptions::Subscriptions,
}

impl Loops {
    /// The loops over an engine. Retention below its least is raised to it.
    #[must_use]
    pub fn new(engine: Engine, retention: Retention) -> Self {
        let delivery_days = retention.delivery_days.max(Retention::LEAST_DAYS);
        let message_days = retention.message_days.max(delivery_days);
        let uptime = Mutex::new(Uptime::default());
        let subscriptions = subscriptions::Subscriptions::new();
        Self { engine, retention: Retention { delivery_days, message_days, ..retention }, uptime, subscriptions }
    }

    /// Ends what ticks have begun and left to itself. To be called once, after the last tick.
    pub async fn drain(&self) {
        self.subscriptions.drain().await;
    }

    /// Runs one tick of one loop.
    ///
    /// # Errors
    /// When Postgres or NATS is away or a transaction lost a race. Nothing is half done: tick again.
    #[tracing::instrument(name = "worker.loop.tick", level = "debug", skip_all, fields(loop.name = which.name()))]
    pub async fn tick(&self, which: Loop) -> EngineResult<Ticked> {
        // What a loop does may rest on what a restored database has forgotten.
        if matches!(self.engine.standing(), Standing::Closed(_)) {
            return Ok(Ticked::default());
        }
        let work = async {
            match which {
                Loop::OutboxRelay => outbox_relay::tick(&self.engine).await,
                Loop::Expiry => expiry::tick(&self.engine).await,
                Loop::Liveness => connections::silent_providers(&self.engine, self.storage_up_for()).await,
                Loop::Presence => connections::silent_agents(&self.engine, self.storage_up_for()).await,
                Loop::Files => files::tick(&self.engine).await,
                Loop::Invocations => invocations::tick(&self.engine).await,
                Loop::DeadGateways => connections::dead_gateways(&self.engine, self.storage_up_for()).await,
                Loop::Partitions => rows::partitions(&self.engine, self.retention).await,
                Loop::Compaction => rows::compaction(&self.engine).await,
                Loop::Pruning => rows::pruning(&self.engine, self.retention).await,
                Loop::SearchIndex => reading::search_index(&self.engine).await,
                Loop::ReadPointers => reading::pointers(&self.engine).await,
                Loop::ReadReceipts => reading::receipts(&self.engine, self.retention).await,
                Loop::Redrives => redrives::tick(&self.engine).await,
                Loop::Subscriptions => self.subscriptions.tick(&self.engine).await,
                Loop::PushSweep => push::sweep(&self.engine).await,
                Loop::Triggers => triggers::tick(&self.engine).await,
                Loop::Sessions => sessions::tick(&self.engine).await,
                Loop::Usage => usage::tick(&self.engine).await,
                Loop::Erasing => erasing::tick(&self.engine).await,
            }
        };
        // A connection that died without a word must not end the loop.
        let done = tokio::time::timeout(TICK_AT_MOST, work).await;
        let done = done.unwrap_or_else(|_| Err(StoreError::still_away("ticking").into()));
        let mut uptime = self.uptime.lock().unwrap_or_else(PoisonError::into_inner);
        match &done {
            Err(EngineError::Unavailable(_)) => uptime.saw_down(),
            Ok(_) => uptime.saw_up(Instant::now()),
            Err(_) => {}
        }
        done
    }

    /// Whether Postgres answered this worker within the last seconds.
    #[must_use]
    pub fn storage_is_up(&self) -> bool {
        self.uptime.lock().unwrap_or_else(PoisonError::into_inner).is_up(Instant::now())
    }

    /// How long this worker has seen Postgres up without a break.
    fn storage_up_for(&self) -> Duration {
        self.uptime.lock().unwrap_or_else(PoisonError::into_inner).up_for(Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::Loop;

    const RUNBOOK: &str = include_str!("../../../../docs/operations/runbooks/loop-stalled.md");
    const CONFIGURATION: &str = include_str!("../../../../docs/configuration.md");

    #[test]
    fn operators_can_read_about_every_loop() {
        let listed = CONFIGURATION.split("\nLoops: ").nth(1).and_then(|rest| rest.split(". ").next()).unwrap();
        for name in Loop::ALL.map(|which| format!("`{}`", which.name())) {
            let rows = RUNBOOK.lines().filter(|line| line.starts_with("| `"));
            let in_runbook =
                rows.filter(|row| row.split(" | ").next().is_some_and(|cell| cell.contains(&name))).count();
            assert_eq!(in_runbook, 1, "rows of loop-stalled.md for {name}");
            assert!(listed.contains(&name), "configuration.md does not list {name}");
        }
    }
}
