//! Snowflake ids: milliseconds since 2025, a worker number and a counter in 63 bits.

/// 2025-01-01T00:00:00Z in unix milliseconds: the epoch of every snowflake.
pub const EPOCH_MS: i64 = 1_735_689_600_000;
/// Number of worker numbers. They are leased, so that no two processes share one.
pub const WORKERS: u16 = 1024;
/// Maximum number of ids that one worker can generate per millisecond.
const PER_MS: u16 = 4096;

/// Generator of ids for one worker number. Ids increase strictly even if the clock does not.
#[derive(Debug)]
pub struct SnowflakeGenerator {
    worker: u16,
    last_ms: i64,
    next_in_ms: u16,
}

impl SnowflakeGenerator {
    /// Creates a generator for a leased worker number below [`WORKERS`].
    #[must_use]
    pub fn new(worker: u16) -> Self {
        // A larger number would reach into the bits of the time.
        Self { worker: worker % WORKERS, last_ms: 0, next_in_ms: 0 }
    }

    /// Returns the next id, given the current time in unix milliseconds.
    ///
    /// If the clock stops or steps back, ids continue from the latest millisecond used; when that one is exhausted,
    /// they borrow from the next.
    pub fn next_id(&mut self, now_ms: i64) -> i64 {
        let now = (now_ms - EPOCH_MS).max(0);
        if now > self.last_ms {
            self.last_ms = now;
            self.next_in_ms = 0;
        } else if self.next_in_ms == PER_MS {
            self.last_ms += 1;
            self.next_in_ms = 0;
        }
        // 41 bits of time, which last until 2094, then 10 of the worker and 12 of the counter.
        let id = (self.last_ms << 22) | (i64::from(self.worker) << 12) | i64::from(self.next_in_ms);
        self.next_in_ms += 1;
        id
    }
}

/// Returns the creation time of an id, in unix milliseconds.
#[must_use]
pub const fn created_at_ms(id: i64) -> i64 {
    (id >> 22) + EPOCH_MS
}

/// Returns the smallest id that can have been created at this unix millisecond or later.
#[must_use]
pub const fn first_id_at(ms: i64) -> i64 {
    let since = ms.saturating_sub(EPOCH_MS);
    if since < 0 {
        0
    } else if since > i64::MAX >> 22 {
        // The shift would overflow.
        i64::MAX
    } else {
        since << 22
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_increase_when_the_clock_stops_or_steps_back() {
        let mut ids = SnowflakeGenerator::new(5);
        let start = EPOCH_MS + 1_000_000;
        let mut last = 0;
        for i in 0..20_000 {
            let id = ids.next_id(start - i / 100);
            assert!(id > last);
            last = id;
        }
        assert!(created_at_ms(last) <= start + 5, "the counter may run at most a few milliseconds ahead");
    }

    #[test]
    fn an_instant_bounds_later_ids() {
        let at = EPOCH_MS + 77;
        let id = SnowflakeGenerator::new(9).next_id(at);
        assert!(first_id_at(at) <= id && id < first_id_at(at + 1));
        assert_eq!((first_id_at(0), first_id_at(i64::MAX)), (0, i64::MAX));
    }

    #[test]
    fn two_workers_never_generate_the_same_id() {
        let (mut a, mut b) = (SnowflakeGenerator::new(1), SnowflakeGenerator::new(2));
        let now = EPOCH_MS + 77;
        let left: std::collections::HashSet<_> = (0..5000).map(|_| a.next_id(now)).collect();
        assert!((0..5000).all(|_| !left.contains(&b.next_id(now))));
    }
}
