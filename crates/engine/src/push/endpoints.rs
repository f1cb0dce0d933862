//! The endpoints of nodes: how they are called, and whether they may be called now.
//!
//! Each has its own slots, its own rate and its own breaker, so that one that hangs holds up nobody else. A workspace
//! takes an eighth of all slots. Slots and rate of an endpoint are for all workers: each has an equal share.

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
    push::{ATTEMPT_TIMEOUT, AckMode, BREAKER_FAILURES, BREAKER_OPEN, Ordering, RetryPolicy},
};
use relay_egress::{Refusal, Target};
use relay_store::push_endpoints::{EndpointHealth, EndpointNews};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    PushConfig,
    config::of_each,
    delivery::{DeliverySecrets, NodeAuth, NodeDelivery},
};
use crate::{Engine, EngineResult};

/// Settings and health are read again after this long; hints are faster.
const KNOWN_FOR: Duration = Duration::from_secs(5);
/// Slots and rates of endpoints that nobody uses are forgotten after this long.
const STATE_IDLE: Duration = Duration::from_secs(600);
/// Endpoints that are remembered.
const REMEMBERED: u64 = 100_000;
/// How long a wait for slots lasts until it is asked whether there is room to wait.
const WAIT: Duration = Duration::from_secs(2);
/// A turn that was given back comes again then: past the time for which a mailbox is kept idle.
const GIVEN_BACK: chrono::Duration = chrono::Duration::seconds(3);
/// Another worker probes: ask again then.
const PROBED_ELSEWHERE: chrono::Duration = chrono::Duration::seconds(2);

type Key = (WorkspaceScope, NodeId);

/// How an endpoint is called.
pub(super) struct Endpoint {
    pub(super) scope: WorkspaceScope,
    pub(super) node_id: NodeId,
    /// As it was given, for the proxy's eyes.
    pub(super) url: String,
    /// Where its calls go. Its addresses are judged at each of them.
    pub(super) way: Way,
    pub(super) ack_mode: AckMode,
    pub(super) ordering: Ordering,
    pub(super) retry: RetryPolicy,
    pub(super) auth: NodeAuth,
    pub(super) secrets: DeliverySecrets,
    state: Arc<State>,
    /// The slots of its workspace.
    workspace: Arc<Semaphore>,
}

/// Where the calls of an endpoint go. What can be seen of its URL was judged; the judgement rests on nothing that
/// changes while a worker runs.
pub(super) enum Way {
    Straight(Target),
    /// To the operator's proxy, with what is shown to it.
    ByProxy(Target, Option<String>),
    NoProxy,
    Refused(Refusal),
}

impl Endpoint {
    fn health(&self) -> EndpointHealth {
        *self.state.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until when nobody may call it; `None` when somebody may, be it as the one try after an open breaker.
    fn closed_until(&self, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let health = self.health();
        let open = health.open_until.filter(|_| health.failures >= BREAKER_FAILURES);
        [health.paused_until, open].into_iter().flatten().find(|until| *until > now)
    }
}

/// What outlives its settings.
struct State {
    slots: Arc<Semaphore>,
    rate: DefaultDirectRateLimiter,
    health: Mutex<EndpointHealth>,
}

/// The right to call an endpoint once.
pub(super) struct Pass {
    _slots: [OwnedSemaphorePermit; 3],
}

/// All endpoints that this worker knows.
pub(super) struct Endpoints {
    engine: Engine,
    known: moka::sync::Cache<Key, Arc<Endpoint>>,
    /// Rises when a node has changed: what was read before that is not kept.
    changes: AtomicU64,
    /// The workers that live, this one included.
    workers: AtomicUsize,
    /// By how many workers share an endpoint: when that changes, calls under way keep the slots that they have.
    states: moka::sync::Cache<(Key, usize), Arc<State>>,
    workspaces: moka::sync::Cache<WorkspaceScope, Arc<Semaphore>>,
    all: Arc<Semaphore>,
    of_one: usize,
    of_workspace: usize,
    rate: Quota,
    proxy: Option<(String, Option<String>)>,
}

impl Endpoints {
    pub(super) fn new(engine: Engine, config: &PushConfig) -> Self {
        let concurrency = config.concurrency.max(1) as usize;
        let of_one = config.endpoint_concurrency.max(1) as usize;
        Self {
            engine,
            known: moka::sync::Cache::builder().max_capacity(REMEMBERED).time_to_live(KNOWN_FOR).build(),
            changes: AtomicU64::new(0),
            workers: AtomicUsize::new(1),
            states: moka::sync::Cache::builder().max_capacity(REMEMBERED).time_to_idle(STATE_IDLE).build(),
            workspaces: moka::sync::Cache::builder().max_capacity(REMEMBERED).time_to_idle(STATE_IDLE).build(),
            all: Arc::new(Semaphore::new(concurrency)),
            of_one,
            of_workspace: share(concurrency, of_one),
            rate: Quota::per_second(NonZeroU32::new(config.endpoint_rate).unwrap_or(NonZeroU32::MIN)),
            proxy: config.proxy_url.clone().map(|url| (url, config.proxy_auth.clone())),
        }
    }

