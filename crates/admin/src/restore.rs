//! Manual recovery of a restored database, for `relayctl restore`. Gateways and workers do the same when they start.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_store::recovery::DatabaseState;
use relay_stream::{Clock, FrameKeys, NatsServers, ProcessIdentity, Stream};
use tokio::time::Instant;

use super::{Admin, process_name};
use relay_engine::{
    EngineError, EngineResult,
    access::secrets::{KeyList, load_frame_keys},
    recovery::{DatabaseRepair, Margin, Progress, RepairPlan, RepairReport},
};

const NATS_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_EVERY: Duration = Duration::from_millis(50);

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
    /// When another process recovers the database.
    pub async fn restore(
        &self,
        nats: &NatsServers,
        configured: &KeyList,
        margin: Option<Margin>,
        progress: impl FnMut(Progress) + Send,
    ) -> EngineResult<RestoreReport> {
        let owner = process_name();
        let ids = self.lease_ids(&owner).await?;
        let keys = load_frame_keys(&self.store, configured).await?;
        let stream = Stream::connect(nats, process_identity(owner, keys)).await?;
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
        let done = repair.repair(&database, margin, progress).await;
        lock.release().await;
        Ok(RestoreReport { found, done: Some(done?), recovered_before })
    }
}
