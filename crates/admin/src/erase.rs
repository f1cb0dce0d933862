//! Export and permanent erasure of a workspace.

use std::time::Duration;

use relay_domain::{WorkspaceId, WorkspaceScope};
use relay_store::{
    StoreError,
    admin::{ExportedRow, TableRowCount, WORKSPACES_TABLE},
};
use relay_stream::NatsServers;
use tokio::time::Instant;

use super::Admin;
use relay_engine::{EngineError, EngineResult, error::Missing};

/// Workers remove files every 10 s.
const POLL_EVERY: Duration = Duration::from_secs(1);
/// Requests that were in progress during the deletion may still write for a moment, so rows are removed until a round
/// finds none.
const MAX_ROUNDS: usize = 5;

/// Name of the check that covers JetStream.
const JETSTREAM: &str = "jetstream";

/// Result of an erasure.
#[derive(Debug, serde::Serialize)]
pub struct Erasure {
    /// True if the workspace existed; false if it was erased before or never existed.
    pub was_there: bool,
    pub erased: Vec<TableRowCount>,
    /// Messages removed from JetStream; `None` without a NATS URL.
    pub purged: Option<u64>,
    /// Number of tables checked afterwards.
    pub looked_at: usize,
    /// All places checked afterwards, with their leftovers: tables and partitions, the streams of JetStream, the files.
    pub proof: Vec<LeftoverCount>,
    /// Checks with leftovers, or that could not run. Empty if and only if the workspace was erased.
    pub left: Vec<LeftoverCount>,
}

/// Leftovers of a workspace in one place.
#[derive(Debug, Clone, serde::Serialize)]
pub struct LeftoverCount {
    /// Table, partition, `jetstream` or `files`.
    pub table: String,
    /// Rows, messages or files found; `None` when the check could not run.
    pub rows: Option<u64>,
}

impl Erasure {
    #[must_use]
    pub const fn includes_jetstream(&self) -> bool {
        self.purged.is_some()
    }
}

impl Admin {
    /// Deletes a workspace: its tokens are revoked and its files removed. Returns the number of tokens. Its rows stay
    /// until retention, [`Self::erase_workspace`], or a worker that erases it 30 days later.
    ///
    /// # Errors
    /// When there is no workspace of this id.
    pub async fn delete_workspace(&self, id: WorkspaceId) -> EngineResult<u64> {
        let scope = WorkspaceScope::from_engine_row(id);
        self.store.is_deleted(scope).await?.ok_or(EngineError::NotFound(Missing::Workspace))?;
        let now = self.store.now().await?;
        Ok(self.store.delete_workspace(scope, now).await?)
    }

