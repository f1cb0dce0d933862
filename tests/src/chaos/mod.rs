//! The fault suite's parts: nodes that come back, senders that retry, and the ledger that judges them.
//!
//! Each test starts a private engine, because it kills parts of it. They are bounded by default and run
//! at full size with `RELAY_CHAOS=full` (`cargo xtask chaos`).

pub mod database;
pub mod ledger;
pub mod load;
pub mod node;
pub mod scene;
pub mod sender;

use std::time::Duration;

/// Whether the suite runs at full size.
pub fn is_full() -> bool {
    std::env::var("RELAY_CHAOS").is_ok_and(|size| size == "full")
}

/// One of two values, by the size of the run.
pub fn sized<T>(bounded: T, full: T) -> T {
    if is_full() { full } else { bounded }
}

/// How long an outage lasts.
pub fn outage() -> Duration {
    Duration::from_secs(sized(10, 30))
}

/// A number below `bound`, for choices that need not be repeatable.
pub fn below(bound: usize) -> usize {
    let random = uuid::Uuid::new_v4().as_u128();
    usize::try_from(random % bound.max(1) as u128).unwrap_or_default()
}
