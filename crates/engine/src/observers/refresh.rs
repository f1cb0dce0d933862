//! Refresh of signing keys and overrides from Postgres: before the first request and from then on.

use std::{
    sync::{Arc, OnceLock, PoisonError},
    time::Duration,
};

use relay_store::{OverrideCursor, StoreError};
use tokio::sync::{Mutex, Notify, Semaphore, watch};
use tokio::time::Instant;

use super::{
    Observers, SealingSecret,
    keys::{self, KeyRing},
    overrides::Overrides,
    signing_keys::MAX_LIVING_KEYS,
};
use crate::{EngineError, EngineResult, access::jwt};

/// Interval of refreshes without a hint.
const REFRESH_EVERY: Duration = Duration::from_secs(1);
/// Minimum interval of refreshes on hints and unknown keys.
const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// Without a refresh for this long, signed tokens are refused: they may have been revoked. Also the longest time for
/// which a revocation goes unnoticed at a gateway that has lost only Postgres.
const MAX_STALENESS: Duration = Duration::from_secs(30);
/// Overrides are read from the beginning again after this long, so that those that workers have pruned are dropped.
const REREAD_EVERY: Duration = Duration::from_secs(24 * 3600);
/// Bound of the requests that wait for a refresh because of an unknown key id.
const MAX_WAITING: usize = 256;
const WAIT_TIMEOUT: Duration = Duration::from_secs(3);

/// State of the refreshes.
pub(super) struct Refresher {
    /// Start of the last successful refresh.
    read_at: watch::Sender<Option<Instant>>,
    /// Counts changes that may affect an observer's access.
    changes: watch::Sender<u64>,
    /// Position of the last refresh; the lock serializes refreshes.
    position: Mutex<Option<RefreshPosition>>,
    wanted: Notify,
    waiting: Semaphore,
    secret: OnceLock<Option<SealingSecret>>,
}

/// Position of the last refresh that found changes.
#[derive(Debug)]
struct RefreshPosition {
    cursor: OverrideCursor,
    /// Time when overrides were read from the beginning.
    began_at: Instant,
    /// Digest of the signing keys.
    keys: String,
}

impl Default for Refresher {
    fn default() -> Self {
        Self {
            read_at: watch::Sender::new(None),
            changes: watch::Sender::new(0),
            position: Mutex::default(),
            wanted: Notify::new(),
            waiting: Semaphore::new(MAX_WAITING),
            secret: OnceLock::new(),
        }
    }
}

impl Refresher {
    /// True if the cache is recent enough to be trusted.
    pub(super) fn is_fresh(&self) -> bool {
        self.read_at.borrow().is_some_and(|at| at.elapsed() <= MAX_STALENESS)
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Waits for a refresh that began at `moment` or later.
    pub(super) async fn wait_for_refresh(&self, moment: Instant) -> EngineResult<()> {
        // Unknown key ids are free to invent, so only a few requests may wait for them.
        let _permit = self.waiting.try_acquire().map_err(|_| EngineError::Overloaded)?;
        self.wanted.notify_one();
        let mut read_at = self.read_at.subscribe();
        let read = read_at.wait_for(|at| at.is_some_and(|at| at >= moment));
        match tokio::time::timeout(WAIT_TIMEOUT, read).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(StoreError::unavailable("looking for a signing key").into()),
        }
    }

    pub(super) fn secret(&self) -> Option<&SealingSecret> {
        self.secret.get().and_then(Option::as_ref)
    }

    fn notify_access_change(&self) {
        self.changes.send_modify(|count| *count += 1);
    }
}

impl super::ObserverCache {
    /// Requests a refresh after a change in Postgres.
    pub(crate) fn request_refresh(&self) {
        self.refresher.wanted.notify_one();
    }

    /// Makes observers recheck their access after a change outside of this cache.
    pub(crate) fn notify_access_change(&self) {
        self.refresher.notify_access_change();
    }
}

