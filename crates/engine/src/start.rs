//! Start of an engine: storage, a leased worker number for ids, a synchronized clock, background tasks.

use std::{sync::Arc, time::Duration};

use relay_egress::EgressConfig;
use relay_store::{DatabaseAddress, Store};
use relay_stream::{Clock, NatsServers, ProcessIdentity, Stream};
use relay_tasks::{TaskSet, byte_budget::ByteBudget};
use tokio::sync::mpsc;

use crate::{
    Engine, EngineError, EngineResult, IdSource, Inner,
    access::{
        limits::LimitsConfig,
        lookups,
        secrets::{KeyList, Secrets},
    },
    actions,
    agents::last_seen,
    core::{
        CONCURRENT_LARGE_READS, CONCURRENT_SCANS, CONCURRENT_SINGLE_REQUESTS, CONCURRENT_SINGLE_REQUESTS_OF_FAMILY,
        Core,
    },
    due_work,
    error::Fault,
    events,
    fair_permits::FairPermits,
    files::FilesConfig,
    handles::{Queues, queues},
    hints::{self, Hints},
    id_source::{WORKER_LEASE_SECONDS, WorkerNumber},
    mailboxes::{claim_waits, cursors},
    messages::{committer, fanouts, publisher},
    migrations::wait_for_schema,
    nodes::{direct_registrations, heartbeats, online},
    observers,
    processes::connection_gauges,
    recovery,
    workspaces::{families::Families, suspensions},
};

/// Interval of lease renewals and clock checks.
const RENEW_EVERY: Duration = Duration::from_secs(10);
/// Bound of the contents of deliveries that a process holds. Decoding takes up to three times as much for a moment.
const BODY_BYTES: usize = 32 * 1024 * 1024;
/// Bound of the message bodies in answers that a process holds. Decoding and encoding take up to twice as much more for
/// a moment, of which the connections to Postgres bound the number.
const ANSWER_BYTES: usize = 32 * 1024 * 1024;
/// Pause before an unavailable server is asked again.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// Configuration of an engine.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    pub database: DatabaseAddress,
    pub nats: NatsServers,
    /// Copies that JetStream keeps of each stream.
    pub nats_replicas: u8,
    /// Postgres connections at most. Raising it past 16 costs commits more than it gives reads.
    pub database_connections: u32,
    /// Time after which Postgres ends a statement of this process, except those of a recovery.
    pub statement_limit: Duration,
    /// Amount by which sequence numbers are raised in a restored database when the log cannot prove which ones were
    /// used.
    pub restore_margin: i64,
    pub limits: LimitsConfig,
    pub files: FilesConfig,
    /// Keys that encrypt secrets and sign file URLs. When empty, a key generated into Postgres.
    pub secret_keys: KeyList,
    pub egress: EgressConfig,
}

impl Engine {
    /// Starts an engine, whose long-running tasks join `tasks`. Waits without limit for an unavailable Postgres, and
    /// for migrations when the schema is older than this program.
    ///
    /// # Errors
    /// When a URL cannot be parsed, or no worker number is free.
    pub async fn start(config: EngineConfig, tasks: &TaskSet) -> EngineResult<Self> {
        let store = Store::serve(&config.database, config.database_connections, config.statement_limit)?;
        let owner = new_owner_name()?;
        wait_for_schema(&store).await?;
        let worker = wait_for_worker(&store, &owner).await?;
        let ids = Arc::new(IdSource::new(worker.unsigned_abs()));
        // Before the first id is drawn: by the host's own clock it would not sort among those of other processes.
        ids.synchronize(&store).await?;
        let secrets = Arc::new(wait_for_secrets(&store, &config.secret_keys).await?);
        let clock = Arc::clone(&ids);
        let identity = ProcessIdentity {
            name: "relay",
            origin: owner.clone(),
            keys: secrets.frame_keys(),
            clock: Clock::new(move || clock.now_ms()),
        };
        let stream = Stream::connect(&config.nats, identity).await?;
        let (hints, hint_queue) = Hints::new();
        let (announcer, announcements) = mpsc::channel(events::announcement::QUEUE);
        let core = Core {
            store,
            ids,
            hints: Arc::new(hints),
            announcer,
            families: Families::default(),
            bodies: ByteBudget::new("deliveries", BODY_BYTES),
            answers: ByteBudget::new("answers", ANSWER_BYTES),
            refusals: Arc::default(),
            worker_number: Arc::new(WorkerNumber::new(owner, worker)),
            gateway: Arc::default(),
            scans: FairPermits::new(CONCURRENT_SCANS),
            large_reads: FairPermits::new(CONCURRENT_LARGE_READS),
            single_requests: FairPermits::with_share(CONCURRENT_SINGLE_REQUESTS, CONCURRENT_SINGLE_REQUESTS_OF_FAMILY),
        };
        let (senders, queues) = queues();
        let inner = Inner::new(core, stream.clone(), tasks.clone(), secrets, &config, senders);
        let engine = Self { inner: Arc::new(inner) };

        // Weak: the tasks must not keep the engine alive, whose end is their signal to return.
        let weak = || Arc::downgrade(&engine.inner);
        let hints = || Arc::downgrade(&engine.inner.core.hints);
        tasks.spawn("hint-sender", hints::forward_to_nats(stream.clone(), hint_queue));
        // Subscribed before the receiver starts, so that it misses no hint.
        tasks.spawn("hint-handler", hints::handle_hints(weak(), engine.hints().subscribe()));
        tasks.spawn("hint-receiver", hints::receive_remote(hints(), stream.clone(), None));
        let claim_waits = Arc::downgrade(&engine.inner.mailboxes.claim_waits);
        tasks.spawn("claim-waker", claim_waits::wake_claims(claim_waits, engine.hints().subscribe()));
        tasks.spawn("announcer", events::announce(weak(), announcements));
        engine.spawn_writers(tasks, queues);
        tasks.spawn("due-work", due_work::run(weak()));
        tasks.spawn("feed-check", events::check_feeds(weak()));
        tasks.spawn("stream-upkeep", maintain_streams(weak(), stream, config.nats_replicas));
        tasks.spawn("recovery", recovery::run(weak()));
        tasks.spawn("suspensions", suspensions::run(weak()));
        tasks.spawn("connection-gauges", connection_gauges::run(weak()));
        tasks.spawn("worker-number", maintain_worker_number(weak()));
        Ok(engine)
    }

