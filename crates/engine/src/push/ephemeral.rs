//! Events for agents on http_push nodes that no delivery carries: reactions, receipts, presence (contract: node.md
//! 13.5). Each is posted once, best-effort: nothing is repeated, nothing is recorded.
//!
//! All workers hear the hints; which of them posts follows from the node and from who lives, so that one does.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use chrono::{DateTime, Utc};
use futures::{StreamExt as _, stream};
use relay_domain::{AgentId, NodeId, WorkspaceId, WorkspaceScope, shard::turn_of};
use relay_stream::Hint;
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;

use super::{Pusher, attempt, request};
use crate::{Engine, render::timestamp};

/// Who is pushed to in a workspace is read again after this long.
const KNOWN_FOR: Duration = Duration::from_secs(5);
/// Workspaces that are remembered.
const REMEMBERED: u64 = 100_000;
/// Events under way; beyond it they are dropped. None waits for an endpoint: each holds slots for the calls that it
/// makes, of which its workspace has its share.
const AT_ONCE: usize = 1024;
/// Nodes that one event is posted to at a time.
const NODES_AT_ONCE: usize = 64;

/// The agents of a workspace that are pushed to, with their nodes.
type Places = Arc<Vec<(AgentId, NodeId)>>;

/// What posting events takes.
pub(super) struct Ephemeral {
    places: moka::sync::Cache<WorkspaceId, Places>,
    /// Rises when somebody has moved: what was read before that is not kept.
    moves: AtomicU64,
    /// The workers that live, in order.
    workers: Mutex<Vec<i64>>,
    slots: Arc<Semaphore>,
}

impl Ephemeral {
    pub(super) fn new() -> Self {
        Self {
            places: moka::sync::Cache::builder().max_capacity(REMEMBERED).time_to_live(KNOWN_FOR).build(),
            moves: AtomicU64::new(0),
            workers: Mutex::default(),
            slots: Arc::new(Semaphore::new(AT_ONCE)),
        }
    }

    /// Who lives, as read a moment ago.
    pub(super) fn living(&self, workers: Vec<i64>) {
        *self.workers.lock().unwrap_or_else(PoisonError::into_inner) = workers;
    }

    /// Whether this worker is the one to post to a node.
    fn is_ours(&self, owner: i64, scope: WorkspaceScope, node: &NodeId) -> bool {
        let workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.get(turn_of(scope.workspace_id(), node, workers.len())) == Some(&owner)
    }

    fn forget(&self, workspace: WorkspaceId) {
        self.moves.fetch_add(1, Ordering::Relaxed);
        self.places.invalidate(&workspace);
    }

    async fn places(&self, engine: &Engine, scope: WorkspaceScope) -> Places {
        let workspace = scope.workspace_id();
        if let Some(known) = self.places.get(&workspace) {
            return known;
        }
        let moves = self.moves.load(Ordering::Relaxed);
        match engine.store().pushed_agents(scope).await {
            Ok(places) => {
                let places = Arc::new(places);
                self.places.insert(workspace, Arc::clone(&places));
                // Somebody may have moved after the read and before the insert: then this is not known.
                if self.moves.load(Ordering::Relaxed) != moves {
                    self.places.invalidate(&workspace);
                }
                places
            }
            Err(_) => Places::default(),
        }
    }
}

/// A hint that is an event, for whoever of the workspace is pushed to. Never waits.
pub(super) fn hear(pusher: &Arc<Pusher>, hint: &Arc<Hint>) {
    match &**hint {
        Hint::Notify { .. } => {}
        // Somebody has moved, maybe to or from an endpoint.
        Hint::NodesChanged { workspace, .. } => return pusher.ephemeral.forget(*workspace),
        _ => return,
    }
    // Best-effort: a worker that is behind drops events.
    let Ok(slot) = Arc::clone(&pusher.ephemeral.slots).try_acquire_owned() else { return };
    let (pusher, hint) = (Arc::clone(pusher), Arc::clone(hint));
    tokio::spawn(async move {
        post_all(&pusher, &hint).await;
        drop(slot);
    });
}

async fn post_all(pusher: &Arc<Pusher>, hint: &Hint) {
    let Hint::Notify { workspace, agents, topic, event, data, .. } = hint else { return };
    let scope = WorkspaceScope::from_engine_row(*workspace);
    let places = pusher.ephemeral.places(&pusher.engine, scope).await;
    let mut nodes: BTreeMap<&str, (&NodeId, Vec<AgentId>)> = BTreeMap::new();
    for (agent, node) in places.iter() {
        if agents.as_ref().is_none_or(|agents| agents.contains(agent)) {
            nodes.entry(node.as_str()).or_insert_with(|| (node, Vec::new())).1.push(*agent);
        }
    }
    // One that is slow keeps the event from no other.
    let ours = nodes.into_values().filter(|(node, _)| pusher.ephemeral.is_ours(pusher.owner, scope, node));
    let posts = stream::iter(ours).for_each_concurrent(NODES_AT_ONCE, |(node, agents)| async move {
        let Ok(Some(endpoint)) = pusher.endpoints.get(scope, node).await else { return };
        // One that is busy or left alone now misses the event.
        let Some(pass) = pusher.endpoints.try_pass(&endpoint).await else { return };
        let now = pusher.engine.now();
        let body = body(scope, topic, event, data, &agents, now);
        let call = request::ephemeral(event, &body, &endpoint.auth, &endpoint.secrets, now);
        attempt::post_once(pusher, &endpoint, call).await;
        drop(pass);
    });
    posts.await;
}

fn body(
    scope: WorkspaceScope,
    topic: &str,
    event: &str,
    data: &Value,
    agents: &[AgentId],
    now: DateTime<Utc>,
) -> Value {
    let mut body = Map::new();
    body.insert("type".to_owned(), json!(event));
    body.insert("workspace_id".to_owned(), json!(scope.workspace_id().to_string()));
    body.insert("timestamp".to_owned(), json!(timestamp(now)));
    body.insert("data".to_owned(), data.clone());
    body.insert("topic".to_owned(), json!(topic));
    if let Some(channel) = data.get("channel_id").filter(|channel| channel.is_string()) {
        body.insert("channel_id".to_owned(), channel.clone());
    }
    body.insert("agent_ids".to_owned(), json!(agents.iter().map(ToString::to_string).collect::<Vec<_>>()));
    Value::Object(body)
}