impl Observers {
    /// Prepares this process to verify observer tokens: loads the signing keys, generates the first one if needed,
    /// loads the overrides, and keeps all of it current. Call once before serving. Waits without limit for an
    /// unavailable Postgres.
    ///
    /// `secret` encrypts the private halves of the keys that this process generates.
    ///
    /// # Errors
    /// When Postgres refuses a statement, or the system has no randomness.
    pub async fn serve(&self, secret: Option<SealingSecret>) -> EngineResult<()> {
        jwt::install();
        // A second call keeps the first secret.
        let _ = self.cache.refresher.secret.set(secret);
        while let Err(error) = self.refresh().await {
            if !matches!(error, EngineError::Unavailable(_) | EngineError::Overloaded) {
                return Err(error);
            }
            tokio::time::sleep(REFRESH_EVERY).await;
        }
        self.tasks.spawn("observer-refresh", refresh_periodically(self.clone()));
        Ok(())
    }

    /// Refreshes signing keys and overrides now.
    pub(super) async fn refresh(&self) -> EngineResult<()> {
        let observers = &self.cache;
        // Held over the reads: of two refreshes at once, the older result must not be applied last.
        let mut position = observers.refresher.position.lock().await;
        let began = Instant::now();
        let known = position.as_ref().filter(|known| known.began_at.elapsed() < REREAD_EVERY);
        // From the beginning at first, and again after `REREAD_EVERY`.
        let since = known.map(|known| known.cursor).unwrap_or_default();
        // Read first: what changes meanwhile is found by the next refresh.
        let changes = self.core.store.observer_changes(since).await?;
        if known.is_some_and(|known| !changes.has_overrides && known.keys == changes.keys) {
            // `began` and not now: the read may lack a revocation that happened during it.
            observers.refresher.read_at.send_replace(Some(began));
            return Ok(());
        }
        let ring = self.read_keys().await?;
        let (rows, cursor) = self.core.store.observer_overrides(since).await?;
        let mut changed = {
            let mut overrides = observers.overrides.write().unwrap_or_else(PoisonError::into_inner);
            // Emptied and filled under one lock: no check may see a revoked token without its override.
            if known.is_none() {
                *overrides = Overrides::default();
            }
            overrides.apply(rows)
        };
        {
            let mut known = observers.ring.write().unwrap_or_else(PoisonError::into_inner);
            changed |= !ring.has_same_keys(&known);
            *known = Arc::new(ring);
        }
        let began_at = known.map_or(began, |known| known.began_at);
        // Only after both were applied: a refresh that fails before is repeated from the same position.
        *position = Some(RefreshPosition { cursor, began_at, keys: changes.keys });
        observers.refresher.read_at.send_replace(Some(began));
        // Last: observers recheck at once and must find the new state.
        if changed {
            observers.refresher.notify_access_change();
        }
        Ok(())
    }

    async fn read_keys(&self) -> EngineResult<KeyRing> {
        let secret = self.cache.refresher.secret();
        let ring = KeyRing::read(&self.core.store.signing_keys().await?, secret);
        if ring.signing_key().is_some() {
            return Ok(ring);
        }
        let first = keys::generate(secret, self.core.now())?;
        // False if another gateway was faster: its key is read below, and ours is dropped.
        if self.core.store.add_signing_key(&first, true, MAX_LIVING_KEYS).await? {
            tracing::info!(kid = first.kid, sealed = first.sealed_with.is_some(), "generated a signing key");
            self.core.hints.observers_changed();
        }
        Ok(KeyRing::read(&self.core.store.signing_keys().await?, secret))
    }
}

/// Refreshes each second, and on request.
async fn refresh_periodically(observers: Observers) {
    let mut failed = false;
    loop {
        // A burst of hints causes one refresh: `notified` keeps a single one of them.
        tokio::time::sleep(MIN_INTERVAL).await;
        let woken = observers.cache.refresher.wanted.notified();
        let _ = tokio::time::timeout(REFRESH_EVERY - MIN_INTERVAL, woken).await;
        let outcome = observers.refresh().await;
        if let Err(error) = &outcome
            && !failed
        {
            tracing::warn!(error = error as &dyn std::error::Error, "observer token refresh failed, will retry");
        }
        failed = outcome.is_err();
    }
}
