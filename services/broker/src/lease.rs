//! [`Lease`]: an ephemeral broker ends when its owner stops renewing.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};

/// Time between two renewals at most.
const TERM: Duration = Duration::from_secs(120);

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
            Some(expires_at) => loop {
                let due = *expires_at.lock().unwrap_or_else(PoisonError::into_inner);
                if Instant::now() >= due {
                    return;
                }
                // A renewal during the sleep is seen after it, so that renewing has to wake nothing.
                sleep_until(due).await;
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{sleep, timeout};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_lease_ends_two_minutes_after_its_last_renewal() {
        let began = Instant::now();
        let lease = Lease::new(false);
        let renewals = async {
            sleep(Duration::from_secs(100)).await;
            assert_eq!(lease.renew(), 120);
            sleep(Duration::from_secs(119)).await;
            assert_eq!(lease.renew(), 120);
        };
        tokio::join!(lease.expired(), renewals);
        assert_eq!(began.elapsed().as_secs(), 100 + 119 + 120);
    }

    #[tokio::test(start_paused = true)]
    async fn a_persistent_broker_has_no_lease() {
        let lease = Lease::new(true);
        assert!(timeout(Duration::from_secs(24 * 60 * 60), lease.expired()).await.is_err());
        assert_eq!(lease.renew(), 0);
    }
}
