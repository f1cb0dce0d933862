//! A Postgres that was restored, or a JetStream that was lost: noticed and mended before anybody is served (ADR 0017).
//!
//! Every process looks when it starts and whenever Postgres was away; one of them, under a lock in Postgres, does what
//! is to be done. `run` is the task of an engine, `Recovery` what the other modules see of it, `Mender` the work,
//! which `relayctl restore` does by hand.

mod frames;
mod mend;
mod rebuild;
mod told;

use std::{
    sync::{Mutex, PoisonError, Weak},
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use tokio::sync::{Notify, watch};

pub use mend::{Examined, Margin, Mended, Mender, Progress};

use crate::{Engine, EngineError, EngineResult, Inner};

/// How often the database is asked whether it is the known one.
const LOOK_EVERY: Duration = Duration::from_secs(3);
/// How long to wait after a look that failed, or while another process mends.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(500);
/// How long a start waits for NATS before it goes on without having compared the log with a database that says it is
/// the known one.
const NATS_PATIENCE: Duration = Duration::from_secs(2);
/// By how much numbers are raised when nobody can tell which ones were given away.
pub const DEFAULT_MARGIN: i64 = 10_000;

/// Whether the engine may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Not yet, or not now, and why.
    Closed(&'static str),
    /// It may. The number rises with each time that it was closed before.
    Open(u64),
}

/// What the engine knows of its recovery.
pub(crate) struct Recovery {
    standing: watch::Sender<Standing>,
    margin: i64,
    /// When the database was last recovered, as of the last look.
    recovered_at: Mutex<Option<DateTime<Utc>>>,
    /// The delivery log has lost what it held.
    log_is_new: Notify,
}

impl Recovery {
    pub(crate) fn new(margin: i64) -> Self {
        let (standing, _) = watch::channel(Standing::Closed("the database has not been looked at yet"));
        Self { standing, margin, recovered_at: Mutex::new(None), log_is_new: Notify::new() }
    }

    /// The log was made anew.
    pub(crate) fn log_is_new(&self) {
        self.log_is_new.notify_one();
    }
}

impl Engine {
    /// Whether the engine may be used: the database is the known one, or has been mended.
    #[must_use]
    pub fn standing(&self) -> Standing {
        *self.inner.recovery.standing.borrow()
    }

    /// The standing from now on.
    #[must_use]
    pub fn watch_standing(&self) -> watch::Receiver<Standing> {
        self.inner.recovery.standing.subscribe()
    }

    /// Waits until the engine may be used.
    pub async fn recovered(&self) {
        let mut standing = self.watch_standing();
        // An engine that is gone is asked nothing any more.
        let _ = standing.wait_for(|standing| matches!(standing, Standing::Open(_))).await;
    }
}

/// Looks after the database and the log until the engine is gone.
pub(crate) async fn run(engine: Weak<Inner>) {
    let mut rounds = 0;
    loop {
        // Closed: until a look has found all well, or has mended it.
        let began = Instant::now();
        let mut told = None;
        let compared = loop {
            let Some(inner) = engine.upgrade() else { return };
            let reason = match settle(&Engine { inner: inner.clone() }, began.elapsed() >= NATS_PATIENCE).await {
                Ok(Settled::Well { compared }) => break compared,
                Ok(Settled::Not(reason)) => reason,
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "the database could not be looked at");
                    reason_of(&error)
                }
            };
            if told != Some(reason) && began.elapsed() >= ASK_AGAIN_AFTER {
                tracing::warn!(reason, "nobody is served yet");
                told = Some(reason);
            }
            inner.recovery.standing.send_replace(Standing::Closed(reason));
            drop(inner);
            tokio::time::sleep(ASK_AGAIN_AFTER).await;
        };
        let Some(inner) = engine.upgrade() else { return };
        note_recovery(&Engine { inner: inner.clone() }).await;
        inner.recovery.standing.send_replace(Standing::Open(rounds));
        drop(inner);
        if watch_over(&engine, compared).await.is_none() {
            return;
        }
        rounds += 1;
        let Some(inner) = engine.upgrade() else { return };
        inner.recovery.standing.send_replace(Standing::Closed("the database is another one than before"));
    }
}

