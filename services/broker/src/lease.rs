//! [`Lease`]: an ephemeral broker ends when its owner stops renewing.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep};

/// Time between two renewals at most.
const TERM: Duration = Duration::from_secs(120);
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// Lease of the broker's owner. A persistent broker has none.
#[derive(Debug)]
pub(crate) struct Lease {
    expires_at: Option<Mutex<Instant>>,
}

impl Lease {
    pub(crate) fn new(persists: bool) -> Self {
        Self { expires_at: (!persists).then(|| Mutex::new(Instant::now() + TERM)) }
    }

    /// Renews the lease. Returns the seconds that it holds, 0 without one.
    pub(crate) fn renew(&self) -> u64 {
        match &self.expires_at {
            Some(expires_at) => {
                *expires_at.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now() + TERM;
                TERM.as_secs()
            }
            None => 0,
        }
    }

    pub(crate) fn is_persistent(&self) -> bool {
        self.expires_at.is_none()
    }

    /// Waits until the lease has run out.
    pub(crate) async fn expired(&self) {
        match &self.expires_at {
            None => std::future::pending().await,
            Some(expires_at) => {
                while Instant::now() < *expires_at.lock().unwrap_or_else(PoisonError::into_inner) {
                    sleep(CHECK_EVERY).await;
                }
            }
        }
    }
}
