//! Recovery epoch: a process writes only to the database, and since the recovery, that it knows.
//!
//! [`EpochFence`] holds the [`KnownDatabase`] of a process. Every new pool connection compares the identity of its
//! database with it, and transactions that assign numbers carry the epoch. The engine's recovery task sets it, and is
//! woken when another database or epoch was met (ADR 0044).

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
};

use sqlx::{PgConnection, Postgres, pool::PoolOptions};
use tokio::sync::{Notify, watch};

use super::DatabaseState;
use crate::{Store, StoreError, StoreResult};

/// SQLSTATE that `relay_require_epoch` and `relay_require_database` raise.
pub(crate) const OTHER_EPOCH: &str = "RLEPO";

/// Database and recovery under which a process serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownDatabase {
    pub identity: String,
    /// Epoch of its last recovery; 0 before the first.
    pub epoch: i64,
    /// Confirmations when the process opened it.
    pub confirmations: i64,
}

impl KnownDatabase {
    /// Returns whether a process that knows this database need not recover when it meets the other.
    #[must_use]
    pub fn continues_as(&self, other: &Self) -> bool {
        self.identity == other.identity && self.epoch == other.epoch
    }

    /// Returns whether this is an older state of the other, put back and not recovered since.
    fn is_older_than(&self, other: &Self) -> bool {
        self.epoch == other.epoch && self.confirmations < other.confirmations
    }
}

/// Shared by all pools of one process.
#[derive(Debug)]
pub(crate) struct EpochFence {
    /// `None` in tools, which serve no client, and until a process has checked its database.
    known: watch::Sender<Option<KnownDatabase>>,
    /// Another database or epoch was met, and the process has not recovered yet.
    is_closed: AtomicBool,
    /// Wakes those that wait for an answer of the database before.
    closes: Notify,
    /// Wakes the recovery.
    met_other: Notify,
    /// Confirmations of the database that this process has seen; a lower count shows an older state of it.
    confirmations: AtomicI64,
    /// This process has confirmed a database itself.
    has_confirmed: AtomicBool,
}

impl Default for EpochFence {
    fn default() -> Self {
        Self {
            known: watch::Sender::new(None),
            is_closed: AtomicBool::new(false),
            closes: Notify::new(),
            met_other: Notify::new(),
            confirmations: AtomicI64::new(0),
            has_confirmed: AtomicBool::new(false),
        }
    }
}

impl EpochFence {
    /// Closes the fence if `is_other` holds for the known database. A finding from before [`Store::open_epoch`] must
    /// not close a fence that was opened since: both hold the lock of `known`.
    pub(crate) fn close_if(&self, is_other: impl FnOnce(Option<&KnownDatabase>) -> bool) {
        let known = self.known.borrow();
        if is_other(known.as_ref()) {
            self.close();
            // Kept for a recovery that does not wait yet.
            self.met_other.notify_one();
        }
    }

    fn close(&self) {
        // Before the notice: `closed` registers and then reads the flag, so that it misses neither.
        self.is_closed.store(true, Ordering::SeqCst);
        self.closes.notify_waiters();
    }

    /// Returns when another database or epoch has been met; at once until this process has recovered.
    pub(crate) async fn closed(&self) {
        let mut closes = pin!(self.closes.notified());
        // Before the look, so that no close is missed.
        closes.as_mut().enable();
        if !self.is_closed.load(Ordering::SeqCst) {
            closes.await;
        }
    }

    /// Returns when another database or epoch is met from now on.
    pub(crate) async fn next_close(&self) {
        self.closes.notified().await;
    }

    /// Admits transactions to this database and epoch.
    pub(crate) fn open(&self, database: KnownDatabase) {
        self.known.send_modify(|known| {
            self.confirmations.store(database.confirmations, Ordering::SeqCst);
            *known = Some(database);
            self.is_closed.store(false, Ordering::SeqCst);
        });
    }

    /// Returns the database that this process serves; `None` before the first check.
    pub(crate) fn served_database(&self) -> Option<KnownDatabase> {
        self.known.borrow().clone()
    }