    /// The endpoint of a node; `None` when the node is gone or is no http_push node.
    pub(super) async fn get(&self, scope: WorkspaceScope, node: &NodeId) -> EngineResult<Option<Arc<Endpoint>>> {
        let key = (scope, node.clone());
        if let Some(known) = self.known.get(&key) {
            return Ok(Some(known));
        }
        let changes = self.changes.load(Relaxed);
        let Some(row) = self.engine.store().push_endpoint(scope, node).await? else { return Ok(None) };
        let secrets = self.engine.inner.secrets.open_node_delivery(scope, node, row.sealed.as_ref())?;
        let settings = row.delivery.and_then(|shown| serde_json::from_value::<NodeDelivery>(shown).ok());
        let Some(settings) = settings else { return Ok(None) };
        let workers = self.workers.load(Relaxed);
        let state = self.states.get_with((key.clone(), workers), || {
            Arc::new(State {
                slots: Arc::new(Semaphore::new(of_each(self.of_one, workers))),
                rate: RateLimiter::direct(self.rate_of_each(workers)),
                health: Mutex::default(),
            })
        });
        *state.health.lock().unwrap_or_else(PoisonError::into_inner) = row.health;
        let way = self.way(&settings);
        let workspace = self.workspaces.get_with(scope, || Arc::new(Semaphore::new(self.of_workspace)));
        let endpoint = Arc::new(Endpoint {
            scope,
            way,
            node_id: node.clone(),
            ack_mode: settings.ack_mode(),
            ordering: settings.ordering(),
            retry: settings.retry(),
            url: settings.url,
            auth: settings.auth,
            secrets,
            state,
            workspace,
        });
        self.known.insert(key.clone(), Arc::clone(&endpoint));
        // It may have changed after the read and before the insert: then this is not known.
        if self.changes.load(Relaxed) != changes {
            self.known.invalidate(&key);
        }
        Ok(Some(endpoint))
    }

    fn way(&self, settings: &NodeDelivery) -> Way {
        let policy = self.engine.egress().policy();
        // A proxy resolves the name; what can be seen of the URL is judged here all the same.
        let target = match policy.check_url(&settings.url) {
            Ok(target) if !settings.use_proxy => return Way::Straight(target),
            Ok(_) => self.proxy.as_ref().map(|(proxy, auth)| (policy.vouch(proxy), auth)),
            Err(refusal) => return Way::Refused(refusal),
        };
        match target {
            Some((Ok(proxy), auth)) => Way::ByProxy(proxy, auth.clone()),
            Some((Err(refusal), _)) => Way::Refused(refusal),
            None => Way::NoProxy,
        }
    }

    /// A node has changed.
    pub(super) fn forget(&self, scope: WorkspaceScope, node: &NodeId) {
        self.changes.fetch_add(1, Relaxed);
        self.known.invalidate(&(scope, node.clone()));
    }

    /// So many workers live now. Endpoints that are known follow within seconds.
    pub(super) fn shared_by(&self, workers: usize) {
        self.workers.store(workers, Relaxed);
    }

    fn rate_of_each(&self, workers: usize) -> Quota {
        let each = of_each(self.rate.burst_size().get() as usize, workers);
        Quota::per_second(u32::try_from(each).ok().and_then(NonZeroU32::new).unwrap_or(NonZeroU32::MIN))
    }

    /// Calls that one endpoint gets at a time from this worker.
    pub(super) fn of_one(&self) -> usize {
        of_each(self.of_one, self.workers.load(Relaxed))
    }

    /// Waits for a turn, for long only where there is room to wait. The inner error is the instant before which the
    /// endpoint is not to be called.
    pub(super) async fn pass(
        &self,
        endpoint: &Endpoint,
        is_crowded: impl Fn() -> bool + Sync,
    ) -> EngineResult<Result<Pass, DateTime<Utc>>> {
        let state = &endpoint.state;
        let given_back = || Ok(Err(self.engine.now() + GIVEN_BACK));
        // First its own slot: who waits for a slow endpoint holds nothing that others need.
        let Some(own) = wait_for(&state.slots, &is_crowded).await else { return given_back() };
        if let Some(until) = endpoint.closed_until(self.engine.now()) {
            return Ok(Err(until));
        }
        state.rate.until_ready().await;
        let Some(workspace) = wait_for(&endpoint.workspace, &is_crowded).await else { return given_back() };
        let pass = Pass { _slots: [own, workspace, acquire(&self.all).await] };
        // Last: the one try after an open breaker is for who is about to make it.
        Ok(self.shut_until(endpoint).await?.map_or(Ok(pass), Err))
    }

