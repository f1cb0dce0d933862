//! Recovery of a restored Postgres or a lost JetStream, before any client is served (ADR 0017).
//!
//! Every process checks when it starts and whenever Postgres was unavailable; one of them, under a lock in Postgres,
//! does the repair. `run` is the task of an engine, `RecoveryState` the state for other modules, and `DatabaseRepair` the
//! work, which `relayctl restore` starts by hand.

mod broker_positions;
mod frames;
mod rebuild;
mod repair;

use std::{
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use chrono::{DateTime, Utc};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use relay_store::Store;
pub use repair::{DatabaseRepair, Margin, Progress, RepairPlan, RepairReport};

use crate::{Engine, EngineError, EngineResult, Inner, core::Core, error::Fault};

/// Interval at which the database's identity is checked.
const CHECK_EVERY: Duration = Duration::from_secs(3);
/// Pause after a failed check, or while another process repairs.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// Time that a start waits for NATS before it trusts a database that claims to be the known one, without comparing the
/// log.
const NATS_TIMEOUT: Duration = Duration::from_secs(2);
/// Default amount by which numbers are raised when the log cannot prove which ones were used.
pub const DEFAULT_MARGIN: i64 = 10_000;

/// Readiness of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// Not ready, with the reason.
    Closed(&'static str),
    /// Ready. The number counts how often it was closed before.
    Open(u64),
}

/// State of recovery in this process.
pub(crate) struct RecoveryState {
    readiness: watch::Sender<Readiness>,
    margin: i64,
    /// Without a statement limit: a repair may read and write all mailboxes of the installation.
    store: Store,
    /// Time of the last recovery, as of the last check.
    recovered_at: Mutex<Option<DateTime<Utc>>>,
    /// Signals that the delivery log was recreated empty.
    log_recreated: Notify,
}

impl RecoveryState {
    pub(crate) fn new(margin: i64, store: &Store) -> Self {
        let (readiness, _) = watch::channel(Readiness::Closed("the database has not been checked yet"));
        Self {
            readiness,
            margin,
            store: store.without_statement_limit(),
            recovered_at: Mutex::new(None),
            log_recreated: Notify::new(),
        }
    }

    /// Signals that the log was recreated.
    pub(crate) fn log_recreated(&self) {
        self.log_recreated.notify_one();
    }
}

/// Handle of the recovery of this installation's database.
#[derive(Clone)]
pub struct Recovery {
    pub(crate) core: Core,
    pub(crate) state: Arc<RecoveryState>,
}

impl Recovery {
    /// Returns the readiness: open while the database is the known one or has been repaired.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        *self.state.readiness.borrow()
    }

    #[must_use]
    pub fn watch_readiness(&self) -> watch::Receiver<Readiness> {
        self.state.readiness.subscribe()
    }

    /// Waits until the engine is ready.
    pub async fn wait_until_ready(&self) {
        let mut readiness = self.watch_readiness();
        // Fails only when the engine was dropped.
        let _ = readiness.wait_for(|readiness| matches!(readiness, Readiness::Open(_))).await;
    }
}

/// Watches over the database and the log until the engine is dropped.
pub(crate) async fn run(engine: Weak<Inner>) {
    let mut rounds = 0;
    loop {
        // Closed until a check succeeds, or a repair.
        let began = Instant::now();
        let mut logged_reason = None;
        let compared = loop {
            let Some(inner) = engine.upgrade() else { return };
            let reason = match check_database(&Engine { inner: inner.clone() }, began.elapsed() >= NATS_TIMEOUT).await {
                Ok(CheckOutcome::Open { compared }) => break compared,
                Ok(CheckOutcome::Closed(reason)) => reason,
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "the database could not be checked");
                    closed_reason(&error)
                }
            };
            if logged_reason != Some(reason) && began.elapsed() >= RETRY_AFTER {
                tracing::warn!(reason, "not serving yet");
                logged_reason = Some(reason);
            }
            inner.recovery.state.readiness.send_replace(Readiness::Closed(reason));
            drop(inner);
            tokio::time::sleep(RETRY_AFTER).await;
        };
        let Some(inner) = engine.upgrade() else { return };
        remember_recovery(&Engine { inner: inner.clone() }).await;
        inner.recovery.state.readiness.send_replace(Readiness::Open(rounds));
        drop(inner);
        if monitor_database(&engine, compared).await.is_none() {
            return;
        }
        rounds += 1;
        let Some(inner) = engine.upgrade() else { return };
        inner.recovery.state.readiness.send_replace(Readiness::Closed("the database is not the one before"));
    }
}

