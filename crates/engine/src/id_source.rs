//! Source of snowflake ids: a leased worker number and a clock that is synchronized with Postgres.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicI64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use chrono::{DateTime, Utc};
use relay_domain::snowflake::SnowflakeGenerator;
use relay_store::{Store, StoreResult};

use crate::{EngineError, EngineResult, error::Fault};

/// Lease time of a worker number, in seconds.
pub(crate) const WORKER_LEASE_SECONDS: i32 = 60;

/// Leased worker number of a running process.
#[derive(Debug)]
pub(crate) struct WorkerNumber {
    owner: String,
    number: Mutex<i16>,
}

impl WorkerNumber {
    pub(crate) fn new(owner: String, number: i16) -> Self {
        Self { owner, number: Mutex::new(number) }
    }

    /// Renews the lease, or takes another number if it was lost, and synchronizes the clock.
    ///
    /// A number is lost if this process was paused, or Postgres was unavailable, for longer than the lease, or with the
    /// end of a database that was replaced. Numbers are leased longest-free first, so that a number just lost is not in
    /// use elsewhere.
    ///
    /// # Errors
    /// If Postgres is unavailable, or the number is lost and all others are in use.
    pub(crate) async fn renew(&self, store: &Store, ids: &IdSource) -> EngineResult<()> {
        // Copied, so that the lock is not held over the statements.
        let number = *self.number.lock().unwrap_or_else(PoisonError::into_inner);
        if !store.renew_worker_id(number, &self.owner, WORKER_LEASE_SECONDS).await? {
            let fresh = store.lease_worker_id(&self.owner, WORKER_LEASE_SECONDS).await?;
            let fresh = fresh.ok_or(EngineError::Internal(Fault::NoWorkerNumber))?;
            tracing::warn!(lost = number, leased = fresh, "replaced a lost worker number");
            // Under the lock: two renewals at once may have leased one each.
            let mut number = self.number.lock().unwrap_or_else(PoisonError::into_inner);
            *number = fresh;
            ids.change_worker(fresh.unsigned_abs());
        }
        Ok(ids.synchronize(store).await?)
    }
}

/// Generator of the ids of this process.
#[derive(Debug)]
pub struct IdSource {
    snowflakes: Mutex<SnowflakeGenerator>,
    offset_ms: AtomicI64,
}

impl IdSource {
    /// Creates a source for a leased worker number.
    #[must_use]
    pub fn new(worker: u16) -> Self {
        Self { snowflakes: Mutex::new(SnowflakeGenerator::new(worker)), offset_ms: AtomicI64::new(0) }
    }

    /// Returns the time by Postgres' clock, in unix milliseconds, as far as known.
    pub fn now_ms(&self) -> i64 {
        own_clock_ms() + self.offset_ms.load(Ordering::Relaxed)
    }

    /// Returns the same time as a date.
    pub fn now(&self) -> DateTime<Utc> {
        // A clock that lies outside of the range of dates cannot make ids either.
        DateTime::from_timestamp_millis(self.now_ms()).unwrap_or_default()
    }

    /// Synchronizes with Postgres' clock. The offset changes by no more than the reading proves: a slow answer says
    /// little, and a clock that follows noise would run backwards.
    pub async fn synchronize(&self, store: &Store) -> StoreResult<()> {
        let asked = own_clock_ms();
        let postgres = store.now().await?.timestamp_millis();
        let offset = self.offset_ms.load(Ordering::Relaxed);
        self.offset_ms.store(clamp_offset(offset, asked, postgres, own_clock_ms()), Ordering::Relaxed);
        Ok(())
    }

    /// Continues with another leased worker number.
    pub fn change_worker(&self, worker: u16) {
        *self.snowflakes.lock().unwrap_or_else(PoisonError::into_inner) = SnowflakeGenerator::new(worker);
    }

    /// Returns the next id: unique across running processes, increasing within this one.
    pub fn next_id(&self) -> i64 {
        let now = self.now_ms();
        self.snowflakes.lock().unwrap_or_else(PoisonError::into_inner).next_id(now)
    }
}

#[expect(clippy::disallowed_methods, reason = "the one reading that is synchronized with Postgres")]
fn own_clock_ms() -> i64 {
    // A clock before 1970 counts as 1970: the offset to Postgres' clock makes up for it.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Returns the offset closest to the present one that a reading allows. Postgres read its clock, in whole milliseconds,
/// at some time between request and answer.
fn clamp_offset(offset: i64, asked: i64, postgres: i64, answered: i64) -> i64 {
    let (least, most) = (postgres - answered.max(asked) - 1, postgres - asked + 1);
    offset.clamp(least, most)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn slow_responses_do_not_move_the_clock() {
        assert_eq!(clamp_offset(0, 1_000, 1_010, 1_400), 0);
        assert_eq!(clamp_offset(0, 1_000, 1_390, 1_400), 0);
        assert_eq!(clamp_offset(700, 1_000, 1_900, 1_400), 700);
    }

    proptest! {
        #[test]
        fn offset_converges_to_the_true_one(
            truth in -100_000_i64..100_000, start in -100_000_i64..100_000, at in 0_i64..1_000_000,
            (there, back) in (0_i64..5_000, 0_i64..5_000),
        ) {
            let postgres = at + there + truth;
            let found = clamp_offset(start, at, postgres, at + there + back);
            prop_assert!((found - truth).abs() <= (start - truth).abs(), "no farther than before");
            prop_assert!((found - truth).abs() <= there.max(back) + 1, "as near as the reading tells");
            prop_assert_eq!(clamp_offset(truth, at, postgres, at + there + back), truth);
        }
    }
}
