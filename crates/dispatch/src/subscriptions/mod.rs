//! Delivery of events to subscriptions. Each subscription is leased as a whole and served by a task of its own, so that
//! a slow endpoint delays no other; failing ones have permits of their own. Main types: [`SubscriptionDispatcher`], and
//! [`SubscriptionQueue`], the storage that it serves.

mod queue;
mod request;
mod serve;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use relay_domain::subscriptions::{
    call::PROBE_FAILURES,
    dispatch::{ClaimedHealth, SubscriptionClaim},
};
use relay_tasks::isolate;
use tokio::{sync::Semaphore, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use queue::{FailureRun, LeasedSubscription, QueuedEvents, SubscriptionQueue};

use crate::{QueueResult, destinations::Destinations};

/// Subscriptions served at once by one worker.
const PERMITS: u16 = 64;
/// Permits for failing subscriptions, in addition: a hanging endpoint occupies one for 10 s.
const FAILING_PERMITS: u16 = 16;
/// One tenant (a family of workspaces) may take a quarter of the permits of each kind.
const SHARES: u16 = 4;
/// A call takes 10 s at most and waits 2 s for its turn; the lease is renewed after each.
const LEASE: Duration = Duration::from_secs(15);
/// Interval at which workspaces with subscriptions to single deliveries are marked as watched. The mark lasts 10 min.
const WATCH_EVERY: Duration = Duration::from_secs(120);

/// Subscriptions that this worker serves.
pub struct SubscriptionDispatcher<Q> {
    queue: Arc<Q>,
    destinations: Arc<Destinations>,
    owner: String,
    permits: Arc<Semaphore>,
    failing_permits: Arc<Semaphore>,
    serving: TaskTracker,
    stop: CancellationToken,
    watched_at: Mutex<Option<Instant>>,
}

/// Result of one round.
#[derive(Debug, Clone, Copy)]
pub struct Round {
    /// Number of subscriptions that were claimed.
    pub claimed: u64,
    /// Time for which the oldest pending call had been due before.
    pub lag: Duration,
}

impl<Q: SubscriptionQueue> SubscriptionDispatcher<Q> {
    /// Creates a dispatcher that serves nothing yet.
    #[must_use]
    pub fn new(queue: Arc<Q>, destinations: Arc<Destinations>) -> Self {
        Self {
            queue,
            destinations,
            // A process id alone is the same in many containers.
            owner: format!("{}-{:08x}", std::process::id(), fastrand::u32(..)),
            permits: Arc::new(Semaphore::new(usize::from(PERMITS))),
            failing_permits: Arc::new(Semaphore::new(usize::from(FAILING_PERMITS))),
            serving: TaskTracker::new(),
            stop: CancellationToken::new(),
            watched_at: Mutex::default(),
        }
    }

    /// Claims due subscriptions, as many as there are free permits, and serves them.
    ///
    /// # Errors
    /// When storage is unavailable. Nothing is half done: call again.
    pub async fn serve_due(&self) -> QueueResult<Round> {
        self.watch().await?;
        let mut round = Round { claimed: 0, lag: self.queue.lag().await? };
        for (health, permits, all) in [
            (ClaimedHealth::Healthy, &self.permits, PERMITS),
            (ClaimedHealth::Failing, &self.failing_permits, FAILING_PERMITS),
        ] {
            // No more than there are permits: a claimed subscription without one would be idle until its lease expires.
            let free = i64::try_from(permits.available_permits()).unwrap_or(0);
            if free == 0 {
                continue;
            }
            let claim = SubscriptionClaim {
                owner: &self.owner,
                health,
                failing_from: PROBE_FAILURES,
                limit: free,
                per_family: i64::from(all / SHARES),
                lease: LEASE,
            };
            for leased in self.queue.claim(claim).await? {
                // Only this loop takes permits, and it counted them.
                let Ok(permit) = Arc::clone(permits).try_acquire_owned() else { break };
                round.claimed += 1;
                let (queue, destinations) = (Arc::clone(&self.queue), Arc::clone(&self.destinations));
                let stop = self.stop.clone();
                self.serving.spawn(async move {
                    // A panic ends the service of this subscription only, and the permit is free again.
                    isolate("subscription", serve::serve(&*queue, &destinations, leased, &stop)).await;
                    drop(permit);
                });
            }
        }
        Ok(round)
    }

    /// Lets calls in progress finish, and releases the subscriptions.
    pub async fn drain(&self) {
        self.stop.cancel();
        self.serving.close();
        self.serving.wait().await;
    }

    /// Has workspaces marked as watched, from time to time.
    async fn watch(&self) -> QueueResult<()> {
        let last = *self.watched_at.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|at| at.elapsed() < WATCH_EVERY) {
            return Ok(());
        }
        self.queue.watch_deliveries().await?;
        // Only after a success, so that the round after a failed one marks them again. The lock is not held over the
        // statement.
        *self.watched_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        Ok(())
    }
}
