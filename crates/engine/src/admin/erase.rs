//! A workspace written out, and removed for good.

use std::time::{Duration, Instant};

use relay_domain::{WorkspaceId, WorkspaceScope};
use relay_store::{
    StoreError,
    admin::{Erased, ExportedRow, OWN_TABLE},
};

use super::Admin;
use crate::{EngineError, EngineResult};

/// Workers look for files to remove each 10 s.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// What was under way when the workspace was deleted may write for a moment; so rows are removed until none came back.
const ROUNDS: usize = 5;

/// The place of a proof that stands for what JetStream holds.
const JETSTREAM: &str = "jetstream";

/// What became of an erasure.
#[derive(Debug, serde::Serialize)]
pub struct Erasure {
    /// Whether there was such a workspace; `false` if it was erased before, or never was.
    pub was_there: bool,
    /// Rows removed, by table.
    pub erased: Vec<Erased>,
    /// Messages removed from JetStream; `None` when no NATS was named.
    pub purged: Option<u64>,
    /// Tables that were looked at afterwards.
    pub looked_at: usize,
    /// Every place that was looked at afterwards, with what is left of the workspace there: tables and partitions, the
    /// streams of JetStream, the files.
    pub proof: Vec<Place>,
    /// Those with something left, or that nobody could look at: none, or it was not erased.
    pub left: Vec<Place>,
}

/// A place that may hold something of a workspace.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Place {
    /// A table, a partition, `jetstream` or `files`.
    pub table: String,
    /// Rows, messages or files that are left there; `None` when nobody looked.
    pub rows: Option<u64>,
}

impl Erasure {
    /// Whether JetStream was asked what it holds.
    #[must_use]
    pub const fn looked_at_jetstream(&self) -> bool {
        self.purged.is_some()
    }
}

impl Admin {
    /// Deletes a workspace: its tokens are dead, and its files go. Returns how many tokens that were. Its rows stay until retention,
    /// [`Self::erase_workspace`], or a worker that erases it 30 days later.
    ///
    /// # Errors
    /// When there is no workspace of this id, or storage is away.
    pub async fn delete_workspace(&self, id: WorkspaceId) -> EngineResult<usize> {
        let scope = WorkspaceScope::from_engine_row(id);
        self.store.is_deleted(scope).await?.ok_or(EngineError::WorkspaceNotFound)?;
        let now = chrono::DateTime::from_timestamp_millis(self.store.ping().await?).unwrap_or_default();
        Ok(self.store.delete_workspace(scope, now).await?.len())
    }

    /// Calls `each` with each row as JSON, in one snapshot. Left out are tokens, the keys of repeated requests, the search
    /// index, and the bytes of files.
    ///
    /// # Errors
    /// When there is no such workspace, storage is away, or `each` fails.
    pub async fn export_workspace(
        &self,
        scope: WorkspaceScope,
        mut each: impl FnMut(&ExportedRow<'_>) -> std::io::Result<()>,
    ) -> EngineResult<()> {
        self.store.is_deleted(scope).await?.ok_or(EngineError::WorkspaceNotFound)?;
        let mut wrote = Ok(());
        let outcome = self
            .store
            .export_workspace(scope, |row| -> Result<(), Stopped> {
                each(row).map_err(|error| {
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
    /// removes them, which is waited for. Then the frames, then the rows; the workspace's own row goes when nothing else is left, and NATS
    /// was there to say so. `each` hears how many tables are done, and of how many.
    ///
    /// One that is erased already, or never was, is looked for in all the same places.
    ///
    /// # Errors
    /// When it is not deleted, a worker does not remove its files within `patience`, or storage or the NATS that was named is away. What was
    /// removed stays removed: ask again.
    pub async fn erase_workspace(
        &self,
        id: WorkspaceId,
        nats_url: Option<&str>,
        patience: Duration,
        mut each: impl FnMut(u64, u64),
    ) -> EngineResult<Erasure> {
        // Nobody's id: keys of the anonymous are kept under it.
        if id.get() == 0 {
            return Err(EngineError::WorkspaceNotFound);
        }
        let scope = WorkspaceScope::from_engine_row(id);
        let was_there = match self.store.is_deleted(scope).await? {
            Some(false) => return Err(EngineError::InvalidRequest("the workspace is alive: delete it first".into())),
            known => known.is_some(),
        };
        self.wait_for_files(scope, patience).await?;
        // Before the rows: without NATS it fails while everything else is still there.
        let mut purged = forget(nats_url, scope).await?;
        let mut erased: Vec<Erased> = Vec::new();
        for round in 0..ROUNDS {
            let removed = self
                .store
                .erase_workspace(scope, |done, of| {
                    if round == 0 {
                        each(done, of);
                    }
                })
                .await?;
            let nothing = removed.iter().all(|table| table.rows == 0);
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
        // What was published meanwhile; what a further purge finds then is what is left.
        let meanwhile = forget(nats_url, scope).await?;
        purged = purged.zip(meanwhile).map(|(first, second)| first + second);
        let jetstream = Place { table: JETSTREAM.to_owned(), rows: forget(nats_url, scope).await? };
        let files =
            Place { table: "files".to_owned(), rows: Some(self.store.file_objects_left(scope).await?.unsigned_abs()) };
        let mut proof: Vec<Place> = self.store.rows_left(scope).await?.into_iter().map(Place::from).collect();
        let looked_at = proof.len();
        proof.extend([jetstream, files]);
        if proof.iter().all(|place| place.table == OWN_TABLE || place.rows == Some(0)) {
            erased.push(Erased { table: OWN_TABLE.to_owned(), rows: self.store.erase_own_row(scope).await? });
            let own = u64::from(self.store.is_deleted(scope).await?.is_some());
            for place in proof.iter_mut().filter(|place| place.table == OWN_TABLE) {
                place.rows = Some(own);
            }
        }
        let left = proof.iter().filter(|place| place.rows != Some(0)).cloned().collect();
        Ok(Erasure { was_there, erased, purged, looked_at, proof, left })
    }

    /// Waits until a worker has removed the bytes of the workspace's files.
    async fn wait_for_files(&self, scope: WorkspaceScope, patience: Duration) -> EngineResult<()> {
        let since = Instant::now();
        loop {
            let files = self.store.file_objects_left(scope).await?;
            if files == 0 {
                return Ok(());
            }
            if since.elapsed() >= patience {
                return Err(EngineError::InvalidRequest(format!(
                    "the bytes of {files} files are still there: a worker removes them, does one run?"
                )));
            }
            tokio::time::sleep(ASK_AGAIN_AFTER).await;
        }
    }
}

impl From<Erased> for Place {
    fn from(table: Erased) -> Self {
        Self { table: table.table, rows: Some(table.rows) }
    }
}

/// Removes what JetStream holds of a workspace. Returns how many messages that were; `None` when no NATS was named.
async fn forget(nats_url: Option<&str>, scope: WorkspaceScope) -> EngineResult<Option<u64>> {
    match nats_url {
        Some(url) => Ok(Some(relay_stream::admin::forget_workspace(url, scope).await?)),
        None => Ok(None),
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
