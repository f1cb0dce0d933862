//! Rate limit account: one limit as this process spends it.

use std::{
    num::NonZeroU32,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use governor::{
    DefaultDirectRateLimiter, Quota, RateLimiter,
    clock::{Clock as _, DefaultClock},
};
use relay_domain::{
    WorkspaceScope, metric_names as name,
    workspaces::rate_limit::{self, Charge, Lease},
};
use relay_tasks::spawn_isolated;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};
use tokio::time::Instant;

use crate::{EngineResult, core::Core};

/// Longest wait of a request for units from storage.
const CHARGE_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause after storage was found unavailable, so that not every request asks it again.
const OUTAGE_BACKOFF: Duration = Duration::from_secs(1);

/// Outcome of charging a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChargeOutcome {
    Yes,
    /// `wait` is the time until the next attempt; without it, the end of the minute.
    No {
        wait: Option<Duration>,
    },
    /// Storage is unavailable, so the remaining units are unknown.
    Unknown,
}

/// Rate limit of a workspace, or one caller's share of it.
pub(super) struct Account {
    scope: WorkspaceScope,
    name: String,
    state: Mutex<AccountState>,
    /// Serializes acquisitions. Holds the time when storage was last found unavailable.
    turn: Arc<AsyncMutex<Option<Instant>>>,
}

struct AccountState {
    lease: Lease,
    limit_units: u32,
    /// Pace of one caller. A workspace as a whole has none.
    pace_limiter: Option<DefaultDirectRateLimiter>,
}

impl Account {
    pub(super) fn new(scope: WorkspaceScope, name: String, limit_units: u32, minute: i64, paced: bool) -> Self {
        let pace_limiter = paced.then(|| pace_limiter(limit_units));
        let state = Mutex::new(AccountState { lease: Lease::new(limit_units, minute), limit_units, pace_limiter });
        Self { scope, name, state, turn: Arc::default() }
    }

    /// Charges `cost` of a limit of `limit_units` per minute. Waits for storage only when a batch was used up before
    /// the next one arrived.
    pub(super) async fn spend(self: &Arc<Self>, core: &Core, limit_units: u32, cost: u32) -> ChargeOutcome {
        // First, because it needs no storage: a caller beyond its pace takes no units.
        if let Some(wait) = self.pace_delay(limit_units, cost) {
            return ChargeOutcome::No { wait: Some(wait) };
        }
        let paid = async {
            loop {
                match self.charge(core, limit_units, cost) {
                    Charge::Accepted => return ChargeOutcome::Yes,
                    Charge::Exhausted => return ChargeOutcome::No { wait: None },
                    Charge::AcquireFirst => {}
                }
                // Owned, because it moves into the task of a refill.
                let turn = Arc::clone(&self.turn).lock_owned().await;
                let has_failed = turn.is_some_and(|failed_at| failed_at.elapsed() < OUTAGE_BACKOFF);
                // Another request may have acquired units during the wait, or failed to, which extends the lease.
                match self.charge(core, limit_units, cost) {
                    Charge::Accepted => return ChargeOutcome::Yes,
                    Charge::Exhausted => return ChargeOutcome::No { wait: None },
                    Charge::AcquireFirst if has_failed => return ChargeOutcome::Unknown,
                    // The task holds the turn until it has the units, so the next round waits for them above.
                    Charge::AcquireFirst => self.refill_in_background(core, turn),
                }
            }
        };
        // The refill is a task of its own and goes on: a later request finds its units.
        tokio::time::timeout(CHARGE_TIMEOUT, paid).await.unwrap_or(ChargeOutcome::Unknown)
    }

    pub(super) fn refund(&self, cost: u32) {
        self.state().lease.refund(cost);
    }

    /// Units left in this minute.
    pub(super) fn remaining(&self) -> u32 {
        self.state().lease.remaining()
    }

    /// Returns the delay of a caller that exceeds its pace.
    fn pace_delay(&self, limit_units: u32, cost: u32) -> Option<Duration> {
        let mut state = self.state();
        if state.limit_units != limit_units {
            state.limit_units = limit_units;
            state.pace_limiter = state.pace_limiter.is_some().then(|| pace_limiter(limit_units));
        }
        let limiter = state.pace_limiter.as_ref()?;
        match limiter.check_n(NonZeroU32::new(cost)?) {
            Ok(Ok(())) => None,
            Ok(Err(not_yet)) => Some(not_yet.wait_time_from(DefaultClock::default().now())),
            // Possible only if a request cost more than a burst, which `rate_limit::caller_burst` rules out.
            Err(_) => Some(Duration::from_secs(rate_limit::WINDOW_SECONDS.unsigned_abs())),
        }
    }

    fn charge(self: &Arc<Self>, core: &Core, limit_units: u32, cost: u32) -> Charge {
        let (charged, wants_more) = {
            let mut state = self.state();
            state.lease.roll_window(limit_units, self.minute(core));
            (state.lease.charge(cost), state.lease.units_to_acquire() > 0)
        };
        if charged == Charge::Accepted
            && wants_more
            // Taken: a refill is under way, or a request is deciding whether to begin one.
            && let Ok(turn) = Arc::clone(&self.turn).try_lock_owned()
            && turn.is_none_or(|failed_at| failed_at.elapsed() >= OUTAGE_BACKOFF)
        {
            self.refill_in_background(core, turn);
        }
        charged
    }

    /// Acquires the next batch in the background; the lock is released afterwards.
    fn refill_in_background(self: &Arc<Self>, core: &Core, mut turn: OwnedMutexGuard<Option<Instant>>) {
        // A task of its own: a cancelled request would lose units that the row has granted.
        let (account, core) = (Arc::clone(self), core.clone());
        spawn_isolated("request", async move {
            let outcome = account.refill(&core).await;
            *turn = outcome.is_err().then(Instant::now);
            if let Err(error) = outcome {
                tracing::debug!(error = &error as &dyn std::error::Error, "failed to acquire rate limit units");
                account.state().lease.on_storage_unavailable();
            }
        });
    }

    async fn refill(&self, core: &Core) -> EngineResult<()> {
        let minute = self.minute(core);
        let (limit_units, wanted) = {
            let mut state = self.state();
            let limit_units = state.limit_units;
            state.lease.roll_window(limit_units, minute);
            (limit_units, state.lease.next_batch_units())
        };
        // Without the lock, so that others go on charging. If the minute ends meanwhile, the answer is dropped.
        let grant = core.store.acquire_rate_limit_units(self.scope, &self.name, minute, limit_units, wanted).await?;
        metrics::counter!(name::RATE_LIMIT_ACQUISITIONS).increment(1);
        self.state().lease.record_acquired(minute, wanted, grant.granted, grant.acquired_by_all);
        Ok(())
    }

    fn minute(&self, core: &Core) -> i64 {
        rate_limit::window_at(self.scope.workspace_id().get(), core.now().timestamp()).0
    }

    fn state(&self) -> MutexGuard<'_, AccountState> {
        // Numbers only: after a panic they are usable, and no request may fail because of them.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Creates the pace of one caller: its share evenly over the minute, half of it as a burst.
fn pace_limiter(limit_units: u32) -> DefaultDirectRateLimiter {
    // A share of less than one unit still admits one.
    let units = |units: u32| NonZeroU32::new(units).unwrap_or(NonZeroU32::MIN);
    RateLimiter::direct(Quota::per_minute(units(limit_units)).allow_burst(units(rate_limit::caller_burst(limit_units))))
}
