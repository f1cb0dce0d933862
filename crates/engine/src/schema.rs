//! Bringing the database up to date, for `relayctl migrate`, and waiting until somebody has.

use std::{
    error::Error,
    time::{Duration, Instant},
};

use relay_store::{Store, StoreError};

use crate::EngineResult;

const ASK_AGAIN_AFTER: Duration = Duration::from_millis(250);

/// The schema could not be brought up to date.
#[derive(Debug, thiserror::Error)]
pub enum MigrationError {
    /// Postgres did not answer, or refused the connection.
    #[error("postgres cannot be used")]
    Unusable(#[from] StoreError),
    /// A migration failed and was rolled back.
    #[error("a migration failed")]
    Failed(#[source] Box<dyn Error + Send + Sync>),
}

/// Applies the migrations to the database at `url`, waiting up to `patience` for Postgres to answer, and as long again for locks.
///
/// Idempotent; of two at once the second waits until the first is done.
///
/// # Errors
/// When Postgres does not answer in time, refuses a migration (which then leaves no trace), or somebody holds a lock for longer.
pub async fn migrate(url: &str, patience: Duration) -> Result<(), MigrationError> {
    let store = Store::connect(url, 1)?;
    let asked_at = Instant::now();
    while let Err(error) = store.ping().await {
        if !error.is_unavailable() || asked_at.elapsed() >= patience {
            return Err(error.into());
        }
        tokio::time::sleep(ASK_AGAIN_AFTER).await;
    }
    store.migrate(patience).await.map_err(|error| MigrationError::Failed(Box::new(error)))
}

/// Waits, without end, until the schema is at least what this program needs. A newer one is fine: migrations only add, and what
/// they take away no longer served the version before.
///
/// # Errors
/// When Postgres refuses the question.
pub(crate) async fn wait_for_schema(store: &Store) -> EngineResult<()> {
    let needed = Store::needed_schema_version();
    let mut told = None;
    loop {
        let waits_for = match store.schema_version().await {
            Ok(version) if version >= Some(needed) => return Ok(()),
            Ok(version) => {
                if told != Some("a newer schema") {
                    tracing::warn!(schema.version = ?version, schema.needed = needed, "waiting for a newer schema: run relayctl migrate");
                }
                "a newer schema"
            }
            Err(error) if error.is_unavailable() => {
                if told != Some("postgres") {
                    tracing::warn!(error = &error as &dyn Error, "waiting for postgres");
                }
                "postgres"
            }
            Err(error) => return Err(error.into()),
        };
        told = Some(waits_for);
        tokio::time::sleep(ASK_AGAIN_AFTER).await;
    }
}
