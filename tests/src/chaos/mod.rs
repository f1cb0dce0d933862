//! Parts of the fault suite: nodes that reconnect, senders that retry, and the ledger that verifies them.
//!
//! Each test starts a private engine, because it kills parts of it. Runs are bounded by default and at full size with
//! `RELAY_CHAOS=full` (`cargo xtask chaos`).

pub mod bulk;
pub mod database;
pub mod end_state;
pub mod fanouts;
pub mod ledger;
pub mod load;
pub mod node;
pub mod posts;
pub mod report;
pub mod scene;
pub mod sender;

use std::time::Duration;

/// Returns whether the suite runs at full size.
pub fn is_full() -> bool {
    std::env::var("RELAY_CHAOS").is_ok_and(|size| size == "full")
}

/// Returns one of two values by the size of the run.
pub fn by_run_size<T>(bounded: T, full: T) -> T {
    if is_full() { full } else { bounded }
}

/// Returns the duration of an outage.
pub fn outage_duration() -> Duration {
    Duration::from_secs(by_run_size(10, 30))
}

/// Returns a random number below `bound`.
pub fn random_below(bound: usize) -> usize {
    let random = uuid::Uuid::new_v4().as_u128();
    usize::try_from(random % bound.max(1) as u128).unwrap_or_default()
}
