//! The worker's loops. Each is an idempotent tick: it reads rows, does a bounded amount of work and says
//! whether more is waiting. Any number of workers may run the same loops at once, and any of them may die
//! at any line.
//!
//! `services/worker` calls them, each on its period. Nothing here sleeps.

mod connections;
mod expiry;
mod outbox_relay;
mod rows;
mod uptime;

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use relay_store::StoreError;

use crate::{Engine, EngineError, EngineResult};

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
    /// Disconnects the providers of gateways whose lease is gone.
    DeadGateways,
    /// Makes partitions ahead of time and drops those past their retention.
    Partitions,
    /// Removes exceptions that the ack floor has made redundant.
    Compaction,
    /// Removes old keys, published batches and forgotten leases.
    Pruning,
}

impl Loop {
    /// All loops.
    pub const ALL: [Self; 7] = [
        Self::OutboxRelay,
        Self::Expiry,
        Self::Liveness,
        Self::DeadGateways,
        Self::Partitions,
        Self::Compaction,
        Self::Pruning,
    ];

    /// The name in logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OutboxRelay => "outbox_relay",
            Self::Expiry => "expiry",
            Self::Liveness => "liveness",
            Self::DeadGateways => "dead_gateways",
            Self::Partitions => "partitions",
            Self::Compaction => "compaction",
            Self::Pruning => "pruning",
        }
    }

    /// How long to pause when nothing more was waiting.
    #[must_use]
    pub const fn period(self) -> Duration {
        match self {
            Self::OutboxRelay => Duration::from_millis(500),
            Self::Expiry | Self::DeadGateways => Duration::from_secs(1),
            Self::Liveness => Duration::from_secs(5),
            Self::Compaction => Duration::from_secs(10),
            Self::Pruning => Duration::from_secs(60),
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
}

/// How long rows are kept. Lowering one frees disk at the next tick and cannot be undone.
#[derive(Debug, Clone, Copy)]
pub struct Retention {
    /// Days of deliveries and ack log, today not counted. At least 8: the longest TTL is 6 days, and every
    /// expired row must have become a dead letter before it goes.
    pub delivery_days: u32,
    /// Days of messages, today not counted. At least as many as of deliveries, which refer to them.
    pub message_days: u32,
}

impl Retention {
    /// The least that may be kept of anything, in days.
    pub const LEAST_DAYS: u32 = 8;
}

impl Default for Retention {
    fn default() -> Self {
        Self { delivery_days: Self::LEAST_DAYS, message_days: 90 }
    }
}

/// The loops of one worker process.
pub struct Loops {
    engine: Engine,
    retention: Retention,
    uptime: Mutex<Uptime>,
}

impl Loops {
    /// The loops over an engine. Retention below its least is raised to it.
    #[must_use]
    pub fn new(engine: Engine, retention: Retention) -> Self {
        let delivery_days = retention.delivery_days.max(Retention::LEAST_DAYS);
        let message_days = retention.message_days.max(delivery_days);
        let uptime = Mutex::new(Uptime::default());
        Self { engine, retention: Retention { delivery_days, message_days }, uptime }
    }

    /// Runs one tick of one loop.
    ///
    /// # Errors
    /// When Postgres or NATS is away or a transaction lost a race. Nothing is half done: tick again.
    #[tracing::instrument(name = "worker.loop.tick", level = "debug", skip_all, fields(loop.name = which.name()))]
    pub async fn tick(&self, which: Loop) -> EngineResult<Ticked> {
        let work = async {
            match which {
                Loop::OutboxRelay => outbox_relay::tick(&self.engine).await,
                Loop::Expiry => expiry::tick(&self.engine).await,
                Loop::Liveness => connections::silent_providers(&self.engine, self.storage_up_for()).await,
                Loop::DeadGateways => connections::dead_gateways(&self.engine, self.storage_up_for()).await,
                Loop::Partitions => rows::partitions(&self.engine, self.retention).await,
                Loop::Compaction => rows::compaction(&self.engine).await,
                Loop::Pruning => rows::pruning(&self.engine).await,
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
