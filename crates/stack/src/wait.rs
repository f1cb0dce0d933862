//! Waiting for something to become true, with a bound and a name.

use std::fmt::Display;
use std::future::Future;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

const POLL: Duration = Duration::from_millis(25);

/// Polls `condition` until it holds.
///
/// # Panics
/// After `timeout`, naming `what` was waited for.
#[track_caller]
pub fn until<F, Fut>(what: &str, timeout: Duration, condition: F) -> impl Future<Output = ()>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = bool>,
{
    // Taken outside the future: `track_caller` does not reach the body of an `async fn`.
    let place = std::panic::Location::caller();
    let mut condition = condition;
    async move {
        let started = Instant::now();
        while !condition().await {
            assert!(started.elapsed() < timeout, "{place}: still waiting for {what} after {timeout:?}");
            tokio::time::sleep(POLL).await;
        }
    }
}

/// Polls `attempt` until it succeeds; after `timeout`, returns its last error with a description of the condition.
pub async fn until_ok<T, E, F, Fut>(what: &str, timeout: Duration, mut attempt: F) -> Result<T>
where
    E: Display,
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T, E>>,
{
    let started = Instant::now();
    loop {
        match attempt().await {
            Ok(value) => return Ok(value),
            Err(error) if started.elapsed() >= timeout => {
                return Err(anyhow!("waited {timeout:?} for {what}: {error:#}"));
            }
            Err(_) => tokio::time::sleep(POLL).await,
        }
    }
}
