//! A restored database, recovered by hand: what gateways and workers do by themselves when they start.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use relay_store::recovery::DatabaseState;
use relay_stream::Stream;

use super::{Admin, LEASE_SECONDS};
use crate::{
    EngineError, EngineResult, IdSource,
    recovery::{Examined, Margin, Mended, Mender, Progress},
};

/// How long to wait for NATS.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often to look whether it is there.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How a recovery by hand ends.
#[derive(Debug, serde::Serialize)]
pub struct RestoreReport {
    /// What was found.
    pub found: Examined,
    /// What was done; none for a look.
    pub done: Option<Mended>,
    /// When the database was recovered before, if it was.
    pub recovered_before: Option<DateTime<Utc>>,
}

impl Admin {
    /// Recovers the database as if it had just been restored, or only looks what there is to do when `margin` is not given.
    /// Gateways and workers must be stopped, or wait for it.
    ///
    /// # Errors
    /// When Postgres or NATS is away, or another process recovers.
    pub async fn restore(
        &self,
        nats_url: &str,
        margin: Option<Margin>,
        progress: impl FnMut(Progress) + Send,
    ) -> EngineResult<RestoreReport> {
        let owner = format!("relayctl-{}", std::process::id());
        let worker = self.store.lease_worker_id(&owner, LEASE_SECONDS).await?.ok_or(EngineError::NoWorkerNumber)?;
        let ids = IdSource::new(worker.unsigned_abs());
        ids.correct(&self.store).await?;
        let stream = Stream::connect(nats_url, "relayctl", &owner).await?;
        let since = Instant::now();
        while !stream.is_up() && since.elapsed() < PATIENCE {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        let mender = Mender::by_hand(&self.store, &stream, &ids);
        let database: DatabaseState = self.store.database_state().await?;
        let found = mender.examine(&database).await?;
        let recovered_before = database.recovered_at;
        let Some(margin) = margin else { return Ok(RestoreReport { found, done: None, recovered_before }) };
        let Some(lock) = self.store.try_recovery_lock().await? else {
            return Err(EngineError::InvalidRequest("another process recovers the database".into()));
        };
        let done = mender.mend(&database, margin, progress).await;
        lock.release().await;
        Ok(RestoreReport { found, done: Some(done?), recovered_before })
    }
}
