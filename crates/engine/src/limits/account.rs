//! One budget as this process spends it.

use std::{
    num::NonZeroU32,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use governor::{
    DefaultDirectRateLimiter, Quota, RateLimiter,
    clock::{Clock as _, DefaultClock},
};
use relay_domain::{
    WorkspaceScope, metric_names as name,
    rate::{self, Charge, Lease},
};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use crate::{Engine, EngineResult};

/// A request waits this long for units to be taken, then storage counts as away.
const WAIT: Duration = Duration::from_secs(1);
/// A storage that was found away is not asked again by everybody.
const AWAY_FOR: Duration = Duration::from_secs(1);

/// Whether a request was paid for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spent {
    Yes,
    /// `wait` tells when to come back; without it that is the end of the minute.
    No {
        wait: Option<Duration>,
    },
    /// Nobody knows: storage does not say how much is left.
    Unknown,
}

/// A workspace's budget, or one caller's part of it.
pub(super) struct Account {
    scope: WorkspaceScope,
    name: String,
    spending: Mutex<Spending>,
    /// One taking at a time. Holds when storage was last found away.
    turn: Arc<AsyncMutex<Option<Instant>>>,
}

struct Spending {
    lease: Lease,
    budget: u32,
    /// How fast one caller may spend. A workspace as a whole may spend as fast as it likes.
    pace: Option<DefaultDirectRateLimiter>,
}

impl Account {
    pub(super) fn new(scope: WorkspaceScope, name: String, budget: u32, minute: i64, paced: bool) -> Self {
        let pace = paced.then(|| pace(budget));
        let spending = Mutex::new(Spending { lease: Lease::new(budget, minute), budget, pace });
        Self { scope, name, spending, turn: Arc::default() }
    }

    /// Pays `cost` of `budget` units a minute. Waits for storage only when a batch was used up faster than
    /// the next one came.
    pub(super) async fn spend(self: &Arc<Self>, engine: &Engine, budget: u32, cost: u32) -> Spent {
        if let Some(wait) = self.too_fast(budget, cost) {
            return Spent::No { wait: Some(wait) };
        }
        let paid = async {
            loop {
                match self.charge(engine, budget, cost) {
                    Charge::Paid => return Spent::Yes,
                    Charge::UsedUp => return Spent::No { wait: None },
                    Charge::TakeFirst => {}
                }
                let turn = Arc::clone(&self.turn).lock_owned().await;
                if turn.is_some_and(|away| away.elapsed() < AWAY_FOR) {
                    return Spent::Unknown;
                }
                // Somebody else may have taken meanwhile.
                match self.charge(engine, budget, cost) {
                    Charge::Paid => return Spent::Yes,
                    Charge::UsedUp => return Spent::No { wait: None },
                    Charge::TakeFirst => self.take(engine, turn),
                }
            }
        };
        tokio::time::timeout(WAIT, paid).await.unwrap_or(Spent::Unknown)
    }

    /// Gives back what was paid.
    pub(super) fn refund(&self, cost: u32) {
        self.spending().lease.refund(cost);
    }

    /// Units that may still be spent in this minute.
    pub(super) fn remaining(&self) -> u32 {
        self.spending().lease.remaining()
    }

    /// How long to wait when the caller spends faster than its pace.
    fn too_fast(&self, budget: u32, cost: u32) -> Option<Duration> {
        let mut spending = self.spending();
        if spending.budget != budget {
            spending.budget = budget;
            spending.pace = spending.pace.is_some().then(|| pace(budget));
        }
        let limiter = spending.pace.as_ref()?;
        match limiter.check_n(NonZeroU32::new(cost)?) {
            Ok(Ok(())) => None,
            Ok(Err(not_yet)) => Some(not_yet.wait_time_from(DefaultClock::default().now())),
            // Only if a request cost more than a burst, which `rate::burst_of_one` rules out.
            Err(_) => Some(Duration::from_secs(rate::WINDOW_SECONDS.unsigned_abs())),
        }
    }

    fn charge(self: &Arc<Self>, engine: &Engine, budget: u32, cost: u32) -> Charge {
        let (charged, wants_more) = {
            let mut spending = self.spending();
            spending.lease.turn(budget, self.minute(engine));
            (spending.lease.charge(cost), spending.lease.wanted() > 0)
        };
        if charged == Charge::Paid
            && wants_more
            && let Ok(turn) = Arc::clone(&self.turn).try_lock_owned()
            && turn.is_none_or(|away| away.elapsed() >= AWAY_FOR)
        {
            self.take(engine, turn);
        }
        charged
    }

    /// Takes the next batch in the background; the turn ends with it.
    fn take(self: &Arc<Self>, engine: &Engine, mut turn: OwnedMutexGuard<Option<Instant>>) {
        let (account, engine) = (Arc::clone(self), engine.clone());
        tokio::spawn(async move {
            let outcome = account.take_now(&engine).await;
            *turn = outcome.is_err().then(Instant::now);
            if let Err(error) = outcome {
                tracing::debug!(error = &error as &dyn std::error::Error, "a request budget goes on without storage");
                account.spending().lease.storage_is_away();
            }
        });
    }

    async fn take_now(&self, engine: &Engine) -> EngineResult<()> {
        let minute = self.minute(engine);
        let (budget, wanted) = {
            let mut spending = self.spending();
            let budget = spending.budget;
            spending.lease.turn(budget, minute);
            (budget, spending.lease.next_batch())
        };
        let taken = engine.store().take_of_budget(self.scope, &self.name, minute, budget, wanted).await?;
        metrics::counter!(name::BUDGET_TAKINGS).increment(1);
        self.spending().lease.took(minute, wanted, taken.got, taken.by_all);
        Ok(())
    }

    fn minute(&self, engine: &Engine) -> i64 {
        rate::window(self.scope.workspace_id().get(), engine.now().timestamp()).0
    }

    fn spending(&self) -> MutexGuard<'_, Spending> {
        self.spending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One caller's pace: its part of the budget evenly over the minute, half of it at once.
fn pace(budget: u32) -> DefaultDirectRateLimiter {
    let units = |units: u32| NonZeroU32::new(units).unwrap_or(NonZeroU32::MIN);
    RateLimiter::direct(Quota::per_minute(units(budget)).allow_burst(units(rate::burst_of_one(budget))))
}
