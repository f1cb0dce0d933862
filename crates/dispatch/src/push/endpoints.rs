//! Endpoints of http_push nodes: their settings, limits and health.
//!
//! Each has its own permits, rate and breaker, so that a hanging one delays no other. A tenant (a family of workspaces)
//! may take an eighth of all permits. The permits and the rate of an endpoint are for all workers: each has an equal
//! share.

use std::{
    num::NonZeroU32,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use chrono::{DateTime, Utc};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use relay_domain::{
    NodeId, WorkspaceScope,
    push::{
        ATTEMPT_TIMEOUT, AckMode, PushOrdering, RetryPolicy,
        endpoint::{EndpointHealth, EndpointReport},
        settings::{EndpointAuth, EndpointSecrets, EndpointSettings},
    },
    workspaces::family::FamilyId,
};
use relay_egress::{Refusal, Target};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{PushConfig, config::share_per_worker, queue::PushQueue};
use crate::{QueueResult, call, destinations::Destinations};

/// Settings and health are read again after this long; hints are faster.
const SETTINGS_TTL: Duration = Duration::from_secs(5);
/// Permits and rates of unused endpoints are dropped after this long.
const STATE_IDLE: Duration = Duration::from_secs(600);
const MAX_REMEMBERED: u64 = 100_000;
/// Interval at which a wait for permits checks for crowding.
const CROWDED_CHECK_EVERY: Duration = Duration::from_secs(2);
/// Pause of a wait that was abandoned: longer than an idle mailbox is kept.
const RETRY_CROWDED: chrono::Duration = chrono::Duration::seconds(3);
/// Pause while another worker probes the endpoint.
const RETRY_PROBED: chrono::Duration = chrono::Duration::seconds(2);

type Key = (WorkspaceScope, NodeId);

/// Endpoint with its call settings.
pub(super) struct Endpoint {
    pub(super) scope: WorkspaceScope,
    pub(super) node_id: NodeId,
    /// Tenant that its calls count for.
    pub(super) family: FamilyId,
    /// Original URL, for the proxy's header.
    pub(super) url: String,
    /// Host of that URL, also if the calls go through a proxy. `None` for one that is refused.
    host: Option<String>,
    /// Target of its calls. Its addresses are checked at each of them.
    pub(super) route: Route,
    pub(super) ack_mode: AckMode,
    pub(super) ordering: PushOrdering,
    pub(super) retry: RetryPolicy,
    pub(super) auth: EndpointAuth,
    pub(super) secrets: EndpointSecrets,
    state: Arc<EndpointState>,
    family_permits: Arc<Semaphore>,
}

/// Target of an endpoint's calls. The static part of its URL was checked; that check depends only on settings that stay
/// the same while a worker runs.
pub(super) enum Route {
    Straight(Target),
    /// Operator's proxy, with its credentials.
    ByProxy(Target, Option<String>),
    NoProxy,
    Refused(Refusal),
}

impl Endpoint {
    fn health(&self) -> EndpointHealth {
        *self.state.health.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// State that outlives a reload of the settings.
struct EndpointState {
    permits: Arc<Semaphore>,
    rate: DefaultDirectRateLimiter,
    health: Mutex<EndpointHealth>,
}

/// Permit for one call.
pub(super) struct CallPermit {
    _permits: [OwnedSemaphorePermit; 3],
}

/// Cache of endpoints and their limits.
pub(super) struct Endpoints {
    storage: Arc<dyn PushQueue>,
    known: moka::sync::Cache<Key, Arc<Endpoint>>,
    /// Counts node changes: settings read before a change are not cached.
    changes: AtomicU64,
    /// Number of live workers, including this one.
    workers: AtomicUsize,
    /// Keyed by the number of workers that share an endpoint: when it changes, calls in progress keep their permits.
    states: moka::sync::Cache<(Key, usize), Arc<EndpointState>>,
    families: moka::sync::Cache<FamilyId, Arc<Semaphore>>,
    all: Arc<Semaphore>,
    destinations: Arc<Destinations>,
    endpoint_concurrency: usize,
    family_concurrency: usize,
    rate: Quota,
    proxy: Option<(String, Option<String>)>,
}

impl Endpoints {
    pub(super) fn new(storage: Arc<dyn PushQueue>, config: &PushConfig, destinations: Arc<Destinations>) -> Self {
        let concurrency = config.concurrency.max(1) as usize;
        let endpoint_concurrency = config.endpoint_concurrency.max(1) as usize;
        Self {
            storage,
            known: moka::sync::Cache::builder().max_capacity(MAX_REMEMBERED).time_to_live(SETTINGS_TTL).build(),
            changes: AtomicU64::new(0),
            workers: AtomicUsize::new(1),
            states: moka::sync::Cache::builder().max_capacity(MAX_REMEMBERED).time_to_idle(STATE_IDLE).build(),
            families: moka::sync::Cache::builder().max_capacity(MAX_REMEMBERED).time_to_idle(STATE_IDLE).build(),
            all: Arc::new(Semaphore::new(concurrency)),
            destinations,
            endpoint_concurrency,
            family_concurrency: family_share(concurrency, endpoint_concurrency),
            rate: Quota::per_second(NonZeroU32::new(config.endpoint_rate).unwrap_or(NonZeroU32::MIN)),
            proxy: config.proxy_url.clone().map(|url| (url, config.proxy_auth.clone())),
        }
    }

    /// Returns the endpoint of a node; `None` when the node is deleted or is no http_push node.
    pub(super) async fn get(&self, scope: WorkspaceScope, node: &NodeId) -> QueueResult<Option<Arc<Endpoint>>> {
        let key = (scope, node.clone());
        if let Some(known) = self.known.get(&key) {
            return Ok(Some(known));
        }
        // Before the read: a change after this load makes the entry invalid.
        let changes = self.changes.load(Relaxed);
        let Some(row) = self.storage.endpoint(scope, node).await? else { return Ok(None) };
        let (family, settings, secrets) = (row.family, row.settings, row.secrets);
        let workers = self.workers.load(Relaxed);
        let state = self.states.get_with((key.clone(), workers), || {
            Arc::new(EndpointState {
                permits: Arc::new(Semaphore::new(share_per_worker(self.endpoint_concurrency, workers))),
                rate: RateLimiter::direct(self.rate_per_worker(workers)),
                health: Mutex::default(),
            })
        });
        // A report of this worker may have been faster than the read, and is overwritten. The next read corrects it.
        *state.health.lock().unwrap_or_else(PoisonError::into_inner) = row.health;
        let (host, route) = self.route(&settings);
        let family_permits = self.families.get_with(family, || Arc::new(Semaphore::new(self.family_concurrency)));
        let endpoint = Arc::new(Endpoint {
            scope,
            family,
            host,
            route,
            node_id: node.clone(),
            ack_mode: settings.ack_mode,
            ordering: settings.ordering,
            retry: settings.retry_policy(),
            url: settings.url,
            auth: settings.auth,
            secrets,
            state,
            family_permits,
        });
        self.known.insert(key.clone(), Arc::clone(&endpoint));
        // The node may have changed between the read and the insert.
        if self.changes.load(Relaxed) != changes {
            self.known.invalidate(&key);
        }
        Ok(Some(endpoint))
    }

    /// Returns the host of an endpoint, and the target of its calls.
    fn route(&self, settings: &EndpointSettings) -> (Option<String>, Route) {
        let policy = self.storage.client().policy();
        // The proxy resolves the name; the static part of the URL is checked here all the same.
        let target = match policy.check_url(&settings.url) {
            Ok(target) => target,
            // Kept as the route: each attempt then fails with the refusal, which the log of attempts shows.
            Err(refusal) => return (None, Route::Refused(refusal)),
        };
        let host = Some(target.host().to_owned());
        if !settings.use_proxy {
            return (host, Route::Straight(target));
        }
        let route = match self.proxy.as_ref().map(|(proxy, auth)| (policy.trust_url(proxy), auth)) {
            Some((Ok(proxy), auth)) => Route::ByProxy(proxy, auth.clone()),
            Some((Err(refusal), _)) => Route::Refused(refusal),
            None => Route::NoProxy,
        };
        (host, route)
    }

    /// Drops the settings of a changed node.
    pub(super) fn forget(&self, scope: WorkspaceScope, node: &NodeId) {
        // The counter first: a read in progress that inserts the former settings afterwards removes them again.
        self.changes.fetch_add(1, Relaxed);
        self.known.invalidate(&(scope, node.clone()));
    }

    /// Sets the number of live workers. Cached endpoints follow within seconds.
    pub(super) fn set_worker_count(&self, workers: usize) {
        self.workers.store(workers, Relaxed);
        self.destinations.set_worker_count(workers);
    }

    fn rate_per_worker(&self, workers: usize) -> Quota {
        // A quota per second has a burst of as many calls, so the burst is the configured rate.
        let each = share_per_worker(self.rate.burst_size().get() as usize, workers);
        Quota::per_second(u32::try_from(each).ok().and_then(NonZeroU32::new).unwrap_or(NonZeroU32::MIN))
    }

    /// Concurrent calls to one endpoint from this worker.
    pub(super) fn endpoint_concurrency(&self) -> usize {
        share_per_worker(self.endpoint_concurrency, self.workers.load(Relaxed))
    }

    /// Waits for a permit to send a body of about `bytes`; long waits only while there is room. The inner error is the
    /// time before which the endpoint is not to be called.
    pub(super) async fn acquire_permit(
        &self,
        endpoint: &Endpoint,
        bytes: usize,
        is_crowded: impl Fn() -> bool + Sync,
    ) -> QueueResult<Result<CallPermit, DateTime<Utc>>> {
        let state = &endpoint.state;
        let crowded_out = || Ok(Err(self.storage.now() + RETRY_CROWDED));
        // Its own permit first: a wait for a slow endpoint holds nothing that others need.
        let Some(own) = wait_for_permit(&state.permits, CROWDED_CHECK_EVERY, &is_crowded).await else {
            return crowded_out();
        };
        if let Some(until) = endpoint.health().closed_until(self.storage.now()) {
            return Ok(Err(until));
        }
        state.rate.until_ready().await;
        // An endpoint without a host is refused when it is called: no call leaves, so it needs no turn.
        if let Some(host) = &endpoint.host
            && let Err(pause) = self.destinations.wait_for_turn(endpoint.family, host, bytes).await
        {
            return Ok(Err(call::instant_after(self.storage.now(), pause)));
        }
        // The permits that others share come last, and those of all tenants at the very end: a tenant at its limit
        // waits without holding any of them.
        let Some(family_permit) = wait_for_permit(&endpoint.family_permits, CROWDED_CHECK_EVERY, &is_crowded).await
        else {
            return crowded_out();
        };
        let pass = CallPermit { _permits: [own, family_permit, acquire_permit(&self.all).await] };
        // Last: the probe of an open breaker must be made by the worker that claims it.
        Ok(self.check_breaker(endpoint).await?.map_or(Ok(pass), Err))
    }

    /// Takes a permit without waiting; `None` when there is none, or the endpoint is paused.
    pub(super) async fn try_acquire_permit(&self, endpoint: &Endpoint) -> Option<CallPermit> {
        let at_once = |permits: &Arc<Semaphore>| Arc::clone(permits).try_acquire_owned().ok();
        let state = &endpoint.state;
        let permits = [at_once(&state.permits)?, at_once(&endpoint.family_permits)?, at_once(&self.all)?];
        // After the permits: a check that succeeds uses the rate even if no call follows.
        state.rate.check().ok()?;
        if let Some(host) = &endpoint.host {
            // Events without a delivery are small.
            self.destinations.reserve(endpoint.family, host, 0, Duration::ZERO).ok()?;
        }
        let shut = self.check_breaker(endpoint).await.ok()?;
        shut.is_none().then_some(CallPermit { _permits: permits })
    }

    /// Returns the end of the pause; `None` when a call is allowed. For an open breaker, one worker gets to probe.
    async fn check_breaker(&self, endpoint: &Endpoint) -> QueueResult<Option<DateTime<Utc>>> {
        let now = self.storage.now();
        if let Some(until) = endpoint.health().closed_until(now) {
            return Ok(Some(until));
        }
        if !endpoint.health().needs_probe() {
            return Ok(None);
        }
        // Longer than an attempt, so that the probe has been recorded before another worker may claim one.
        let ttl = ATTEMPT_TIMEOUT + Duration::from_secs(5);
        if self.storage.claim_probe(endpoint.scope, &endpoint.node_id, ttl).await? {
            return Ok(None);
        }
        // The other worker's probe writes its result to the row, so the next attempt reads the row instead of the
        // cached health.
        self.forget(endpoint.scope, &endpoint.node_id);
        Ok(Some(now + RETRY_PROBED))
    }

    /// Records a success, a failure that counts against the endpoint, or a requested pause.
    pub(super) async fn record_result(
        &self,
        endpoint: &Endpoint,
        is_success: bool,
        is_failure: bool,
        paused_until: Option<DateTime<Utc>>,
    ) {
        let before = endpoint.health();
        let recovered = is_success && (before.failures > 0 || before.open_until.is_some());
        // The usual success changes nothing and costs no statement.
        if !recovered && !is_failure && paused_until.is_none() {
            return;
        }
        let report = EndpointReport {
            scope: endpoint.scope,
            node_id: endpoint.node_id.clone(),
            failures: i32::from(is_failure),
            succeeded: is_success,
            paused_until,
        };
        match self.storage.report(&report).await {
            Ok(health) => *endpoint.state.health.lock().unwrap_or_else(PoisonError::into_inner) = health,
            // The next attempt records again.
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "failed to record the health of an endpoint")
            }
        }
    }
}

/// Share of a family in all permits: an eighth, or as much as one endpoint may have; never more than half.
fn family_share(concurrency: usize, endpoint_concurrency: usize) -> usize {
    (concurrency / 8).max(endpoint_concurrency.min(concurrency / 2)).max(1)
}

/// Waits for a permit; `None` when it takes long and other mailboxes need the room of the waiting one.
async fn wait_for_permit(
    permits: &Arc<Semaphore>,
    check_every: Duration,
    is_crowded: &(impl Fn() -> bool + Sync),
) -> Option<OwnedSemaphorePermit> {
    if let Ok(permit) = Arc::clone(permits).try_acquire_owned() {
        return Some(permit);
    }
    let mut permit = std::pin::pin!(acquire_permit(permits));
    loop {
        match tokio::time::timeout(check_every, &mut permit).await {
            Ok(permit) => return Some(permit),
            Err(_) if is_crowded() => return None,
            Err(_) => {}
        }
    }
}

async fn acquire_permit(semaphore: &Arc<Semaphore>) -> OwnedSemaphorePermit {
    match Arc::clone(semaphore).acquire_owned().await {
        Ok(permit) => permit,
        // These semaphores are never closed.
        Err(_) => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn family_share_is_an_eighth_with_room_for_one_endpoint() {
        for (concurrency, endpoint_concurrency, expected) in
            [(1024, 16, 128), (1024, 200, 200), (1024, 1024, 512), (64, 16, 16), (16, 2, 2), (16, 16, 8), (1, 16, 1)]
        {
            assert_eq!(
                family_share(concurrency, endpoint_concurrency),
                expected,
                "{concurrency} {endpoint_concurrency}"
            );
        }
    }

    #[tokio::test]
    async fn slot_waits_are_abandoned_only_when_crowded() {
        const CHECK_EVERY: Duration = Duration::from_millis(1);
        let permits = Arc::new(Semaphore::new(1));
        let taken = Mutex::new(Some(acquire_permit(&permits).await));
        assert!(wait_for_permit(&permits, CHECK_EVERY, &|| true).await.is_none());
        let checks = AtomicUsize::new(0);
        let free_at_the_tenth_check = || {
            if checks.fetch_add(1, Relaxed) == 9 {
                taken.lock().unwrap().take();
            }
            false
        };
        assert!(wait_for_permit(&permits, CHECK_EVERY, &free_at_the_tenth_check).await.is_some(), "it kept its turn");
        assert!(wait_for_permit(&permits, CHECK_EVERY, &|| true).await.is_some(), "there is no wait");
    }
}