    /// A turn without waiting; `None` when there is none to be had, or the endpoint is left alone now.
    pub(super) async fn try_pass(&self, endpoint: &Endpoint) -> Option<Pass> {
        let at_once = |slots: &Arc<Semaphore>| Arc::clone(slots).try_acquire_owned().ok();
        let state = &endpoint.state;
        let slots = [at_once(&state.slots)?, at_once(&endpoint.workspace)?, at_once(&self.all)?];
        state.rate.check().ok()?;
        let shut = self.shut_until(endpoint).await.ok()?;
        shut.is_none().then_some(Pass { _slots: slots })
    }

    /// Until when the endpoint is left alone; `None` when it may be called. After an open breaker one worker gets to
    /// try it once.
    async fn shut_until(&self, endpoint: &Endpoint) -> EngineResult<Option<DateTime<Utc>>> {
        let now = self.engine.now();
        if let Some(until) = endpoint.closed_until(now) {
            return Ok(Some(until));
        }
        let health = endpoint.health();
        if health.failures < BREAKER_FAILURES || health.open_until.is_none() {
            return Ok(None);
        }
        let lasts = ATTEMPT_TIMEOUT + Duration::from_secs(5);
        if self.engine.store().probe_endpoint(endpoint.scope, &endpoint.node_id, lasts).await? {
            return Ok(None);
        }
        self.forget(endpoint.scope, &endpoint.node_id);
        Ok(Some(now + PROBED_ELSEWHERE))
    }

    /// A try has succeeded, or has failed in a way that speaks against the endpoint, or it asked for a pause.
    pub(super) async fn note(
        &self,
        endpoint: &Endpoint,
        succeeded: bool,
        failed: bool,
        paused_until: Option<DateTime<Utc>>,
    ) {
        let before = endpoint.health();
        let recovered = succeeded && (before.failures > 0 || before.open_until.is_some());
        if !recovered && !failed && paused_until.is_none() {
            return;
        }
        let news = EndpointNews {
            scope: endpoint.scope,
            node_id: endpoint.node_id.clone(),
            failures: i32::from(failed),
            succeeded,
            paused_until,
        };
        match self.engine.store().note_endpoints(&[news], BREAKER_FAILURES, BREAKER_OPEN).await {
            Ok(health) => {
                if let Some(health) = health.first() {
                    *endpoint.state.health.lock().unwrap_or_else(PoisonError::into_inner) = *health;
                }
            }
            // The next try tells again.
            Err(error) => tracing::debug!(error = &error as &dyn std::error::Error, "an endpoint was not noted"),
        }
    }
}

/// What a workspace has of all slots: an eighth, and more if that is less than one endpoint may have; in no case more
/// than half.
fn share(concurrency: usize, of_one: usize) -> usize {
    (concurrency / 8).max(of_one.min(concurrency / 2)).max(1)
}

/// A slot; `None` when that has taken long and others need the place of whoever waits.
async fn wait_for(slots: &Arc<Semaphore>, is_crowded: &(impl Fn() -> bool + Sync)) -> Option<OwnedSemaphorePermit> {
    if let Ok(permit) = Arc::clone(slots).try_acquire_owned() {
        return Some(permit);
    }
    let mut permit = std::pin::pin!(acquire(slots));
    loop {
        match tokio::time::timeout(WAIT, &mut permit).await {
            Ok(permit) => return Some(permit),
            Err(_) if is_crowded() => return None,
            Err(_) => {}
        }
    }
}

async fn acquire(slots: &Arc<Semaphore>) -> OwnedSemaphorePermit {
    match Arc::clone(slots).acquire_owned().await {
        Ok(permit) => permit,
        // Nobody closes these.
        Err(_) => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_has_an_eighth_but_room_for_one_endpoint() {
        for (concurrency, of_one, expected) in
            [(1024, 16, 128), (1024, 200, 200), (1024, 1024, 512), (64, 16, 16), (16, 2, 2), (16, 16, 8), (1, 16, 1)]
        {
            assert_eq!(share(concurrency, of_one), expected, "{concurrency} {of_one}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_for_a_slot_is_given_up_only_where_others_need_the_place() {
        let slots = Arc::new(Semaphore::new(1));
        let taken = acquire(&slots).await;
        assert!(wait_for(&slots, &|| true).await.is_none());
        let freed = async {
            tokio::time::sleep(WAIT * 10).await;
            drop(taken);
        };
        assert!(tokio::join!(wait_for(&slots, &|| false), freed).0.is_some(), "it kept its turn");
        assert!(wait_for(&slots, &|| true).await.is_some(), "there is no wait");
    }
}
