//! Where snowflake ids come from: a leased worker number and a clock checked against Postgres'.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicI64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use relay_domain::snowflake::Snowflakes;
use relay_store::{Store, StoreResult};

/// Makes ids for this process.
#[derive(Debug)]
pub struct IdSource {
    snowflakes: Mutex<Snowflakes>,
    /// Postgres' clock minus ours, in milliseconds.
    offset_ms: AtomicI64,
}

impl IdSource {
    /// A source for a leased worker number.
    #[must_use]
    pub fn new(worker: u16) -> Self {
        Self { snowflakes: Mutex::new(Snowflakes::new(worker)), offset_ms: AtomicI64::new(0) }
    }

    /// Postgres' clock, as far as known, in unix milliseconds.
    pub fn now_ms(&self) -> i64 {
        own_clock_ms() + self.offset_ms.load(Ordering::Relaxed)
    }

    /// Reads Postgres' clock and corrects this one by no more than the reading proves: an answer that was
    /// long on its way says little, and a clock moved by noise would run backwards.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn correct(&self, store: &Store) -> StoreResult<()> {
        let asked = own_clock_ms();
        let postgres = store.ping().await?;
        let offset = self.offset_ms.load(Ordering::Relaxed);
        self.offset_ms.store(corrected(offset, asked, postgres, own_clock_ms()), Ordering::Relaxed);
        Ok(())
    }

    /// Goes on with another leased worker number.
    pub fn change_worker(&self, worker: u16) {
        *self.snowflakes.lock().unwrap_or_else(PoisonError::into_inner) = Snowflakes::new(worker);
    }

    /// The next id: unique across live processes, rising within this one.
    pub fn next_id(&self) -> i64 {
        let now = self.now_ms();
        self.snowflakes.lock().unwrap_or_else(PoisonError::into_inner).next_id(now)
    }
}

fn own_clock_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// The offset nearest to the present one that a reading allows: Postgres read its clock, in whole
/// milliseconds, some time between question and answer.
fn corrected(offset: i64, asked: i64, postgres: i64, answered: i64) -> i64 {
    let (least, most) = (postgres - answered.max(asked) - 1, postgres - asked + 1);
    offset.clamp(least, most)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_slow_answer_moves_no_clock() {
        assert_eq!(corrected(0, 1_000, 1_010, 1_400), 0);
        assert_eq!(corrected(0, 1_000, 1_390, 1_400), 0);
        assert_eq!(corrected(700, 1_000, 1_900, 1_400), 700);
    }

    proptest! {
        #[test]
        fn the_true_offset_is_never_left_and_soon_found(
            truth in -100_000_i64..100_000, start in -100_000_i64..100_000, at in 0_i64..1_000_000,
            (there, back) in (0_i64..5_000, 0_i64..5_000),
        ) {
            let postgres = at + there + truth;
            let found = corrected(start, at, postgres, at + there + back);
            prop_assert!((found - truth).abs() <= (start - truth).abs(), "no farther than before");
            prop_assert!((found - truth).abs() <= there.max(back) + 1, "as near as the reading tells");
            prop_assert_eq!(corrected(truth, at, postgres, at + there + back), truth);
        }
    }
}
