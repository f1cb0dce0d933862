//! Pushing deliveries to the endpoints of http_push nodes.
//!
//! A worker runs one [`Pusher`]. It takes mailboxes that are due, serves each with a task of its own, one at a time and
//! in order, and gives them back when they are idle. What it took is fenced by its lease, which it renews each second,
//! and by the mailbox's epoch: a worker that died is forgotten within the lease, and its mailboxes are taken by others.
//! Hints make it look at once; the sweep (`worker::push`) finds what no hint told of.

mod attempt;
pub mod config;
pub(crate) mod delivery;
mod endpoints;
mod ephemeral;
mod mailbox;
mod reader;
mod recorder;
mod request;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use relay_domain::{AgentId, NodeId, WorkspaceScope, push::ATTEMPT_TIMEOUT};
use relay_store::push_mailboxes::TakenMailbox;
use relay_stream::Hint;
use tokio::{
    sync::{Notify, broadcast},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use crate::{Engine, EngineResult};

pub use config::PushConfig;
use endpoints::Endpoints;
use ephemeral::Ephemeral;
use reader::Reader;
use recorder::Recorder;

/// How long a worker's lease lasts without being renewed. A try begins only if the lease outlasts it.
const LEASE: Duration = Duration::from_secs(15);
/// How often it is renewed.
const RENEW_EVERY: Duration = Duration::from_secs(1);
/// How often a worker looks for mailboxes that are due. Hints are faster.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Mailboxes that one statement takes.
const TAKEN_AT_ONCE: i64 = 256;
/// Mailboxes that one worker serves at a time, for each call that it may have under way: 8192 by default.
const SERVED_PER_CALL: usize = 8;
/// A mailbox that another worker serves is not asked for again for this long: that worker hears the same hints.
const ELSEWHERE_FOR: Duration = Duration::from_secs(1);

type Key = (WorkspaceScope, AgentId);

/// Pushes until it is told to stop.
pub struct Pusher {
    engine: Engine,
    owner: i64,
    lease: Lease,
    /// The mailboxes that are served here.
    served: Mutex<HashMap<Key, Arc<Served>>>,
    served_at_most: usize,
    endpoints: Endpoints,
    reader: Reader,
    recorder: Recorder,
    ephemeral: Ephemeral,
    stop: CancellationToken,
}

/// A mailbox that is served here, for whoever has news for its task.
struct Served {
    node_id: NodeId,
    wake: Notify,
    /// Rises when its node or who is on it has changed: what was read is to be read again.
    moves: AtomicU64,
}

/// The worker's claim to be alive, as it knows of it.
#[derive(Debug)]
struct Lease {
    until: Mutex<Instant>,
    /// Rises when the lease was taken again after it had ended: others may have taken what was ours.
    breaks: AtomicU64,
}

impl Lease {
    /// Whether the lease outlasts a try that begins now.
    fn covers_a_try(&self) -> bool {
        let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
        Instant::now() + ATTEMPT_TIMEOUT + Duration::from_secs(1) < until
    }

    fn renewed(&self, asked_at: Instant) {
        let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        if *until < Instant::now() {
            self.breaks.fetch_add(1, Ordering::Relaxed);
        }
        *until = asked_at + LEASE;
    }
}

impl Pusher {
    /// A pusher over an engine, with a lease of its own.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn start(engine: Engine, config: &PushConfig, stop: &CancellationToken) -> EngineResult<Arc<Self>> {
        let owner = engine.next_id();
        let asked_at = Instant::now();
        engine.store().renew_push_worker(owner, LEASE).await?;
        let lease = Lease { until: Mutex::new(asked_at + LEASE), breaks: AtomicU64::new(0) };
        Ok(Arc::new(Self {
            owner,
            lease,
            served: Mutex::default(),
            served_at_most: (config.concurrency as usize).saturating_mul(SERVED_PER_CALL),
            endpoints: Endpoints::new(engine.clone(), config),
            reader: Reader::start(engine.clone(), owner),
            recorder: Recorder::start(engine.clone(), owner),
            ephemeral: Ephemeral::new(),
            // It stops by itself when it cannot go on.
            stop: stop.child_token(),
            engine,
        }))
    }

    /// Pushes until `stop`, then lets the tries under way end and gives everything back. The same, without being told
    /// to, when a part of it has ended that none of this goes without.
    pub async fn run(self: Arc<Self>) {
        let hints = self.engine.hints().listen();
        let mut helpers = JoinSet::new();
        helpers.spawn(Arc::clone(&self).keep_lease());
        let mut tasks = JoinSet::new();
        tokio::select! {
            () = self.take(&mut tasks, hints) => {}
            _ = helpers.join_next() => tracing::error!("the push lease is renewed no longer"),
            () = self.recorder.ended() => tracing::error!("tries are recorded no longer"),
            () = self.reader.ended() => tracing::error!("mailboxes are read no longer"),
        }
        self.stop.cancel();
        while tasks.join_next().await.is_some() {}
        helpers.abort_all();
        if let Err(error) = self.engine.store().retire_push_worker(self.owner).await {
            tracing::warn!(error = &error as &dyn std::error::Error, "mailboxes were not given back");
        }
    }

    async fn keep_lease(self: Arc<Self>) {
        loop {
            let asked_at = Instant::now();
            match self.engine.store().renew_push_worker(self.owner, LEASE).await {
                Ok(()) => self.lease.renewed(asked_at),
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "the push lease was not renewed")
                }
            }
            if let Ok(workers) = self.engine.store().push_workers().await {
                self.endpoints.shared_by(workers.len());
                self.ephemeral.living(workers);
            }
            tokio::time::sleep(RENEW_EVERY).await;
        }
    }

    /// Takes what is due and what hints name, until `stop`.
    async fn take(self: &Arc<Self>, tasks: &mut JoinSet<()>, mut hints: broadcast::Receiver<Arc<Hint>>) {
        let mut elsewhere: HashMap<Key, Instant> = HashMap::new();
        let mut named: Vec<Key> = Vec::new();
        let mut look_at = Instant::now();
        while !self.stop.is_cancelled() {
            while tasks.try_join_next().is_some() {}
            let room = self.served_at_most.saturating_sub(tasks.len());
            if look_at <= Instant::now() {
                let limit = i64::try_from(room).unwrap_or(0).min(TAKEN_AT_ONCE);
                let more = self.take_due(tasks, limit).await;
                look_at = if more { Instant::now() } else { Instant::now() + LOOK_EVERY };
                elsewhere.retain(|_, until| *until > Instant::now());
            }
            if !named.is_empty() {
                named.sort_unstable_by_key(|(scope, agent)| (scope.workspace_id().get(), agent.get()));
                named.dedup();
                named.truncate(room);
                self.take_named(tasks, std::mem::take(&mut named), &mut elsewhere).await;
            }
            let pause = look_at.saturating_duration_since(Instant::now());
            tokio::select! {
                () = self.stop.cancelled() => {}
                () = tokio::time::sleep(pause) => {}
                hint = hints.recv() => {
                    let mut next = Some(hint);
                    while let Some(hint) = next.take() {
                        match hint {
                            Ok(hint) => {
                                ephemeral::hear(self, &hint);
                                self.hear(&hint, &elsewhere, &mut named);
                            }
                            Err(broadcast::error::RecvError::Lagged(_)) => self.wake_all(),
                            Err(broadcast::error::RecvError::Closed) => return,
                        }
                        // All that wait: one statement takes them.
                        next = match hints.try_recv() {
                            Ok(hint) => Some(Ok(hint)),
                            Err(broadcast::error::TryRecvError::Lagged(n)) => {
                                Some(Err(broadcast::error::RecvError::Lagged(n)))
                            }
                            Err(_) => None,
                        };
                    }
                }
            }
        }
    }

    /// What a hint means here; mailboxes to be taken are added to `named`.
    fn hear(&self, hint: &Hint, elsewhere: &HashMap<Key, Instant>, named: &mut Vec<Key>) {
        match hint {
            Hint::DeliveriesDue { agents } => {
                for (workspace, agent) in agents {
                    let key = (WorkspaceScope::from_engine_row(*workspace), *agent);
                    if !self.wake(&key) && !elsewhere.contains_key(&key) {
                        named.push(key);
                    }
                }
            }
            Hint::MailboxesChanged { agents } => {
                for (workspace, agent) in agents {
                    self.wake(&(WorkspaceScope::from_engine_row(*workspace), *agent));
                }
            }
            Hint::NodesChanged { workspace, nodes } => {
                let scope = WorkspaceScope::from_engine_row(*workspace);
                nodes.iter().for_each(|node| self.endpoints.forget(scope, node));
                let served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
                for (key, task) in served.iter() {
                    if key.0 == scope && nodes.contains(&task.node_id) {
                        task.moves.fetch_add(1, Ordering::Relaxed);
                        task.wake.notify_one();
                    }
                }
            }
            _ => {}
        }
    }

    /// Wakes the task of a mailbox; whether it is served here.
    fn wake(&self, key: &Key) -> bool {
        let served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        served.get(key).map(|task| task.wake.notify_one()).is_some()
    }

    fn wake_all(&self) {
        let served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        served.values().for_each(|task| task.wake.notify_one());
    }

    /// Whether there may be more.
    async fn take_due(self: &Arc<Self>, tasks: &mut JoinSet<()>, limit: i64) -> bool {
        if limit == 0 || !self.lease.covers_a_try() {
            return false;
        }
        match self.engine.store().take_due_mailboxes(self.owner, limit).await {
            Ok(taken) => {
                let more = i64::try_from(taken.len()).is_ok_and(|taken| taken >= limit);
                taken.into_iter().for_each(|mailbox| self.serve(tasks, mailbox));
                more
            }
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "mailboxes that are due were not taken");
                false
            }
        }
    }

    async fn take_named(
        self: &Arc<Self>,
        tasks: &mut JoinSet<()>,
        named: Vec<Key>,
        elsewhere: &mut HashMap<Key, Instant>,
    ) {
        if !self.lease.covers_a_try() {
            return;
        }
        match self.engine.store().take_mailboxes(self.owner, &named).await {
            Ok(taken) => {
                let until = Instant::now() + ELSEWHERE_FOR;
                for key in named {
                    if !taken.iter().any(|mailbox| (mailbox.scope, mailbox.agent_id) == key) {
                        elsewhere.insert(key, until);
                    }
                }
                taken.into_iter().for_each(|mailbox| self.serve(tasks, mailbox));
            }
            // They are found when they are looked for.
            Err(error) => tracing::debug!(error = &error as &dyn std::error::Error, "mailboxes were not taken"),
        }
    }

    fn serve(self: &Arc<Self>, tasks: &mut JoinSet<()>, mailbox: TakenMailbox) {
        let key = (mailbox.scope, mailbox.agent_id);
        let own = Served { node_id: mailbox.node_id.clone(), wake: Notify::new(), moves: AtomicU64::new(0) };
        let own = Arc::new(own);
        self.served.lock().unwrap_or_else(PoisonError::into_inner).insert(key, Arc::clone(&own));
        let pusher = Arc::clone(self);
        tasks.spawn(async move {
            mailbox::serve(&pusher, mailbox, &own).await;
            let mut served = pusher.served.lock().unwrap_or_else(PoisonError::into_inner);
            // A later task of the same mailbox may have taken the place.
            if served.get(&key).is_some_and(|latest| Arc::ptr_eq(latest, &own)) {
                served.remove(&key);
            }
        });
    }

    /// Whether so many mailboxes are served that those which wait for long are to make room.
    fn is_crowded(&self) -> bool {
        let served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        served.len() > self.served_at_most / 2
    }

    /// What must not have changed since a mailbox was read for its rows to be tried.
    fn epoch(&self, served: &Served) -> (u64, u64) {
        (served.moves.load(Ordering::Relaxed), self.lease.breaks.load(Ordering::Relaxed))
    }
}
