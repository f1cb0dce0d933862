//! Starting the engine: storage, a leased worker number for ids, a checked clock.

use std::{sync::Arc, time::Duration};

use relay_egress::EgressConfig;
use relay_store::{Store, StoreError};
use relay_stream::Stream;

use crate::{
    Engine, EngineError, EngineResult, IdSource, Inner,
    actions::{self, CallQueues, SentNotes},
    audiences::Audiences,
    auth::TokenCache,
    commit::{self, CommitQueue},
    cursors::{self, CursorMoves},
    events,
    files::{Files, FilesConfig},
    hints::{self, Hints},
    holds::{self, Holds},
    limits::{Limits, LimitsConfig},
    observers::{self, Observers},
    publish::{self, Publisher},
    recovery::{self, Recovery},
    schema::wait_for_schema,
    secrets::{KeyList, Secrets},
    seen,
    serve::{self, Heartbeats},
    vitals,
};

/// How long a worker number is leased for.
const WORKER_LEASE_SECONDS: i32 = 60;
/// How often the lease is renewed and the clock compared with Postgres'.
const RENEW_EVERY: Duration = Duration::from_secs(10);
/// How long to wait before asking a Postgres that is away again.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// What an engine needs to know.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// `postgres://…`
    pub database_url: String,
    /// `nats://…`
    pub nats_url: String,
    /// Copies that JetStream keeps of each stream.
    pub nats_replicas: u8,
    /// Postgres connections at most. Raising it past 16 costs commits more than it gives reads.
    pub database_connections: u32,
    /// By how much numbers are raised in a restored database when nobody can tell which ones were given away.
    pub restore_margin: i64,
    /// What requests and creations are limited to.
    pub limits: LimitsConfig,
    /// Where files are kept, and which.
    pub files: FilesConfig,
    /// What secrets are sealed and addresses signed with; without a key, one that is kept in Postgres.
    pub secret_keys: KeyList,
    /// Which of tenants' URLs are called.
    pub egress: EgressConfig,
}

impl Engine {
    /// Starts an engine. Waits, without end, for a Postgres that is away and for a schema that is older than this program.
    ///
    /// # Errors
    /// When a URL cannot be read, or no worker number is free.
    pub async fn start(config: EngineConfig) -> EngineResult<Self> {
        let store = Store::connect(&config.database_url, config.database_connections)?;
        let owner = owner_name()?;
        wait_for_schema(&store).await?;
        let worker = wait_for_worker(&store, &owner).await?;
        let ids = IdSource::new(worker.unsigned_abs());
        ids.correct(&store).await?;
        let secrets = wait_for_secrets(&store, &config.secret_keys).await?;
        let stream = Stream::connect(&config.nats_url, "relay", &owner).await?;
        let (hints, hint_queue) = Hints::new();
        let (seen, notes) = seen::SeenNotes::new();
        let (observers, observers_used) = Observers::new();
        let (committer, commit_queue) = CommitQueue::new();
        let (publisher, publish_queue) = Publisher::new();
        let (announcer, announcements) = events::Announcer::new();
        let (calls, new_calls, outcomes) = CallQueues::new();
        let (sent_invocations, sent_notes) = SentNotes::new();
        let cursors = Arc::new(CursorMoves::default());
        let inner = Inner {
            store: store.clone(),
            ids,
            tokens: TokenCache::default(),
            seen,
            observers,
            hints,
            stream: stream.clone(),
            audiences: Audiences::default(),
            committer,
            publisher,
            announcer,
            feeds: events::Feeds::default(),
            large_frames: events::large_frames(),
            cursors: Arc::clone(&cursors),
            heartbeats: Heartbeats::default(),
            limits: Limits::new(config.limits),
            secrets,
            files: Files::new(&config.files),
            calls,
            sent_invocations,
            node_kinds: crate::node_kinds::node_kinds(),
            egress: relay_egress::Client::new(config.egress.policy(), relay_egress::Limits::default()),
            gateway_id: std::sync::OnceLock::new(),
            recovery: Recovery::new(config.restore_margin),
            holds: Holds::default(),
        };
        let engine = Self { inner: Arc::new(inner) };
        let weak = || Arc::downgrade(&engine.inner);
        tokio::spawn(seen::write_notes(weak(), notes));
        tokio::spawn(observers::write_used(store, observers_used));
        tokio::spawn(hints::forward(stream.clone(), hint_queue));
        tokio::spawn(hints::obey(weak(), engine.hints().listen()));
        tokio::spawn(hints::receive(weak(), stream.clone(), None));
        tokio::spawn(commit::run(weak(), commit_queue));
        tokio::spawn(publish::run(weak(), publish_queue));
        tokio::spawn(events::announce(weak(), announcements));
        tokio::spawn(events::check_feeds(weak()));
        tokio::spawn(cursors::run(weak(), Arc::downgrade(&cursors)));
        tokio::spawn(serve::write_heartbeats(weak()));
        tokio::spawn(actions::run_calls(weak(), new_calls));
        tokio::spawn(actions::run_outcomes(weak(), outcomes));
        tokio::spawn(actions::write_notes(weak(), sent_notes));
        tokio::spawn(keep_log(weak(), stream, config.nats_replicas));
        tokio::spawn(recovery::run(weak()));
        tokio::spawn(holds::run(weak()));
        tokio::spawn(vitals::run(weak()));
        tokio::spawn(keep_worker(Arc::downgrade(&engine.inner), worker, owner));
        Ok(engine)
    }
}