/// Reads the time of the last recovery. On failure the old value stays: brokers are then not probed for higher numbers.
async fn remember_recovery(engine: &Engine) {
    match engine.store().database_state().await {
        Ok(state) => {
            let mut known = engine.inner.recovery.state.recovered_at.lock().unwrap_or_else(PoisonError::into_inner);
            *known = state.recovered_at;
        }
        Err(error) => tracing::debug!(error = &error as &dyn std::error::Error, "failed to read the last recovery"),
    }
}

/// Returns when the database has changed; `None` when the engine was dropped.
async fn monitor_database(engine: &Weak<Inner>, mut compared: bool) -> Option<()> {
    let mut rebuild = false;
    loop {
        {
            let engine = Engine { inner: engine.upgrade()? };
            tokio::select! {
                () = tokio::time::sleep(CHECK_EVERY) => {}
                () = engine.inner.recovery.state.log_recreated.notified() => rebuild = true,
            }
        }
        let engine = Engine { inner: engine.upgrade()? };
        if !compared {
            // `seen_at` must not move before the log has been compared, since a repair starts from it.
            match recheck_database(&engine).await {
                Ok(Some(true)) => return Some(()),
                Ok(Some(false)) => compared = true,
                Ok(None) => continue,
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "failed to compare the log, will retry");
                    continue;
                }
            }
        }
        match engine.store().confirm_database().await {
            Ok(true) => {}
            Ok(false) => return Some(()),
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "failed to check the database, will retry");
                // It may return as another database, or in an older state.
                compared = false;
                continue;
            }
        }
        if rebuild && engine.inner.stream.is_up() {
            match rebuild::run(&engine).await {
                Ok(done) => rebuild = !done,
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "failed to rebuild the log, will retry")
                }
            }
        }
    }
}

/// Returns true if the database is another one, or older than the log; `None` while NATS is unavailable.
async fn recheck_database(engine: &Engine) -> EngineResult<Option<bool>> {
    let database = engine.store().database_state().await?;
    if database.is_replaced() {
        return Ok(Some(true));
    }
    if !engine.inner.stream.is_up() {
        return Ok(None);
    }
    DatabaseRepair::with_engine(engine).log_is_ahead(&database).await.map(Some)
}

enum CheckOutcome {
    Open { compared: bool },
    Closed(&'static str),
}

/// Checks the database once, and repairs it if necessary.
async fn check_database(engine: &Engine, waited: bool) -> EngineResult<CheckOutcome> {
    crate::workspaces::suspensions::refresh(&engine.inner).await?;
    let repair = DatabaseRepair::with_engine(engine);
    let database = engine.store().database_state().await?;
    let ahead = repair.log_is_ahead(&database).await;
    if !database.is_replaced() {
        match ahead {
            Ok(false) => {
                if database.adopted_identity.is_none() {
                    engine.store().adopt_database(None).await?;
                }
                return Ok(CheckOutcome::Open { compared: true });
            }
            Ok(true) => {}
            // NATS may be unavailable: the database claims to be the known one, which is nearly always true.
            Err(_) if waited => {
                if database.adopted_identity.is_none() {
                    engine.store().adopt_database(None).await?;
                }
                return Ok(CheckOutcome::Open { compared: false });
            }
            Err(_) => return Ok(CheckOutcome::Closed("nats has not answered yet")),
        }
    } else if ahead.is_err() {
        return Ok(CheckOutcome::Closed("the database was restored, and nats is needed to recover deliveries"));
    }
    let Some(lock) = engine.store().try_recovery_lock().await? else {
        return Ok(CheckOutcome::Closed("another process is recovering the database"));
    };
    // Another process may have repaired it before we got the lock.
    let again = engine.store().database_state().await?;
    let outcome = if again.is_replaced() || repair.log_is_ahead(&again).await? {
        tracing::warn!(restored_to = %again.seen_at, "database was restored to an older state, recovering");
        engine
            .inner
            .recovery
            .state
            .readiness
            .send_replace(Readiness::Closed("the database was restored and is being recovered"));
        let margin = Margin { numbers: engine.inner.recovery.state.margin, always: false };
        repair.repair(&again, margin, |_| {}).await.map(|report| {
            tracing::warn!(?report, "recovered the restored database");
        })
    } else {
        Ok(())
    };
    lock.release().await;
    outcome.map(|()| CheckOutcome::Open { compared: true })
}

const fn closed_reason(error: &EngineError) -> &'static str {
    if matches!(error, EngineError::Unavailable(_)) {
        "storage is unavailable"
    } else if matches!(error, EngineError::Internal(Fault::Stream(_))) {
        "nats is unavailable"
    } else {
        "the database could not be checked"
    }
}
