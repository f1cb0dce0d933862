//! Recovery of a restored Postgres or a lost JetStream, before any client is served (ADR 0017).
//!
//! Every process checks when it starts and whenever Postgres was unavailable; one of them, under a lock in Postgres,
//! does the repair. `run` is the task of an engine, `RecoveryState` the state for other modules, and `DatabaseRepair`
//! the work, which `relayctl restore` starts by hand.

mod broker_positions;
mod frames;
mod last_sent;
mod rebuild;
mod repair;

use std::{
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use chrono::{DateTime, Utc};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use last_sent::LastSent;
use relay_domain::recovery::LogMarks;
use relay_store::{Store, recovery::DatabaseState};
pub use repair::{DatabaseRepair, Margin, Progress, RepairPlan, RepairReport};

use crate::{Engine, EngineError, EngineResult, Inner, core::Core, error::Fault};

/// Interval at which the database's identity is checked.
const CHECK_EVERY: Duration = Duration::from_secs(3);
/// Pause after a failed check, or while another process repairs.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// Time that a start waits for NATS before it trusts a database that claims to be the known one, without comparing the
/// log.
const NATS_TIMEOUT: Duration = Duration::from_secs(2);
/// Time that the processes of a failover wait for NATS before they continue without the deliveries that only the log
/// has.
const FAILOVER_NATS_TIMEOUT: Duration = Duration::from_secs(3);
/// Time in which other processes, if any run, confirm a database whose delivery log was lost.
const WITNESS_TIMEOUT: Duration = Duration::from_secs(8);
/// Time that a confirmation waits for the ends of the logs.
const MARKS_TIMEOUT: Duration = Duration::from_secs(1);
/// Default amount by which numbers are raised when the log cannot prove which ones were used.
pub const DEFAULT_MARGIN: i64 = 10_000;

/// Readiness of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// Not ready, with the reason.
    Closed(&'static str),
    /// Ready. The number counts the changes of the database since the first opening: to another one, or a recovery.
    Open(u64),
}

/// State of recovery in this process.
pub(crate) struct RecoveryState {
    readiness: watch::Sender<Readiness>,
    margin: i64,
    /// Connects to any database, not the known one only, and has no statement limit: a repair may read and write all
    /// mailboxes of the installation.
    store: Store,
    /// Time of the last recovery, as of the last check.
    recovered_at: Mutex<Option<DateTime<Utc>>>,
    /// Signals that the delivery log was recreated empty.
    log_recreated: Notify,
    /// The recreated log has not been filled yet.
    must_rebuild: AtomicBool,
    /// Deliveries that this process sent before the last recovery have not been compared yet.
    must_raise_heads: AtomicBool,
    last_sent: LastSent,
}

impl RecoveryState {
    pub(crate) fn new(margin: i64, store: &Store) -> Self {
        let (readiness, _) = watch::channel(Readiness::Closed("the database has not been checked yet"));
        Self {
            readiness,
            margin,
            store: store.for_recovery(),
            recovered_at: Mutex::new(None),
            log_recreated: Notify::new(),
            must_rebuild: AtomicBool::new(false),
            must_raise_heads: AtomicBool::new(false),
            last_sent: LastSent::default(),
        }
    }

    /// Signals that the log was recreated.
    pub(crate) fn log_recreated(&self) {
        // The flag as well as the signal: it stays until a rebuild succeeds.
        self.must_rebuild.store(true, Ordering::Relaxed);
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

    /// Returns the recovery epoch that a new connection belongs to.
    #[must_use]
    pub fn epoch(&self) -> Option<i64> {
        self.core.store.known_epoch()
    }

    /// Returns whether a connection that was opened under `epoch` may send: no other epoch was met since.
    #[must_use]
    pub fn serves(&self, epoch: Option<i64>) -> bool {
        self.core.store.served_epoch() == epoch
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
        let Some(compared) = wait_for_database(&engine, &mut rounds).await else { return };
        let Some(inner) = engine.upgrade() else { return };
        inner.recovery.state.readiness.send_replace(Readiness::Open(rounds));
        let store = inner.core.store.clone();
        // Not held while monitoring, so that the engine can be dropped.
        drop(inner);
        let ended = tokio::select! {
            ended = monitor_database(&engine, compared) => ended,
            () = store.met_other_epoch() => Some(()),
        };
        let (Some(()), Some(inner)) = (ended, engine.upgrade()) else { return };
        // Before the readiness: requests that are in progress must assign no number in the changed database.
        store.close_epoch();
        inner.recovery.state.readiness.send_replace(Readiness::Closed("the database is not the one before"));
    }
}

/// Closes readiness until a check succeeds, or a repair. Counts a round if the database has changed. Returns true if
/// the log was compared; `None` when the engine was dropped.
async fn wait_for_database(engine: &Weak<Inner>, rounds: &mut u64) -> Option<bool> {
    let began = Instant::now();
    let mut logged_reason = None;
    loop {
        let inner = engine.upgrade()?;
        let reason = match try_open(&Engine { inner: inner.clone() }, began, rounds).await {
            Ok(CheckOutcome::Open { compared, .. }) => return Some(compared),
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
    }
}

/// Checks the database and begins to serve it if it is current.
async fn try_open(engine: &Engine, began: Instant, rounds: &mut u64) -> EngineResult<CheckOutcome> {
    let outcome = check_database(engine, began).await?;
    if let CheckOutcome::Open { database, .. } = &outcome {
        // Before this process serves: the database may lack the lease of this process, or count it as expired, so that
        // a process that has started since has the same number.
        let Core { worker_number, ids, .. } = &engine.inner.core;
        worker_number.renew(&engine.inner.recovery.state.store, ids).await?;
        // Sockets hold positions of the database before, or from before its recovery.
        if open_database(engine, database) {
            *rounds += 1;
            let state = &engine.inner.recovery.state;
            state.must_raise_heads.store(true, Ordering::SeqCst);
            // A token that the database has lost must not outlive it.
            engine.inner.access.tokens.forget_all();
        }
        last_sent::raise_heads(engine).await?;
        // Loaded before the first request: a suspended workspace stays out.
        crate::workspaces::suspensions::refresh(&engine.inner).await?;
    }
    Ok(outcome)
}

/// Begins to serve this database. Returns true if it is another one than before, or was recovered since.
fn open_database(engine: &Engine, database: &DatabaseState) -> bool {
    // Set before the epoch is opened: brokers that register then report their positions.
    *engine.inner.recovery.state.recovered_at.lock().unwrap_or_else(PoisonError::into_inner) = database.recovered_at;
    let known = database.to_known();
    let before = engine.store().known_database();
    engine.store().open_epoch(known.clone());
    before.is_some_and(|before| !before.continues_as(&known))
}

/// Returns when the database has changed; `None` when the engine was dropped.
async fn monitor_database(engine: &Weak<Inner>, mut compared: bool) -> Option<()> {
    loop {
        {
            let engine = Engine { inner: engine.upgrade()? };
            tokio::select! {
                () = tokio::time::sleep(CHECK_EVERY) => {}
                // Again, because it may have been recreated while it was being filled.
                () = engine.inner.recovery.state.log_recreated.notified() => {
                    engine.inner.recovery.state.must_rebuild.store(true, Ordering::Relaxed);
                }
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
        match engine.store().confirm_database(read_log_marks(&engine).await).await {
            Ok(true) => {}
            Ok(false) => return Some(()),
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "failed to check the database, will retry");
                // It may return as another database, or in an older state.
                compared = false;
                continue;
            }
        }
        let must_rebuild = &engine.inner.recovery.state.must_rebuild;
        if must_rebuild.load(Ordering::Relaxed) && engine.inner.stream.is_up() {
            match rebuild::run(&engine).await {
                Ok(done) => must_rebuild.store(!done, Ordering::Relaxed),
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "failed to rebuild the log, will retry")
                }
            }
        }
    }
}

/// Reads the ends of the logs for a confirmation, unless NATS is slow: they are read again at the next one.
async fn read_log_marks(engine: &Engine) -> Option<LogMarks> {
    if !engine.inner.stream.is_up() {
        return None;
    }
    let repair = DatabaseRepair::with_engine(engine);
    let marks = tokio::time::timeout(MARKS_TIMEOUT, repair.log_marks()).await.ok()?.ok()?;
    marks.deliveries.is_some().then_some(marks)
}

/// Returns true if the database is another one, or older than the log; `None` while NATS is unavailable.
async fn recheck_database(engine: &Engine) -> EngineResult<Option<bool>> {
    let database = engine.store().database_state().await?;
    if database.is_replaced() || engine.store().is_older_state(&database) {
        return Ok(Some(true));
    }
    if !engine.inner.stream.is_up() {
        return Ok(None);
    }
    let repair = DatabaseRepair::with_engine(engine);
    Ok(Some(log_is_lost(engine, &repair, &database).await? || repair.log_is_ahead(&database).await?))
}

/// Returns true if no process has seen the database since its delivery log was lost, so that nothing shows whether it
/// is in an older state. A process that has confirmed it knows.
async fn log_is_lost(engine: &Engine, repair: &DatabaseRepair<'_>, database: &DatabaseState) -> EngineResult<bool> {
    Ok(!engine.store().has_confirmed() && repair.log_is_lost(database).await?)
}

enum CheckOutcome {
    Open { compared: bool, database: Box<DatabaseState> },
    Closed(&'static str),
}

/// Checks the database once, and repairs it if necessary.
async fn check_database(engine: &Engine, began: Instant) -> EngineResult<CheckOutcome> {
    // The engine's own connections may wait for the database that this check finds out about.
    let store = &engine.inner.recovery.state.store;
    let repair = DatabaseRepair::with_engine(engine);
    let database = store.database_state().await?;
    if let Some(reason) = refuse_database(engine, &database) {
        return Ok(CheckOutcome::Closed(reason));
    }
    let is_older = database.is_replaced() || engine.store().is_older_state(&database);
    let ahead =
        if engine.inner.stream.is_up() { unless_nats_fails(repair.log_is_ahead(&database).await)? } else { None };
    match ahead {
        Some(true) => {}
        Some(false) if is_older => {}
        Some(false) if !log_is_lost(engine, &repair, &database).await? => {
            repair.record_logs().await?;
            return adopt_unchanged(store, true).await;
        }
        Some(false) if began.elapsed() < WITNESS_TIMEOUT => {
            return Ok(CheckOutcome::Closed("the delivery log is not the one of this database"));
        }
        Some(false) => {}
        // After a failover service comes first. A process that starts has time: an operator restores.
        None if is_older && engine.store().known_database().is_some() && began.elapsed() >= FAILOVER_NATS_TIMEOUT => {}
        None if is_older => {
            return Ok(CheckOutcome::Closed("the database was restored, and nats is needed to recover deliveries"));
        }
        // NATS may be unavailable: the database claims to be the known one, which is nearly always true.
        None if began.elapsed() >= NATS_TIMEOUT => return adopt_unchanged(store, false).await,
        None => return Ok(CheckOutcome::Closed("nats has not answered yet")),
    }
    let Some(mut lock) = store.try_recovery_lock().await? else {
        return Ok(CheckOutcome::Closed("another process is recovering the database"));
    };
    // The statements of a repair have no deadline. On a dead network their answers never arrive, and this process would
    // not serve until the kernel closes the connection, a quarter of an hour later.
    let outcome = tokio::select! {
        outcome = repair_locked(engine, &repair, ahead.is_some()) => outcome,
        () = lock.ended() => return Ok(CheckOutcome::Closed("the lock of the recovery has ended")),
    };
    lock.release().await;
    outcome?;
    // Read again: the repair has changed its epoch and identity.
    Ok(CheckOutcome::Open { compared: true, database: Box::new(store.database_state().await?) })
}

/// Returns `None` for an error of NATS. One of Postgres must not make a recovery continue without the log.
fn unless_nats_fails<T>(result: EngineResult<T>) -> EngineResult<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(EngineError::Internal(Fault::Stream(_))) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Opens a database that needs no repair.
async fn adopt_unchanged(store: &Store, compared: bool) -> EngineResult<CheckOutcome> {
    let mut database = store.database_state().await?;
    if database.adopted_identity.is_none() {
        store.adopt_database(None).await?;
        database = store.database_state().await?;
    }
    // A recovery may have begun meanwhile.
    if database.is_replaced() {
        return Ok(CheckOutcome::Closed("another process is recovering the database"));
    }
    Ok(CheckOutcome::Open { compared, database: Box::new(database) })
}

/// Repairs the database, under the lock, unless another process has done so before.
async fn repair_locked(engine: &Engine, repair: &DatabaseRepair<'_>, has_log: bool) -> EngineResult<()> {
    let state = &engine.inner.recovery.state;
    // Read again under the lock: another process may have finished the repair in between.
    let database = state.store.database_state().await?;
    let is_older = database.is_replaced() || engine.store().is_older_state(&database);
    let needs_repair = is_older
        || has_log && (log_is_lost(engine, repair, &database).await? || repair.log_is_ahead(&database).await?);
    if !needs_repair {
        return Ok(());
    }
    tracing::warn!(restored_to = %database.seen_at, has_log, "database was restored to an older state, recovering");
    state.readiness.send_replace(Readiness::Closed("the database was restored and is being recovered"));
    let margin = Margin { numbers: state.margin, always: false, without_log: !has_log };
    let report = repair.repair(&database, margin, |_| {}).await?;
    tracing::warn!(?report, "recovered the restored database");
    Ok(())
}

/// Returns the reason why this process must not serve a database, whatever its state.
fn refuse_database(engine: &Engine, database: &DatabaseState) -> Option<&'static str> {
    if database.is_standby {
        return Some("the database is a standby");
    }
    // A primary that was replaced still claims to be the known one.
    let known = engine.store().known_database();
    let is_older = known.is_some_and(|known| database.epoch < known.epoch);
    (is_older && !database.is_replaced())
        .then_some("the database lacks the last recovery: the primary before a failover")
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
