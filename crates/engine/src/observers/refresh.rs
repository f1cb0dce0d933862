//! Keeping up with Postgres: signing keys and overrides, before the first request and from then on.

use std::{
    sync::{Arc, OnceLock, PoisonError, Weak},
    time::{Duration, Instant},
};

use relay_store::{OverrideCursor, StoreError};
use tokio::sync::{Mutex, Notify, Semaphore, watch};

use super::{
    SealingSecret,
    keys::{self, KeyRing},
    signing_keys::MAX_LIVING_KEYS,
};
use crate::{Engine, EngineError, EngineResult, Inner, jwt};

/// How often keys and overrides are read without a hint.
const EVERY: Duration = Duration::from_secs(1);
/// Hints and unknown keys lead to at most one reading in this time.
const AT_MOST_EVERY: Duration = Duration::from_millis(100);
/// After this long without a reading a signed token is no longer believed: it may have been revoked. Also
/// how long a revocation can go unnoticed at a gateway that has lost Postgres and nothing else.
const BELIEVED_FOR: Duration = Duration::from_secs(30);
/// Requests that may wait for a reading because of a key that nobody here has heard of.
const WAITING: usize = 256;
/// How long such a request waits at most.
const WAIT_AT_MOST: Duration = Duration::from_secs(3);

/// The state of the readings.
pub(super) struct Refresher {
    /// When the last successful reading began.
    read_at: watch::Sender<Option<Instant>>,
    /// Counts what may have changed somebody's access.
    changes: watch::Sender<u64>,
    /// One reading at a time, from where the last one ended.
    cursor: Mutex<OverrideCursor>,
    wanted: Notify,
    waiting: Semaphore,
    secret: OnceLock<Option<SealingSecret>>,
}

impl Default for Refresher {
    fn default() -> Self {
        Self {
            read_at: watch::Sender::new(None),
            changes: watch::Sender::new(0),
            cursor: Mutex::default(),
            wanted: Notify::new(),
            waiting: Semaphore::new(WAITING),
            secret: OnceLock::new(),
        }
    }
}

impl Refresher {
    /// Whether what is known is young enough to be relied on.
    pub(super) fn is_fresh(&self) -> bool {
        self.read_at.borrow().is_some_and(|at| at.elapsed() <= BELIEVED_FOR)
    }

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Waits until something has been read that was there at `moment`.
    pub(super) async fn after(&self, moment: Instant) -> EngineResult<()> {
        let _place = self.waiting.try_acquire().map_err(|_| EngineError::Overloaded)?;
        self.wanted.notify_one();
        let mut read_at = self.read_at.subscribe();
        let read = read_at.wait_for(|at| at.is_some_and(|at| at >= moment));
        match tokio::time::timeout(WAIT_AT_MOST, read).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(StoreError::still_away("looking for a signing key").into()),
        }
    }

    pub(super) fn secret(&self) -> Option<&SealingSecret> {
        self.secret.get().and_then(Option::as_ref)
    }

    fn count_change(&self) {
        self.changes.send_modify(|count| *count += 1);
    }
}

impl super::Observers {
    /// Something has changed in Postgres.
    pub(crate) fn wake(&self) {
        self.refresher.wanted.notify_one();
    }

    /// Some token has died that is not known here.
    pub(crate) fn recheck(&self) {
        self.refresher.count_change();
    }
}

impl Engine {
    /// Makes this process judge observer tokens: loads the signing keys, makes the first one if need be,
    /// loads what has changed about tokens, and keeps up with all of it. To be called once, before
    /// serving. Waits, without end, for a Postgres that is away.
    ///
    /// `secret` seals the private halves of the keys that this process makes.
    ///
    /// # Errors
    /// When Postgres refuses, or there is no randomness.
    pub async fn serve_observers(&self, secret: Option<SealingSecret>) -> EngineResult<()> {
        jwt::install();
        let _ = self.inner.observers.refresher.secret.set(secret);
        while let Err(error) = self.refresh_observers().await {
            if !matches!(error, EngineError::Unavailable(_) | EngineError::Overloaded) {
                return Err(error);
            }
            tokio::time::sleep(EVERY).await;
        }
        tokio::spawn(keep_up(Arc::downgrade(&self.inner)));
        Ok(())
    }

    /// Reads signing keys and overrides now.
    pub(super) async fn refresh_observers(&self) -> EngineResult<()> {
        let observers = &self.inner.observers;
        let mut cursor = observers.refresher.cursor.lock().await;
        let began = Instant::now();
        let ring = self.read_keys().await?;
        let (rows, next) = self.store().observer_overrides(*cursor).await?;
        let mut changed = observers.overrides.write().unwrap_or_else(PoisonError::into_inner).apply(rows);
        {
            let mut known = observers.ring.write().unwrap_or_else(PoisonError::into_inner);
            changed |= !ring.same_as(&known);
            *known = Arc::new(ring);
        }
        *cursor = next;
        observers.refresher.read_at.send_replace(Some(began));
        if changed {
            observers.refresher.count_change();
        }
        Ok(())
    }

    async fn read_keys(&self) -> EngineResult<KeyRing> {
        let secret = self.inner.observers.refresher.secret();
        let ring = KeyRing::read(&self.store().signing_keys().await?, secret);
        if ring.signing().is_some() {
            return Ok(ring);
        }
        let first = keys::generate(secret, self.now())?;
        if self.store().add_signing_key(&first, true, MAX_LIVING_KEYS).await? {
            tracing::info!(kid = first.kid, sealed = first.sealed_with.is_some(), "made a signing key");
            self.hints().observers_changed();
        }
        Ok(KeyRing::read(&self.store().signing_keys().await?, secret))
    }
}

/// Reads each second, and on a wake-up, until the engine is gone.
async fn keep_up(engine: Weak<Inner>) {
    let mut failed = false;
    loop {
        tokio::time::sleep(AT_MOST_EVERY).await;
        let Some(inner) = engine.upgrade() else { return };
        let woken = inner.observers.refresher.wanted.notified();
        let _ = tokio::time::timeout(EVERY - AT_MOST_EVERY, woken).await;
        let engine = Engine { inner };
        let outcome = engine.refresh_observers().await;
        if let Err(error) = &outcome
            && !failed
        {
            tracing::warn!(error = error as &dyn std::error::Error, "observer tokens are not kept up with");
        }
        failed = outcome.is_err();
    }
}
