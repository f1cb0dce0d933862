//! Events without a delivery for agents on http_push nodes: reactions, receipts, presence (docs/protocol/node.md, "Push
//! events"). Each is posted once, best-effort: neither repeated nor recorded.
//!
//! All workers receive the notices; the node and the list of live workers determine the one that posts.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::{StreamExt as _, stream};
use relay_domain::{AgentId, NodeId, PushWorkerId, WorkspaceId, WorkspaceScope, shard::node_turn};
use relay_tasks::spawn_isolated;
use relay_wire::nodes::push_request::EventCall;
use serde_json::Value;
use tokio::sync::Semaphore;

use super::{
    PushDispatcher, attempt,
    queue::{NodeEvent, PushQueue},
    request,
};

/// The agents of a workspace are read again after this long.
const AGENTS_TTL: Duration = Duration::from_secs(5);
const MAX_WORKSPACES: u64 = 100_000;
/// Bound of the events in progress; further ones are dropped. None waits for an endpoint; its calls take permits of its
/// tenant.
const MAX_CONCURRENT_EVENTS: usize = 1024;
const MAX_CONCURRENT_NODES: usize = 64;

/// Agents of a workspace on http_push nodes, with their nodes.
type PushedAgents = Arc<Vec<(AgentId, NodeId)>>;

/// Poster of events without a delivery.
pub(super) struct EventPoster {
    pushed_agents: moka::sync::Cache<WorkspaceId, PushedAgents>,
    /// Counts moves of agents: a list read before a move is not cached.
    moves: AtomicU64,
    /// Live workers, in order.
    workers: Mutex<Vec<PushWorkerId>>,
    permits: Arc<Semaphore>,
}

impl EventPoster {
    pub(super) fn new() -> Self {
        Self {
            pushed_agents: moka::sync::Cache::builder().max_capacity(MAX_WORKSPACES).time_to_live(AGENTS_TTL).build(),
            moves: AtomicU64::new(0),
            workers: Mutex::default(),
            permits: Arc::new(Semaphore::new(MAX_CONCURRENT_EVENTS)),
        }
    }

    /// Sets the live workers.
    pub(super) fn set_workers(&self, workers: Vec<PushWorkerId>) {
        *self.workers.lock().unwrap_or_else(PoisonError::into_inner) = workers;
    }

    /// True if this worker posts to the node.
    fn is_assigned_here(&self, owner: PushWorkerId, scope: WorkspaceScope, node: &NodeId) -> bool {
        // Workers may hold different lists until their next renewal. An event is then posted twice or not at all, which
        // best effort allows.
        let workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.get(node_turn(scope.workspace_id(), node, workers.len())) == Some(&owner)
    }

    pub(super) fn forget(&self, workspace: WorkspaceId) {
        // The counter first: a read in progress that inserts the former list afterwards removes it again.
        self.moves.fetch_add(1, Ordering::Relaxed);
        self.pushed_agents.invalidate(&workspace);
    }

    async fn pushed_agents(&self, storage: &dyn PushQueue, scope: WorkspaceScope) -> PushedAgents {
        let workspace = scope.workspace_id();
        if let Some(known) = self.pushed_agents.get(&workspace) {
            return known;
        }
        let moves = self.moves.load(Ordering::Relaxed);
        match storage.agents(scope).await {
            Ok(pushed_agents) => {
                let pushed_agents = Arc::new(pushed_agents);
                self.pushed_agents.insert(workspace, Arc::clone(&pushed_agents));
                // An agent may have moved between the read and the insert.
                if self.moves.load(Ordering::Relaxed) != moves {
                    self.pushed_agents.invalidate(&workspace);
                }
                pushed_agents
            }
            // Not cached: the next event reads again.
            Err(_) => PushedAgents::default(),
        }
    }
}

/// Posts an event to the http_push agents of its workspace. Never waits.
pub(super) fn post(pusher: &Arc<PushDispatcher>, event: NodeEvent) {
    // Best-effort: a worker that is behind drops events.
    let Ok(permit) = Arc::clone(&pusher.event_poster.permits).try_acquire_owned() else { return };
    let pusher = Arc::clone(pusher);
    spawn_isolated("endpoint", async move {
        post_all(&pusher, &event).await;
        drop(permit);
    });
}

async fn post_all(pusher: &Arc<PushDispatcher>, event: &NodeEvent) {
    let (scope, agents) = (event.scope, event.agents.as_deref());
    let pushed_agents = pusher.event_poster.pushed_agents(&*pusher.storage, scope).await;
    let mut nodes: BTreeMap<&str, (&NodeId, Vec<AgentId>)> = BTreeMap::new();
    for (agent, node) in pushed_agents.iter() {
        if agents.is_none_or(|agents| agents.contains(agent)) {
            nodes.entry(node.as_str()).or_insert_with(|| (node, Vec::new())).1.push(*agent);
        }
    }
    // A slow node does not delay the others.
    let ours = nodes
        .into_values()
        .filter(|(node, _)| pusher.event_poster.is_assigned_here(pusher.storage.worker(), scope, node));
    let posts = stream::iter(ours).for_each_concurrent(MAX_CONCURRENT_NODES, |(node, agents)| async move {
        let Ok(Some(endpoint)) = pusher.endpoints.get(scope, node).await else { return };
        // A busy or paused endpoint misses the event.
        let Some(pass) = pusher.endpoints.try_acquire_permit(&endpoint).await else { return };
        let now = pusher.storage.now();
        let body = EventCall {
            kind: &event.kind,
            workspace_id: scope.workspace_id(),
            timestamp: now.into(),
            data: &event.data,
            topic: &event.topic,
            channel_id: event.data.get("channel_id").and_then(Value::as_str),
            agent_ids: &agents,
        };
        let call = request::event_call(&event.kind, &body, &endpoint.auth, &endpoint.secrets, now);
        attempt::post_event(pusher, &endpoint, call).await;
        drop(pass);
    });
    posts.await;
}