/// Remembers when the database was last recovered. When that cannot be read, what was known stays: brokers are then not asked for more.
async fn note_recovery(engine: &Engine) {
    match engine.store().database_state().await {
        Ok(state) => {
            let mut known = engine.inner.recovery.recovered_at.lock().unwrap_or_else(PoisonError::into_inner);
            *known = state.recovered_at;
        }
        Err(error) => tracing::debug!(error = &error as &dyn std::error::Error, "the last recovery is not known"),
    }
}

/// Comes back when the database is not what it was; `None` when the engine is gone.
async fn watch_over(engine: &Weak<Inner>, mut compared: bool) -> Option<()> {
    let mut rebuild = false;
    loop {
        {
            let engine = Engine { inner: engine.upgrade()? };
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                () = engine.inner.recovery.log_is_new.notified() => rebuild = true,
            }
        }
        let engine = Engine { inner: engine.upgrade()? };
        if !compared {
            // The time of the last sign of life must not move before the log has been compared.
            match look_again(&engine).await {
                Ok(Some(true)) => return Some(()),
                Ok(Some(false)) => compared = true,
                Ok(None) => continue,
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, "the log was not compared");
                    continue;
                }
            }
        }
        match engine.store().see_database().await {
            Ok(true) => {}
            Ok(false) => return Some(()),
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "the database could not be seen");
                // It may come back as another, or as what it was long ago.
                compared = false;
                continue;
            }
        }
        if rebuild && engine.inner.stream.is_up() {
            match rebuild::run(&engine).await {
                Ok(done) => rebuild = !done,
                Err(error) => tracing::debug!(error = &error as &dyn std::error::Error, "the log was not rebuilt"),
            }
        }
    }
}

/// Whether the database is another one, or older than the log; `None` while nobody can tell.
async fn look_again(engine: &Engine) -> EngineResult<Option<bool>> {
    let database = engine.store().database_state().await?;
    if database.is_another() {
        return Ok(Some(true));
    }
    if !engine.inner.stream.is_up() {
        return Ok(None);
    }
    Mender::of(engine).log_is_ahead(&database).await.map(Some)
}

enum Settled {
    Well { compared: bool },
    Not(&'static str),
}

/// One look, and what it makes necessary.
async fn settle(engine: &Engine, waited: bool) -> EngineResult<Settled> {
    crate::holds::refresh(&engine.inner).await?;
    let mender = Mender::of(engine);
    let database = engine.store().database_state().await?;
    let ahead = mender.log_is_ahead(&database).await;
    if !database.is_another() {
        match ahead {
            Ok(false) => {
                if database.known.is_none() {
                    engine.store().know_database(None).await?;
                }
                return Ok(Settled::Well { compared: true });
            }
            Ok(true) => {}
            // NATS may be away: the database says that it is the known one, which is nearly always true.
            Err(_) if waited => {
                if database.known.is_none() {
                    engine.store().know_database(None).await?;
                }
                return Ok(Settled::Well { compared: false });
            }
            Err(_) => return Ok(Settled::Not("nats has not answered yet")),
        }
    } else if ahead.is_err() {
        return Ok(Settled::Not("the database was restored, and nats is needed to recover what was sent"));
    }
    let Some(lock) = engine.store().try_recovery_lock().await? else {
        return Ok(Settled::Not("another process recovers the restored database"));
    };
    // Somebody else may have done it before we had the lock.
    let again = engine.store().database_state().await?;
    let outcome = if again.is_another() || mender.log_is_ahead(&again).await? {
        tracing::warn!(restored_to = %again.seen_at, "the database was restored to an older state: recovering");
        engine
            .inner
            .recovery
            .standing
            .send_replace(Standing::Closed("the database was restored and is being recovered"));
        let margin = Margin { numbers: engine.inner.recovery.margin, always: false };
        mender.mend(&again, margin, |_| {}).await.map(|mended| {
            tracing::warn!(?mended, "the restored database is recovered");
        })
    } else {
        Ok(())
    };
    lock.release().await;
    outcome.map(|()| Settled::Well { compared: true })
}

const fn reason_of(error: &EngineError) -> &'static str {
    match error {
        EngineError::Unavailable(_) => "storage is away",
        EngineError::Stream(_) => "nats is away",
        _ => "the database could not be looked at",
    }
}
