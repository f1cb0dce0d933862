//! Delivery of events to subscriptions. Each subscription is leased as a whole and served by a task of its own, so that
//! a slow endpoint delays no other; failing ones have slots of their own.

mod call;
mod serve;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use relay_domain::subscriptions::call::PROBE_FAILURES;
use relay_store::subscriptions::dispatch::{ClaimedHealth, SubscriptionClaim};
use relay_tasks::isolate;
use tokio::sync::Semaphore;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{Engine, EngineResult, tick::TickOutcome};

/// Subscriptions served at once by one worker.
const SLOTS: usize = 64;
/// Slots of failing subscriptions, in addition: a hanging endpoint occupies one for 10 s.
const FAILING_SLOTS: usize = 16;
/// Bound per workspace, so that one tenant cannot take all slots.
const MAX_PER_WORKSPACE: i64 = 16;
/// A call takes 10 s at most, and the lease is renewed after each.
const LEASE: Duration = Duration::from_secs(15);
/// Interval at which workspaces with subscriptions to single deliveries are marked as watched. The mark lasts 10 min.
const WATCH_EVERY: Duration = Duration::from_secs(120);
const WATCHED_AT_ONCE: i64 = 1000;

/// Subscriptions that this worker serves.
pub struct SubscriptionCalls {
    owner: String,
    slots: Arc<Semaphore>,
    failing_slots: Arc<Semaphore>,
    serving: TaskTracker,
    stop: CancellationToken,
    watched_at: Mutex<Option<Instant>>,
}

impl Default for SubscriptionCalls {
    fn default() -> Self {
        Self {
            owner: format!("{}-{:08x}", std::process::id(), fastrand::u32(..)),
            slots: Arc::new(Semaphore::new(SLOTS)),
            failing_slots: Arc::new(Semaphore::new(FAILING_SLOTS)),
            serving: TaskTracker::new(),
            stop: CancellationToken::new(),
            watched_at: Mutex::default(),
        }
    }
}

impl SubscriptionCalls {
    /// Claims due subscriptions, as many as there are free slots, and serves them.
    pub async fn serve_due(&self, engine: &Engine) -> EngineResult<TickOutcome> {
        self.watch(engine).await?;
        let lag = Duration::from_secs_f64(engine.store().subscription_lag().await?);
        let mut ticked = TickOutcome { lag: Some(lag), ..TickOutcome::default() };
        for (health, slots) in [(ClaimedHealth::Healthy, &self.slots), (ClaimedHealth::Failing, &self.failing_slots)] {
            let free = i64::try_from(slots.available_permits()).unwrap_or(0);
            if free == 0 {
                continue;
            }
            let claim = SubscriptionClaim {
                owner: &self.owner,
                health,
                failing_from: PROBE_FAILURES,
                limit: free,
                per_workspace: MAX_PER_WORKSPACE,
                lease: LEASE,
            };
            let claimed = engine.store().claim_subscriptions(claim).await?;
            for error in &claimed.corrupt {
                tracing::error!(error = error as &dyn std::error::Error, "a subscription is corrupt, skipping it");
            }
            for leased in claimed.leased {
                // Only this loop takes slots, and it counted them.
                let Ok(slot) = Arc::clone(slots).try_acquire_owned() else { break };
                ticked.worked += 1;
                let (engine, stop) = (engine.clone(), self.stop.clone());
                self.serving.spawn(async move {
                    isolate("subscription", serve::serve(&engine, leased, &stop)).await;
                    drop(slot);
                });
            }
        }
        Ok(ticked)
    }

    /// Lets calls in progress finish, and releases the subscriptions.
    pub async fn drain(&self) {
        self.stop.cancel();
        self.serving.close();
        self.serving.wait().await;
    }

    /// Marks workspaces as watched: events of single deliveries are recorded only there.
    async fn watch(&self, engine: &Engine) -> EngineResult<()> {
        let last = *self.watched_at.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|at| at.elapsed() < WATCH_EVERY) {
            return Ok(());
        }
        let mut after = None;
        loop {
            let scopes = engine.store().workspaces_with_delivery_subscriptions(after, WATCHED_AT_ONCE).await?;
            engine.watch_events(&scopes).await?;
            after = scopes.last().copied();
            if i64::try_from(scopes.len()).is_ok_and(|found| found < WATCHED_AT_ONCE) {
                break;
            }
        }
        *self.watched_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        Ok(())
    }
}