    /// Spawns the tasks that write what handles have queued.
    fn spawn_writers(&self, tasks: &TaskSet, queues: Queues) {
        let weak = || Arc::downgrade(&self.inner);
        let Queues {
            seen,
            observer_uses,
            commits,
            publishes,
            calls,
            outcomes,
            dispatch_notes,
            registrations,
            online,
            token_lookups,
        } = queues;
        tasks.spawn("last-seen", last_seen::write_last_seen(weak(), seen));
        tasks.spawn("observer-uses", observers::write_token_uses(self.store().clone(), observer_uses));
        let [usual, wide] = commits;
        tasks.spawn("committer", committer::run(weak(), usual));
        tasks.spawn("wide-committer", committer::run(weak(), wide));
        tasks.spawn("fanouts", fanouts::continue_lapsed(weak()));
        tasks.spawn("publisher", publisher::run(weak(), publishes));
        tasks.spawn("cursor-writer", cursors::run(weak(), Arc::downgrade(&self.inner.mailboxes.cursors)));
        tasks.spawn("heartbeat-writer", heartbeats::write_heartbeats(weak()));
        tasks.spawn("direct-registrations", direct_registrations::register_direct_nodes(weak(), registrations));
        tasks.spawn("online-writer", online::bring_nodes_online(weak(), online));
        tasks.spawn("token-lookups", lookups::look_up_tokens(weak(), token_lookups));
        tasks.spawn("invocation-writer", actions::run_calls(weak(), calls));
        tasks.spawn("outcome-writer", actions::run_outcomes(weak(), outcomes));
        tasks.spawn("dispatch-writer", actions::write_dispatch_notes(weak(), dispatch_notes));
    }
}

/// Ensures the streams after every connect: NATS may have lost its storage.
async fn maintain_streams(engine: std::sync::Weak<Inner>, stream: Stream, replicas: u8) {
    let mut link = stream.watch_link();
    loop {
        let mut logged = false;
        let rebuilt = loop {
            let error = match stream.ensure_streams(replicas).await {
                Ok(rebuilt) => break rebuilt,
                Err(error) => error,
            };
            // Logged once per connect: too little storage, or too few servers for the replicas.
            if stream.is_up() && !logged {
                tracing::warn!(error = &error as &dyn std::error::Error, "jetstream refuses the streams, will retry");
                logged = true;
            }
            tokio::time::sleep(RETRY_AFTER).await;
        };
        // A stream that is new, or was never filled, lacks what Postgres has until it is rebuilt from there.
        if let (false, Some(inner)) = (rebuilt, engine.upgrade()) {
            inner.recovery.state.log_recreated();
        }
        if link.changed().await.is_err() {
            return;
        }
    }
}

/// Name of a lease owner. New with each start, so that a restarted process never renews its predecessor's lease.
fn new_owner_name() -> EngineResult<String> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|_| EngineError::Internal(Fault::NoRandomness))?;
    Ok(format!("{}-{}", std::process::id(), hex::encode(random)))
}

/// Loads the keys, waiting while Postgres is unavailable: it may fail again between two statements.
async fn wait_for_secrets(store: &Store, configured: &KeyList) -> EngineResult<Secrets> {
    loop {
        match Secrets::load(store, configured).await {
            Err(EngineError::Unavailable(error)) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "waiting for postgres");
                tokio::time::sleep(RETRY_AFTER).await;
            }
            done => return done,
        }
    }
}

async fn wait_for_worker(store: &Store, owner: &str) -> EngineResult<i16> {
    let mut logged = false;
    loop {
        match store.lease_worker_id(owner, WORKER_LEASE_SECONDS).await {
            Ok(Some(worker)) => return Ok(worker),
            Ok(None) => return Err(EngineError::Internal(Fault::NoWorkerNumber)),
            Err(error) if error.is_unavailable() => {
                if !logged {
                    tracing::warn!(error = &error as &dyn std::error::Error, "waiting for postgres");
                    logged = true;
                }
                tokio::time::sleep(RETRY_AFTER).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Renews the worker number and synchronizes the clock until the engine is dropped.
async fn maintain_worker_number(engine: std::sync::Weak<Inner>) {
    loop {
        tokio::time::sleep(RENEW_EVERY).await;
        let Some(inner) = engine.upgrade() else { return };
        let Core { worker_number, store, ids, .. } = &inner.core;
        if let Err(error) = worker_number.renew(store, ids).await {
            tracing::warn!(error = &error as &dyn std::error::Error, "failed to renew the worker number");
        }
    }
}