/// Creates the streams whenever NATS has come up: it may have lost what it stored.
async fn keep_log(engine: std::sync::Weak<Inner>, stream: Stream, replicas: u8) {
    let mut link = stream.link();
    loop {
        let mut told = false;
        let rebuilt = loop {
            let error = match stream.ensure_log(replicas).await {
                Ok(rebuilt) => break rebuilt,
                Err(error) => error,
            };
            // Once for each time that NATS is up and refuses: too little storage, or too few servers for the copies.
            if stream.is_up() && !told {
                tracing::warn!(error = &error as &dyn std::error::Error, "jetstream refuses the streams; trying again");
                told = true;
            }
            tokio::time::sleep(ASK_AGAIN_AFTER).await;
        };
        if let (false, Some(inner)) = (rebuilt, engine.upgrade()) {
            inner.recovery.log_is_new();
        }
        if link.changed().await.is_err() {
            return;
        }
    }
}

/// Who holds a lease: new with each start, so that a restarted process never renews its ancestor's.
fn owner_name() -> EngineResult<String> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|_| EngineError::NoRandomness)?;
    Ok(format!("{}-{}", std::process::id(), hex::encode(random)))
}

/// Postgres may go away again between two questions.
async fn wait_for_secrets(store: &Store, configured: &KeyList) -> EngineResult<Secrets> {
    loop {
        match Secrets::load(store, configured).await {
            Err(EngineError::Unavailable(error)) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "waiting for postgres");
                tokio::time::sleep(ASK_AGAIN_AFTER).await;
            }
            done => return done,
        }
    }
}

async fn wait_for_worker(store: &Store, owner: &str) -> EngineResult<i16> {
    let mut told = false;
    loop {
        match store.lease_worker_id(owner, WORKER_LEASE_SECONDS).await {
            Ok(Some(worker)) => return Ok(worker),
            Ok(None) => return Err(EngineError::NoWorkerNumber),
            Err(error) if error.is_unavailable() => {
                if !told {
                    tracing::warn!(error = &error as &dyn std::error::Error, "waiting for postgres");
                    told = true;
                }
                tokio::time::sleep(ASK_AGAIN_AFTER).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Renews the worker number and checks the clock until the engine is gone.
///
/// A number that was lost (this process was paused, or Postgres was away, for longer than the lease) is
/// replaced. Numbers are handed out longest-free first, so that one just lost is not in use elsewhere.
async fn keep_worker(engine: std::sync::Weak<Inner>, mut worker: i16, owner: String) {
    loop {
        tokio::time::sleep(RENEW_EVERY).await;
        let Some(inner) = engine.upgrade() else { return };
        match renew(&inner, worker, &owner).await {
            Ok(now) => worker = now,
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "the worker number was not renewed");
            }
        }
    }
}

async fn renew(inner: &Inner, worker: i16, owner: &str) -> Result<i16, StoreError> {
    let mut current = worker;
    if !inner.store.renew_worker_id(worker, owner, WORKER_LEASE_SECONDS).await?
        && let Some(fresh) = inner.store.lease_worker_id(owner, WORKER_LEASE_SECONDS).await?
    {
        tracing::warn!(lost = worker, leased = fresh, "the worker number was lost and replaced");
        inner.ids.change_worker(fresh.unsigned_abs());
        current = fresh;
    }
    inner.ids.correct(&inner.store).await?;
    Ok(current)
}
