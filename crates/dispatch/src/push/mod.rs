//! Dispatch of deliveries to the endpoints of http_push nodes.
//!
//! A worker runs one [`PushDispatcher`]. It claims due mailboxes, serves each with a task of its own, one row at a time
//! and in order, and releases them when they are idle. Its claims are fenced by its lease, which it renews each second,
//! and by the mailbox's epoch: when a worker crashes, its lease expires and others take its mailboxes. Notices make it
//! read at once; a sweep of the engine finds mailboxes whose notice was lost.

mod attempt;
mod config;
mod endpoints;
mod event_poster;
mod mailbox;
mod queue;
mod reader;
mod recorder;
mod request;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::{FutureExt as _, StreamExt as _, stream::BoxStream};
use relay_domain::{
    NodeId,
    push::{
        ATTEMPT_TIMEOUT,
        mailbox::{LeasedMailbox, MailboxKey},
    },
    workspaces::family::FamilyId,
};
use relay_tasks::{TaskSet, byte_budget::ByteBudget, isolate};
use tokio::{sync::Notify, task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;

pub use config::PushConfig;
use endpoints::Endpoints;
use event_poster::EventPoster;
pub use queue::{EndpointRecord, HeldPage, NodeEvent, Notice, PushQueue};
use reader::Reader;
use recorder::Recorder;

use crate::{QueueResult, destinations::Destinations};

/// Lease of a worker. An attempt begins only if the lease outlasts it.
const LEASE: Duration = Duration::from_secs(15);
// An attempt needs 11 s of the lease, so attempts pause when renewals have failed for 4 s.
const RENEW_EVERY: Duration = Duration::from_secs(1);
/// Pause between two claims of due mailboxes. Notices are faster.
const CLAIM_PAUSE: Duration = Duration::from_millis(250);
// Mailboxes of one claim, which looks at eight times as many to be fair between tenants.
const TAKE_BATCH: i64 = 256;
/// Bound of the encoded bodies of requests in flight.
const CALL_BYTES: usize = 32 * 1024 * 1024;
/// Mailboxes served at a time per concurrent call: 8192 by default.
const SERVED_PER_CALL: usize = 8;
/// A mailbox of another worker is not claimed again for this long: that worker gets the same notices.
const ELSEWHERE_TTL: Duration = Duration::from_secs(1);

/// Dispatcher of a worker.
pub struct PushDispatcher {
    storage: Arc<dyn PushQueue>,
    lease: WorkerLease,
    /// Mailboxes that this worker serves.
    served: Mutex<HashMap<MailboxKey, Arc<ServedMailbox>>>,
    max_served: usize,
    endpoints: Endpoints,
    reader: Reader,
    recorder: Recorder,
    event_poster: EventPoster,
    /// Memory for the bodies of requests.
    calls: ByteBudget<FamilyId>,
    stop: CancellationToken,
}

/// Mailbox in service, with the signals for its task.
struct ServedMailbox {
    node_id: NodeId,
    wake: Notify,
    /// Counts changes of its node: rows read before a change are read again.
    moves: AtomicU64,
}

/// Local view of the worker's lease.
#[derive(Debug)]
struct WorkerLease {
    until: Mutex<Instant>,
    /// Counts gaps in the lease: others may have taken our mailboxes meanwhile.
    breaks: AtomicU64,
}

impl WorkerLease {
    /// True if the lease outlasts an attempt that begins now.
    fn covers_attempt(&self) -> bool {
        let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
        Instant::now() + ATTEMPT_TIMEOUT + Duration::from_secs(1) < until
    }

    fn extend(&self, asked_at: Instant) {
        let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        // Compared before the lease is extended: between its end and this renewal other workers may have claimed our
        // mailboxes.
        if *until < Instant::now() {
            self.breaks.fetch_add(1, Ordering::Relaxed);
        }
        *until = asked_at + LEASE;
    }
}

impl PushDispatcher {
    /// Creates a dispatcher with a lease of its own.
    ///
    /// # Errors
    /// When the lease cannot be acquired.
    pub async fn start(
        storage: Arc<dyn PushQueue>,
        config: &PushConfig,
        destinations: Arc<Destinations>,
        tasks: &TaskSet,
        stop: &CancellationToken,
    ) -> QueueResult<Arc<Self>> {
        // Taken before the request, so that the local end of the lease is never later than the stored one.
        let asked_at = Instant::now();
        storage.renew_lease(LEASE).await?;
        let lease = WorkerLease { until: Mutex::new(asked_at + LEASE), breaks: AtomicU64::new(0) };
        Ok(Arc::new(Self {
            lease,
            served: Mutex::default(),
            max_served: (config.concurrency as usize).saturating_mul(SERVED_PER_CALL),
            endpoints: Endpoints::new(Arc::clone(&storage), config, destinations),
            reader: Reader::start(Arc::clone(&storage), tasks),
            recorder: Recorder::start(Arc::clone(&storage), tasks),
            event_poster: EventPoster::new(),
            calls: ByteBudget::new("calls", CALL_BYTES),
            // Stops by itself when an essential part has ended.
            stop: stop.child_token(),
            storage,
        }))
    }

    /// Dispatches until `stop`, then lets attempts in progress finish and releases all mailboxes. It also stops when an
    /// essential part has ended.
    pub async fn run(self: Arc<Self>) {
        // Subscribed before the first claim, so that no delivery falls between the claim and the notices.
        let notices = self.storage.notices();
        let mut helpers = JoinSet::new();
        helpers.spawn(Arc::clone(&self).keep_lease());
        let mut tasks = JoinSet::new();
        tokio::select! {
            () = self.take_mailboxes(&mut tasks, notices) => {}
            _ = helpers.join_next() => tracing::error!("push lease task stopped"),
            () = self.recorder.stopped() => tracing::error!("push recorder task stopped"),
            () = self.reader.stopped() => tracing::error!("push reader task stopped"),
        }
        self.stop.cancel();
        // The lease is renewed until the last attempt has ended: storage refuses the records of an expired worker, and
        // others would attempt the rows again.
        while tasks.join_next().await.is_some() {}
        helpers.abort_all();
        // Last: from here on other workers claim the mailboxes, so no attempt may be in progress.
        if let Err(error) = self.storage.retire().await {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "failed to release mailboxes, others take them when the lease expires"
            );
        }
    }

    async fn keep_lease(self: Arc<Self>) {
        loop {
            let asked_at = Instant::now();
            match self.storage.renew_lease(LEASE).await {
                Ok(workers) => {
                    self.lease.extend(asked_at);
                    self.endpoints.set_worker_count(workers.len());
                    self.event_poster.set_workers(workers);
                }
                Err(error) => {
                    // Not fatal: attempts stop by themselves when the lease no longer covers one.
                    tracing::warn!(error = &error as &dyn std::error::Error, "failed to renew the push lease")
                }
            }
            tokio::time::sleep(RENEW_EVERY).await;
        }
    }

    /// Claims due mailboxes and those of notices, until `stop`.
    async fn take_mailboxes(self: &Arc<Self>, tasks: &mut JoinSet<()>, mut notices: BoxStream<'static, Notice>) {
        let mut elsewhere: HashMap<MailboxKey, Instant> = HashMap::new();
        let mut named: Vec<MailboxKey> = Vec::new();
        let mut is_due = true;
        let mut look_at = Instant::now();
        while !self.stop.is_cancelled() {
            // Ended tasks still count in `tasks.len()` until they are taken out.
            while tasks.try_join_next().is_some() {}
            let room = self.max_served.saturating_sub(tasks.len());
            if std::mem::take(&mut is_due) {
                let limit = i64::try_from(room).unwrap_or(0).min(TAKE_BATCH);
                let more = self.take_due(tasks, limit).await;
                look_at = if more { Instant::now() } else { Instant::now() + CLAIM_PAUSE };
            }
            if !named.is_empty() {
                // Sorted for the removal of duplicates: a burst of notices names a mailbox many times.
                named.sort_unstable_by_key(|(scope, agent)| (scope.workspace_id().get(), agent.get()));
                named.dedup();
                // The sweep makes mailboxes due that find no room here.
                named.truncate(room);
                self.take_named(tasks, std::mem::take(&mut named), &mut elsewhere).await;
            }
            // `look_at` is kept over the rounds: a stream of notices does not postpone the claim of due mailboxes.
            let due = async {
                tokio::time::sleep_until(look_at).await;
                self.storage.wait_until_due().await;
            };
            tokio::select! {
                () = self.stop.cancelled() => {}
                () = due => is_due = true,
                notice = notices.next() => {
                    let Some(first) = notice else { return };
                    let mut next = Some(first);
                    while let Some(notice) = next.take() {
                        self.handle_notice(notice, &elsewhere, &mut named);
                        // Drains the waiting ones: one statement claims all their mailboxes.
                        next = notices.next().now_or_never().flatten();
                    }
                }
            }
        }
    }

    /// Applies a notice; mailboxes to be claimed are added to `named`.
    fn handle_notice(
        self: &Arc<Self>,
        notice: Notice,
        elsewhere: &HashMap<MailboxKey, Instant>,
        named: &mut Vec<MailboxKey>,
    ) {
        match notice {
            Notice::Due(mailboxes) => {
                let unserved = |key: &MailboxKey| !self.wake_task(key) && !elsewhere.contains_key(key);
                named.extend(mailboxes.into_iter().filter(unserved));
            }
            Notice::Changed(mailboxes) => {
                for key in &mailboxes {
                    self.wake_task(key);
                }
            }
            Notice::NodesChanged { scope, nodes } => {
                // Agents may have moved to or from an http_push node.
                self.event_poster.forget(scope.workspace_id());
                nodes.iter().for_each(|node| self.endpoints.forget(scope, node));
                // After the caches: a task that wakes must not read the former settings again.
                let served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
                for (key, task) in served.iter() {
                    if key.0 == scope && nodes.contains(&task.node_id) {
                        task.moves.fetch_add(1, Ordering::Relaxed);
                        task.wake.notify_one();
                    }
                }
            }
            Notice::Event(event) => event_poster::post(self, event),
            // Only mailboxes in service depend on a lost notice. The sweep finds the others, and a changed endpoint is
            // read again when its settings are too old.
            Notice::Lagged => self.wake_all_tasks(),
        }
    }

    /// Wakes the task of a mailbox; returns true if this worker serves it.
    fn wake_task(&self, key: &MailboxKey) -> bool {
        let served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        served.get(key).map(|task| task.wake.notify_one()).is_some()
    }

    fn wake_all_tasks(&self) {
        let served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        served.values().for_each(|task| task.wake.notify_one());
    }

    /// Claims due mailboxes; returns true if more may be due.
    async fn take_due(self: &Arc<Self>, tasks: &mut JoinSet<()>, limit: i64) -> bool {
        // A claim that no attempt can follow would only keep the mailbox from other workers.
        if limit == 0 || !self.lease.covers_attempt() {
            return false;
        }
        match self.storage.claim_due(limit).await {
            Ok(taken) => {
                let more = i64::try_from(taken.len()).is_ok_and(|taken| taken >= limit);
                taken.into_iter().for_each(|mailbox| self.serve(tasks, mailbox));
                more
            }
            Err(error) => {
                // At debug: an outage already shows as a warning of the lease, which fails too.
                tracing::debug!(error = &error as &dyn std::error::Error, "failed to claim due mailboxes, will retry");
                false
            }
        }
    }

    async fn take_named(
        self: &Arc<Self>,
        tasks: &mut JoinSet<()>,
        named: Vec<MailboxKey>,
        elsewhere: &mut HashMap<MailboxKey, Instant>,
    ) {
        if !self.lease.covers_attempt() {
            return;
        }
        match self.storage.claim(&named).await {
            Ok(taken) => {
                elsewhere.retain(|_, until| *until > Instant::now());
                let until = Instant::now() + ELSEWHERE_TTL;
                // A mailbox that was not claimed may also be disabled or blocked. Its row becomes due when that ends,
                // so the claim of due mailboxes finds it.
                for key in named {
                    if !taken.iter().any(|mailbox| mailbox.key() == key) {
                        elsewhere.insert(key, until);
                    }
                }
                taken.into_iter().for_each(|mailbox| self.serve(tasks, mailbox));
            }
            // The next poll finds them.
            Err(error) => tracing::debug!(
                error = &error as &dyn std::error::Error,
                "failed to claim mailboxes, the next poll finds them"
            ),
        }
    }

    fn serve(self: &Arc<Self>, tasks: &mut JoinSet<()>, mailbox: LeasedMailbox) {
        let key = mailbox.key();
        let own = ServedMailbox { node_id: mailbox.node_id.clone(), wake: Notify::new(), moves: AtomicU64::new(0) };
        let own = Arc::new(own);
        // Before the task starts: a notice finds the mailbox here at once, and `Notify` keeps it until the task waits.
        self.served.lock().unwrap_or_else(PoisonError::into_inner).insert(key, Arc::clone(&own));
        let pusher = Arc::clone(self);
        tasks.spawn(async move {
            // The mailbox must be free for another task even after a panic.
            isolate("mailbox", mailbox::serve(&pusher, mailbox, &own)).await;
            let mut served = pusher.served.lock().unwrap_or_else(PoisonError::into_inner);
            // A later task of the same mailbox may have taken the place.
            if served.get(&key).is_some_and(|latest| Arc::ptr_eq(latest, &own)) {
                served.remove(&key);
            }
        });
    }

    /// True if waiting mailboxes should make room for others.
    fn is_crowded(&self) -> bool {
        let served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        served.len() > self.max_served / 2
    }

    /// Returns the values that must be unchanged between reading rows and attempting them.
    fn epoch(&self, served: &ServedMailbox) -> (u64, u64) {
        (served.moves.load(Ordering::Relaxed), self.lease.breaks.load(Ordering::Relaxed))
    }
}