    /// Waits until the database of a new connection is the known one. The caller's wait for a connection is bounded, so
    /// it fails as if Postgres were unavailable, unless the process has recovered meanwhile.
    async fn admit(&self, connection: &mut PgConnection) -> sqlx::Result<()> {
        // Before the database is read: this process may confirm it meanwhile.
        let Some(confirmed) = self.confirmed_database() else { return Ok(()) };
        let (identity, epoch, confirmations): (String, i64, i64) =
            sqlx::query_as("SELECT relay_database_identity(), epoch, confirmations FROM recovery_state")
                .fetch_one(connection)
                .await?;
        let found = KnownDatabase { identity, epoch, confirmations };
        let is_older = found.is_older_than(&confirmed);
        self.close_if(|known| {
            known.is_some_and(|known| {
                is_older && known.epoch == found.epoch || found.epoch > known.epoch || found.identity != known.identity
            })
        });
        let admits =
            |known: &KnownDatabase| known.identity == found.identity && !(is_older && known.epoch == found.epoch);
        let mut known = self.known.subscribe();
        // Fails only when the process ends.
        let _ = known.wait_for(|known| known.as_ref().is_none_or(admits)).await;
        Ok(())
    }

    /// Returns the database that this process serves, as it was last confirmed.
    fn confirmed_database(&self) -> Option<KnownDatabase> {
        let known = self.known.borrow();
        known.as_ref().map(|known| KnownDatabase { confirmations: self.confirmations(), ..known.clone() })
    }

    pub(crate) fn confirmations(&self) -> i64 {
        self.confirmations.load(Ordering::SeqCst)
    }

    pub(super) fn confirm(&self, confirmations: i64) {
        self.confirmations.fetch_max(confirmations, Ordering::SeqCst);
        self.has_confirmed.store(true, Ordering::SeqCst);
    }

    /// Adds the comparison to the connections of a pool.
    pub(crate) fn guard(self: &Arc<Self>, options: PoolOptions<Postgres>) -> PoolOptions<Postgres> {
        let fence = Arc::clone(self);
        options.after_connect(move |connection, _| {
            let fence = Arc::clone(&fence);
            Box::pin(async move { fence.admit(connection).await })
        })
    }
}

impl Store {
    /// Epoch for a transaction that assigns numbers; `None` in tools, which are not fenced. To be read before the wait
    /// for a connection, so that a transaction prepared before a recovery is not written after it.
    pub(crate) fn epoch(&self, doing: &'static str) -> StoreResult<Option<i64>> {
        if self.fence.is_closed.load(Ordering::SeqCst) {
            return Err(StoreError::OtherEpoch { doing });
        }
        Ok(self.known_epoch())
    }

    /// Closes the fence if a transaction under `epoch` found another one, unless the process has recovered meanwhile.
    pub(crate) fn note_epoch<T>(&self, epoch: Option<i64>, result: StoreResult<T>) -> StoreResult<T> {
        if matches!(result, Err(StoreError::OtherEpoch { .. })) {
            self.fence.close_if(|known| known.map(|known| known.epoch) == epoch);
        }
        result
    }

    /// Returns the database that this process serves; `None` before the first check.
    #[must_use]
    pub fn known_database(&self) -> Option<KnownDatabase> {
        self.fence.served_database()
    }

    /// Returns the epoch of the database that this process serves, also while another one was met; `None` before the
    /// first check.
    #[must_use]
    pub fn known_epoch(&self) -> Option<i64> {
        self.fence.known.borrow().as_ref().map(|known| known.epoch)
    }

    /// Returns the epoch under which this process serves now; `None` while another one was met, and before the first
    /// check.
    #[must_use]
    pub fn served_epoch(&self) -> Option<i64> {
        let is_open = !self.fence.is_closed.load(Ordering::SeqCst);
        is_open.then(|| self.known_epoch()).flatten()
    }

    /// Refuses all transactions that assign numbers until [`Store::open_epoch`].
    pub fn close_epoch(&self) {
        self.fence.close();
    }

    /// Returns whether the known database was put back to an older state, and not recovered since.
    #[must_use]
    pub fn is_older_state(&self, database: &DatabaseState) -> bool {
        self.fence.confirmed_database().is_some_and(|confirmed| database.to_known().is_older_than(&confirmed))
    }

    /// Returns whether this process has confirmed a database.
    #[must_use]
    pub fn has_confirmed(&self) -> bool {
        self.fence.has_confirmed.load(Ordering::SeqCst)
    }

    /// Admits transactions to this database and epoch. Connections to one before are not used again.
    pub fn open_epoch(&self, database: KnownDatabase) {
        if self.known_database().is_some_and(|before| !before.continues_as(&database)) {
            self.pool.close_kept();
        }
        self.fence.open(database);
    }

    /// Waits until a connection or a transaction meets another database or epoch. Findings from before
    /// [`Store::open_epoch`] do not count: several connections meet the same failover, some during the recovery.
    pub async fn met_other_epoch(&self) {
        loop {
            self.fence.met_other.notified().await;
            if self.fence.is_closed.load(Ordering::SeqCst) {
                return;
            }
        }
    }
}
