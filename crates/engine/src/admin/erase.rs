//! A workspace written out, and removed for good.

use std::time::{Duration, Instant};

use relay_domain::WorkspaceScope;
use relay_store::{StoreError, admin::Erased};

use super::Admin;
use crate::{EngineError, EngineResult};

/// Workers look for files to remove each 10 s.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// What was under way when the workspace was deleted may write for a moment; so rows are removed until none came back.
const ROUNDS: usize = 5;

/// What became of an erasure.
#[derive(Debug, serde::Serialize)]
pub struct Erasure {
    /// Rows removed, by table.
    pub erased: Vec<Erased>,
    /// Messages removed from JetStream; `None` when no NATS was named.
    pub purged: Option<u64>,
    /// Tables that were looked at afterwards.
    pub looked_at: usize,
    /// Every place that was looked at afterwards, with what is left of the workspace there: tables and partitions, the
    /// streams of JetStream if a NATS was named, the files.
    pub proof: Vec<Erased>,
    /// Those with something left: none, or it was not erased.
    pub left: Vec<Erased>,
}

impl Admin {
    /// Deletes a workspace: its tokens are dead. Its rows stay until retention or [`Self::erase_workspace`].
    ///
    /// # Errors
    /// When storage is away.
    pub async fn delete_workspace(&self, scope: WorkspaceScope) -> EngineResult<usize> {
        let now = chrono::DateTime::from_timestamp_millis(self.store.ping().await?).unwrap_or_default();
        Ok(self.store.delete_workspace(scope, now).await?.len())
    }

    /// Calls `each` with the table and each row as JSON, in one snapshot. Left out are tokens, the keys of repeated requests, the search
    /// index, and the bytes of files.
    ///
    /// # Errors
    /// When there is no such workspace, storage is away, or `each` fails.
    pub async fn export_workspace(
        &self,
        scope: WorkspaceScope,
        mut each: impl FnMut(&str, &str) -> std::io::Result<()>,
    ) -> EngineResult<()> {
        self.store.is_deleted(scope).await?.ok_or(EngineError::WorkspaceNotFound)?;
        let mut wrote = Ok(());
        let outcome = self
            .store
            .export_workspace(scope, |table, row| -> Result<(), Stopped> {
                each(table, row).map_err(|error| {
                    wrote = Err(error);
                    Stopped::Writing
                })
            })
            .await;
        match outcome {
            Ok(()) => Ok(()),
            Err(Stopped::Store(error)) => Err(error.into()),
            Err(Stopped::Writing) => Err(EngineError::InvalidRequest(format!(
                "the export could not be written: {}",
                wrote.err().map_or_else(String::new, |error| error.to_string())
            ))),
        }
    }

    /// Removes every row and every stored frame of a *deleted* workspace, and counts what is left. The bytes of its files go first; a worker
    /// removes them, which is waited for.
    ///
    /// # Errors
    /// When it is not deleted, a worker does not remove its files within `patience`, or storage is away. What was removed stays removed:
    /// ask again.
    pub async fn erase_workspace(
        &self,
        scope: WorkspaceScope,
        nats_url: Option<&str>,
        patience: Duration,
    ) -> EngineResult<Erasure> {
        match self.store.is_deleted(scope).await? {
            None => return Err(EngineError::WorkspaceNotFound),
            Some(false) => return Err(EngineError::InvalidRequest("the workspace is alive: delete it first".into())),
            Some(true) => {}
        }
        let since = Instant::now();
        loop {
            let files = self.store.file_objects_left(scope).await?;
            if files == 0 {
                break;
            }
            if since.elapsed() >= patience {
                return Err(EngineError::InvalidRequest(format!(
                    "the bytes of {files} files are still there: a worker removes them, does one run?"
                )));
            }
            tokio::time::sleep(ASK_AGAIN_AFTER).await;
        }
        let mut erased: Vec<Erased> = Vec::new();
        for _ in 0..ROUNDS {
            let round = self.store.erase_workspace(scope).await?;
            let nothing = round.iter().all(|table| table.rows == 0);
            for table in round {
                match erased.iter_mut().find(|known| known.table == table.table) {
                    Some(known) => known.rows += table.rows,
                    None => erased.push(table),
                }
            }
            if nothing {
                break;
            }
        }
        let purged = match nats_url {
            Some(url) => Some(relay_stream::admin::forget_workspace(url, scope).await?),
            None => None,
        };
        let mut proof = self.store.rows_left(scope).await?;
        let looked_at = proof.len();
        if let Some(url) = nats_url {
            // What a second purge finds is what the first has left.
            let rows = relay_stream::admin::forget_workspace(url, scope).await?;
            proof.push(Erased { table: "jetstream".to_owned(), rows });
        }
        let files = self.store.file_objects_left(scope).await?;
        proof.push(Erased { table: "files".to_owned(), rows: u64::try_from(files).unwrap_or(u64::MAX) });
        let left = proof.iter().filter(|place| place.rows > 0).cloned().collect();
        Ok(Erasure { erased, purged, looked_at, proof, left })
    }
}

/// Why an export ended early.
enum Stopped {
    Store(StoreError),
    Writing,
}

impl From<StoreError> for Stopped {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}
