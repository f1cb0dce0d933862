//! Starting the engine: storage, a leased worker number for ids, a checked clock.

use std::{sync::Arc, time::Duration};

use relay_store::{Store, StoreError};
use relay_stream::Stream;

use crate::{
    Engine, EngineError, EngineResult, IdSource, Inner,
    audiences::Audiences,
    auth::TokenCache,
    commit::{self, CommitQueue},
    cursors::{self, CursorMoves},
    hints::{self, Hints},
    publish::{self, Publisher},
    seen,
    serve::{self, Heartbeats},
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
    /// Postgres connections at most. Raising it past 16 costs commits more than it gives reads.
    pub database_connections: u32,
}

impl Engine {
    /// Starts an engine. Waits, without end, for a Postgres that is away.
    ///
    /// # Errors
    /// When a URL cannot be read, the schema is missing, or no worker number is free.
    pub async fn start(config: EngineConfig) -> EngineResult<Self> {
        let store = Store::connect(&config.database_url, config.database_connections)?;
        let owner = owner_name()?;
        let worker = wait_for_worker(&store, &owner).await?;
        let ids = IdSource::new(worker.unsigned_abs());
        ids.correct(store.ping().await?);
        let stream = Stream::connect(&config.nats_url, "relay", &owner).await?;
        let (hints, hint_queue) = Hints::new();
        let (seen, notes) = seen::SeenNotes::new();
        let (committer, commit_queue) = CommitQueue::new();
        let (publisher, publish_queue) = Publisher::new();
        let cursors = Arc::new(CursorMoves::default());
        let inner = Inner {
            store: store.clone(),
            ids,
            tokens: TokenCache::default(),
            seen,
            hints,
            stream: stream.clone(),
            audiences: Audiences::default(),
            committer,
            publisher,
            cursors: Arc::clone(&cursors),
            heartbeats: Heartbeats::default(),
            gateway_id: std::sync::OnceLock::new(),
        };
        let engine = Self { inner: Arc::new(inner) };
        let weak = || Arc::downgrade(&engine.inner);
        tokio::spawn(seen::write_notes(store.clone(), notes));
        tokio::spawn(hints::forward(stream.clone(), hint_queue));
        tokio::spawn(hints::obey(weak(), engine.hints().listen()));
        tokio::spawn(hints::receive(weak(), stream.clone()));
        tokio::spawn(commit::run(weak(), commit_queue));
        tokio::spawn(publish::run(weak(), publish_queue));
        tokio::spawn(cursors::run(store, Arc::downgrade(&cursors)));
        tokio::spawn(serve::write_heartbeats(weak()));
        tokio::spawn(keep_log(stream));
        tokio::spawn(keep_worker(Arc::downgrade(&engine.inner), worker, owner));
        Ok(engine)
    }
}

/// Creates the delivery stream whenever NATS has come up: it may have lost what it stored.
async fn keep_log(stream: Stream) {
    let mut link = stream.link();
    loop {
        while let Err(error) = stream.ensure_log().await {
            tracing::debug!(error = &error as &dyn std::error::Error, "waiting for jetstream");
            tokio::time::sleep(ASK_AGAIN_AFTER).await;
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
    inner.ids.correct(inner.store.ping().await?);
    Ok(current)
}
