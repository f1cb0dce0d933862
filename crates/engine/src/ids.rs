//! Where snowflake ids come from: a leased worker number and a clock checked against Postgres'.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicI64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use relay_domain::snowflake::Snowflakes;

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

    /// Corrects the clock by a reading of Postgres'. Differences below 50 ms are round-trip noise.
    pub fn correct(&self, postgres_ms: i64) {
        let offset = postgres_ms - own_clock_ms();
        self.offset_ms.store(if offset.abs() < 50 { 0 } else { offset }, Ordering::Relaxed);
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
