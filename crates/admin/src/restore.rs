//! Manual recovery of a restored database, for `relayctl restore`. Gateways and workers do the same when they start.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_store::recovery::DatabaseState;
use relay_stream::{Clock, FrameKeys, NatsServers, ProcessIdentity, Stream};
use tokio::time::Instant;

use super::{Admin, LEASE_SECONDS, process_name};
use relay_engine::{
    EngineError, EngineResult,
    access::secrets::{KeyList, load_frame_keys},
    recovery::{DatabaseRepair, Margin, Progress, RepairPlan, RepairReport},
};

const NATS_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_EVERY: Duration = Duration::from_millis(50);
/// Interval at which the worker number is renewed, a sixth of its lease.
const RENEW_EVERY: Duration = Duration::from_secs(10);

/// Result of a manual recovery.
#[derive(Debug, serde::Serialize)]
pub struct RestoreReport {
    pub found: RepairPlan,
    pub done: Option<RepairReport>,
    pub recovered_before: Option<DateTime<Utc>>,
}

/// Identity of a process that only reads streams.
pub(crate) fn process_identity(origin: String, keys: FrameKeys) -> ProcessIdentity {
    ProcessIdentity { name: "relayctl", origin, keys, clock: Clock::new(|| 0) }
}

impl Admin {
    /// Recovers the database as if it had just been restored. Without `margin` it only reports the necessary steps.
    /// Gateways and workers must be stopped, or wait for it.
    ///
    /// # Errors
    /// When another process recovers the database, or has taken the worker number of this one.
    pub async fn restore(
        &self,
        nats: &NatsServers,
        configured: &KeyList,
        margin: Option<Margin>,
        progress: impl FnMut(Progress) + Send,
    ) -> EngineResult<RestoreReport> {
        let owner = process_name();
        let (worker, ids) = self.lease_ids(&owner).await?;
        let keys = load_frame_keys(&self.store, configured).await?;
        let stream = Stream::connect(nats, process_identity(owner.clone(), keys)).await?;
        let since = Instant::now();
        // Not an error yet: the examination then fails with the reason of NATS.
        while !stream.is_up() && since.elapsed() < NATS_TIMEOUT {
            tokio::time::sleep(POLL_EVERY).await;
        }
        let repair = DatabaseRepair::without_engine(&self.store, &stream, &ids);
        // Read before the lock: if another process finishes a repair in between, this one repeats it, which assigns no
        // number twice.
        let database: DatabaseState = self.store.database_state().await?;
        let found = repair.examine(&database).await?;
        let recovered_before = database.recovered_at;
        let Some(margin) = margin else { return Ok(RestoreReport { found, done: None, recovered_before }) };
        let Some(lock) = self.store.try_recovery_lock().await? else {
            return Err(EngineError::invalid_request("another process recovers the database"));
        };
        let done = tokio::select! {
            done = repair.repair(&database, margin, progress) => done,
            lost = self.keep_worker_number(&owner, worker) => Err(lost),
        };
        lock.release().await;
        Ok(RestoreReport { found, done: Some(done?), recovered_before })
    }

    /// Renews the lease of a worker number, which a repair may outlast. Returns an error once the number is lost.
    async fn keep_worker_number(&self, owner: &str, worker: i16) -> EngineError {
        loop {
            tokio::time::sleep(RENEW_EVERY).await;
            // A renewal that fails is repeated: the number is lost only when another process has leased it.
            if let Ok(false) = self.store.renew_worker_id(worker, owner, LEASE_SECONDS).await {
                return EngineError::invalid_request("another process has taken the worker number, restore again");
            }
        }
    }
}
