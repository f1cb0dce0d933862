//! Database migrations for `relayctl migrate`, and the wait of other programs for a migrated schema.

use std::{error::Error, time::Duration};

use relay_store::{Store, StoreError};
use tokio::time::Instant;

use crate::{EngineResult, error::error_chain};

const RETRY_AFTER: Duration = Duration::from_millis(250);

#[derive(Debug, thiserror::Error)]
pub enum MigrationError {
    /// Postgres is unavailable or refused the connection.
    #[error("postgres cannot be used")]
    Unusable(#[from] StoreError),
    /// A migration failed and was rolled back.
    #[error("a migration failed")]
    Failed(#[source] Box<dyn Error + Send + Sync>),
}

/// Applies the migrations to the database at `url`, waiting up to `timeout` for Postgres, and as long again for locks.
///
/// Idempotent. Concurrent runs are serialized.
///
/// # Errors
/// When Postgres does not answer in time, refuses a migration (which is then rolled back), or a lock is held for
/// longer.
pub async fn migrate(url: &str, timeout: Duration) -> Result<(), MigrationError> {
    let store = Store::connect(url, 1)?;
    let asked_at = Instant::now();
    while let Err(error) = store.ping().await {
        if !error.is_unavailable() || asked_at.elapsed() >= timeout {
            return Err(error.into());
        }
        tokio::time::sleep(RETRY_AFTER).await;
    }
    store.migrate(timeout).await.map_err(|error| MigrationError::Failed(Box::new(error)))
}

/// Waits without limit until the schema is at least the version that this program needs. A newer schema is accepted:
/// migrations only add, and remove only what the previous version no longer used.
pub(crate) async fn wait_for_schema(store: &Store) -> EngineResult<()> {
    let needed = Store::required_schema_version();
    let mut logged = None;
    loop {
        let waits_for = match store.schema_version().await {
            Ok(version) if version >= Some(needed) => return Ok(()),
            Ok(version) => {
                if logged != Some("a newer schema") {
                    tracing::warn!(schema.version = ?version, schema.needed = needed, "waiting for a newer schema: run relayctl migrate");
                }
                "a newer schema"
            }
            Err(error) if error.is_unavailable() => {
                if logged != Some("postgres") {
                    // With its causes: a certificate that does not fit looks like an outage otherwise.
                    tracing::warn!(error = error_chain(&error), "waiting for postgres");
                }
                "postgres"
            }
            Err(error) => return Err(error.into()),
        };
        logged = Some(waits_for);
        tokio::time::sleep(RETRY_AFTER).await;
    }
}
