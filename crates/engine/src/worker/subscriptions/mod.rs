//! Event subscriptions: which of them are served by this worker. Each is leased as a whole and served by a task of
//! its own, so that a slow address holds up nobody else; those that fail have places of their own.

mod call;
mod serve;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use relay_domain::subscription_call::PROBED_FROM;
use tokio::sync::Semaphore;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::Ticked;
use crate::{Engine, EngineResult};

/// Subscriptions served at once by one worker.
const PLACES: usize = 64;
/// Those of them that fail, besides: an address that hangs keeps a place for 10 s.
const PLACES_OF_FAILING: usize = 16;
/// Of one workspace, so that one tenant's addresses cannot take all places.
const OF_ONE_WORKSPACE: i64 = 16;
/// A call takes 10 s at most, and the lease is renewed after each.
const LEASE: Duration = Duration::from_secs(15);
/// How often workspaces are marked whose subscriptions want to hear of single deliveries. The mark holds 10 min.
const WATCH_EVERY: Duration = Duration::from_secs(120);
/// Workspaces marked by one statement.
const WATCHED_AT_ONCE: i64 = 1000;

/// What a worker remembers of the subscriptions that it serves.
pub(super) struct Subscriptions {
    owner: String,
    places: Arc<Semaphore>,
    places_of_failing: Arc<Semaphore>,
    serving: TaskTracker,
    stop: CancellationToken,
    watched_at: Mutex<Option<Instant>>,
}

impl Subscriptions {
    pub(super) fn new() -> Self {
        Self {
            owner: format!("{}-{:08x}", std::process::id(), fastrand::u32(..)),
            places: Arc::new(Semaphore::new(PLACES)),
            places_of_failing: Arc::new(Semaphore::new(PLACES_OF_FAILING)),
            serving: TaskTracker::new(),
            stop: CancellationToken::new(),
            watched_at: Mutex::default(),
        }
    }

    /// Takes subscriptions with something to do, as many as there are places for, and serves them.
    pub(super) async fn tick(&self, engine: &Engine) -> EngineResult<Ticked> {
        self.watch(engine).await?;
        let lag = Duration::from_secs_f64(engine.store().subscription_lag().await?);
        let mut ticked = Ticked { lag: Some(lag), ..Ticked::default() };
        for (failing, places) in [(false, &self.places), (true, &self.places_of_failing)] {
            let free = i64::try_from(places.available_permits()).unwrap_or(0);
            if free == 0 {
                continue;
            }
            let claim =
                engine.store().claim_subscriptions(&self.owner, failing, PROBED_FROM, free, OF_ONE_WORKSPACE, LEASE);
            for leased in claim.await? {
                // Only this loop takes places, and it counted them.
                let Ok(place) = Arc::clone(places).try_acquire_owned() else { break };
                ticked.worked += 1;
                let (engine, stop) = (engine.clone(), self.stop.clone());
                self.serving.spawn(async move {
                    serve::serve(&engine, leased, &stop).await;
                    drop(place);
                });
            }
        }
        Ok(ticked)
    }

    /// Lets calls under way end, and gives the subscriptions back.
    pub(super) async fn drain(&self) {
        self.stop.cancel();
        self.serving.close();
        self.serving.wait().await;
    }

    /// Single deliveries make events only where somebody looks.
    async fn watch(&self, engine: &Engine) -> EngineResult<()> {
        let last = *self.watched_at.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|at| at.elapsed() < WATCH_EVERY) {
            return Ok(());
        }
        let mut after = None;
        loop {
            let scopes = engine.store().workspaces_to_watch(after, WATCHED_AT_ONCE).await?;
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
