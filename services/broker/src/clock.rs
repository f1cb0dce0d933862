//! The broker's clock for verification: milliseconds since its start.

use std::{sync::LazyLock, time::Duration};

use relay_verification::Timestamp;
use tokio::time::Instant;

static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

pub(crate) fn now() -> Timestamp {
    timestamp(Instant::now())
}

/// An instant as the verification counts it.
pub(crate) fn timestamp(instant: Instant) -> Timestamp {
    // Instants before the first call do not matter to anything.
    let millis = instant.saturating_duration_since(*ORIGIN).as_millis();
    Timestamp::from_millis(i64::try_from(millis).unwrap_or(i64::MAX))
}

/// The moment of a timestamp.
pub(crate) fn instant(timestamp: Timestamp) -> Instant {
    // Timestamps count from the origin, so none is negative.
    let millis = u64::try_from(timestamp.as_millis()).unwrap_or(0);
    *ORIGIN + Duration::from_millis(millis)
}

/// Whole milliseconds of a duration.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Unix time in milliseconds.
#[expect(clippy::disallowed_methods, reason = "programs on this machine compare it with its clock")]
pub(crate) fn unix_ms() -> i64 {
    chrono::Utc::now().timestamp_millis()
}

/// Time since the start of the broker.
pub(crate) fn uptime() -> Duration {
    ORIGIN.elapsed()
}