    /// Calls `each` with each row as JSON, in one snapshot. Excluded are tokens, idempotency keys, the search index,
    /// and the bytes of files.
    ///
    /// # Errors
    /// When there is no such workspace, or `each` fails.
    pub async fn export_workspace(
        &self,
        scope: WorkspaceScope,
        mut each: impl FnMut(&ExportedRow<'_>) -> std::io::Result<()>,
    ) -> EngineResult<()> {
        self.store.is_deleted(scope).await?.ok_or(EngineError::NotFound(Missing::Workspace))?;
        // The store returns errors of its own type only, so the error of the writer is kept here.
        let mut wrote = Ok(());
        let outcome = self
            .store
            .export_workspace(scope, |row| -> Result<(), ExportError> {
                each(row).map_err(|error| {
                    wrote = Err(error);
                    ExportError::Writing
                })
            })
            .await;
        match outcome {
            Ok(()) => Ok(()),
            Err(ExportError::Store(error)) => Err(error.into()),
            Err(ExportError::Writing) => Err(EngineError::invalid_request(format!(
                "the export could not be written: {}",
                wrote.err().map_or_else(String::new, |error| error.to_string())
            ))),
        }
    }

    /// Removes every row and every stored frame of a *deleted* workspace, and counts the leftovers. The bytes of its
    /// files go first; a worker removes them, and this waits for it. Then the frames, then the rows; the workspace's
    /// own row goes last, when all checks found nothing. `each` receives the number of tables done and the total.
    ///
    /// A workspace that was erased before, or never existed, gets the same checks.
    ///
    /// # Errors
    /// When it is not deleted, or no worker removes its files within `timeout`. Whatever was removed stays removed:
    /// repeat the command.
    pub async fn erase_workspace(
        &self,
        id: WorkspaceId,
        nats: Option<&NatsServers>,
        timeout: Duration,
        mut each: impl FnMut(u64, u64),
    ) -> EngineResult<Erasure> {
        // Id 0 owns the idempotency keys of anonymous callers.
        if id.get() == 0 {
            return Err(EngineError::NotFound(Missing::Workspace));
        }
        let scope = WorkspaceScope::from_engine_row(id);
        let was_there = match self.store.is_deleted(scope).await? {
            Some(false) => {
                return Err(EngineError::invalid_request("the workspace is alive: delete it first"));
            }
            known => known.is_some(),
        };
        self.wait_for_files(scope, timeout).await?;
        // Before the rows: when NATS is unavailable, this fails while all rows still exist.
        let mut purged = purge_jetstream(nats, scope).await?;
        let mut erased: Vec<TableRowCount> = Vec::new();
        for round in 0..MAX_ROUNDS {
            let removed = self
                .store
                .erase_workspace(scope, |done, of| {
                    // Later rounds find little, and would set the progress back to the start.
                    if round == 0 {
                        each(done, of);
                    }
                })
                .await?;
            let nothing = removed.iter().all(|table| table.rows == 0);
            // Rounds are added up, so that the report has one line for each table.
            for table in removed {
                match erased.iter_mut().find(|known| known.table == table.table) {
                    Some(known) => known.rows += table.rows,
                    None => erased.push(table),
                }
            }
            if nothing {
                break;
            }
        }
        // Messages that were published during the erasure; a third purge then counts the leftovers.
        let meanwhile = purge_jetstream(nats, scope).await?;
        purged = purged.zip(meanwhile).map(|(first, second)| first + second);
        let jetstream = LeftoverCount { table: JETSTREAM.to_owned(), rows: purge_jetstream(nats, scope).await? };
        let files = LeftoverCount {
            table: "files".to_owned(),
            rows: Some(self.store.count_file_objects(scope).await?.unsigned_abs()),
        };
        let mut proof: Vec<LeftoverCount> =
            self.store.count_rows_left(scope).await?.into_iter().map(LeftoverCount::from).collect();
        let looked_at = proof.len();
        proof.extend([jetstream, files]);
        // A place that could not be checked has no number and keeps the row, so that the command can be repeated.
        if proof.iter().all(|place| place.table == WORKSPACES_TABLE || place.rows == Some(0)) {
            erased.push(TableRowCount {
                table: WORKSPACES_TABLE.to_owned(),
                rows: self.store.erase_own_row(scope).await?,
            });
            // Read again instead of trusting the count, as for the other tables.
            let own = u64::from(self.store.is_deleted(scope).await?.is_some());
            for place in proof.iter_mut().filter(|place| place.table == WORKSPACES_TABLE) {
                place.rows = Some(own);
            }
        }
        let left = proof.iter().filter(|place| place.rows != Some(0)).cloned().collect();
        Ok(Erasure { was_there, erased, purged, looked_at, proof, left })
    }

    async fn wait_for_files(&self, scope: WorkspaceScope, timeout: Duration) -> EngineResult<()> {
        let since = Instant::now();
        loop {
            let files = self.store.count_file_objects(scope).await?;
            if files == 0 {
                return Ok(());
            }
            if since.elapsed() >= timeout {
                return Err(EngineError::invalid_request(format!(
                    "the bytes of {files} files are still there: a worker removes them, does one run?"
                )));
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
    }
}

impl From<TableRowCount> for LeftoverCount {
    fn from(table: TableRowCount) -> Self {
        Self { table: table.table, rows: Some(table.rows) }
    }
}

/// Purges the messages of a workspace from JetStream. Returns their number; `None` without a NATS URL.
async fn purge_jetstream(nats: Option<&NatsServers>, scope: WorkspaceScope) -> EngineResult<Option<u64>> {
    match nats {
        Some(servers) => Ok(Some(relay_stream::admin::purge_workspace(servers, scope).await?)),
        None => Ok(None),
    }
}

enum ExportError {
    Store(StoreError),
    Writing,
}

impl From<StoreError> for ExportError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}
