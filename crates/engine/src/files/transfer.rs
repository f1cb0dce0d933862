//! Transfers of file contents in pieces, with bounded memory and bounded time.

use std::time::Duration;

use bytes::Bytes;
use chrono::TimeDelta;
use futures::{Stream, StreamExt as _, stream::BoxStream};
use relay_blobs::{BlobError, BlobResult, Upload};
use relay_domain::files::FileStatus;
use relay_store::files::metadata::FileRow;
use relay_tasks::spawn_isolated;
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc},
    time::timeout,
};

use super::{Files, Grant, blob_key};
use crate::{
    EngineError, EngineResult,
    error::{BadCredential, Denial, Dependency, Fault, Missing},
};

/// A transfer without progress for this long is aborted.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(3600);
/// Cleanup time of an unfinished upload. Later than any upload lasts.
const CLEANUP_AFTER: TimeDelta = TimeDelta::hours(2);
const READ_AHEAD: usize = 4;

pub struct FileDownload {
    pub row: FileRow,
    /// The file's bytes. Ends early with an error when the storage fails.
    pub bytes: BoxStream<'static, BlobResult<Bytes>>,
}

impl Files {
    /// Uploads the bytes of a file. Until the file is complete it may be uploaded again.
    ///
    /// The upload runs in a task of its own: it goes on when the caller is cancelled, and cleans up after a failure.
    ///
    /// # Errors
    /// When the file is missing or no longer pending, the number of bytes differs from the declared one, they stop
    /// coming, or too many transfers are in progress.
    pub async fn upload<S, E>(&self, grant: Grant, announced: Option<u64>, bytes: S) -> EngineResult<FileRow>
    where
        S: Stream<Item = Result<Bytes, E>> + Send + Unpin + 'static,
        E: Send + 'static,
    {
        let (permit, row) = self.begin_transfer(grant).await?;
        match row.status {
            FileStatus::Pending => {}
            FileStatus::Complete => return Err(EngineError::Forbidden(Denial::FileComplete)),
            FileStatus::Deleted => return Err(EngineError::NotFound(Missing::File)),
        }
        // Refused before a byte is stored. Without an announcement the copy counts the bytes.
        let declared = row.size_bytes.unsigned_abs();
        if let Some(announced) = announced.filter(|announced| *announced != declared) {
            return Err(wrong_size(announced, declared));
        }
        let files = self.clone();
        let upload = spawn_isolated("request", async move {
            let done = files.store_upload(grant, declared, bytes).await;
            drop(permit);
            done
        });
        upload.await.map_err(|_| EngineError::OutcomeUnknown)??;
        Ok(row)
    }

    async fn store_upload<S, E>(&self, grant: Grant, declared: u64, bytes: S) -> EngineResult<()>
    where
        S: Stream<Item = Result<Bytes, E>> + Unpin,
    {
        // Each upload has an object of its own, so that concurrent uploads of a file never mix their bytes.
        let object = self.core.next_id();
        if !self.core.store.begin_upload(grant.scope, grant.file, object, self.core.now() + CLEANUP_AFTER).await? {
            return Err(EngineError::NotFound(Missing::File));
        }
        let written = async {
            let mut upload = self.storage.blobs.upload(blob_key(grant.scope, grant.file, object)).await?;
            match copy_exactly(&mut upload, declared, bytes).await {
                Ok(()) => Ok(upload.finish().await?),
                Err(error) => {
                    upload.abort().await;
                    Err(error)
                }
            }
        };
        let written = timeout(UPLOAD_TIMEOUT, written)
            .await
            .unwrap_or_else(|_| Err(upload_failed("The upload took longer than an hour")));
        // Attached only when all bytes are stored: a reader never sees a part of a file.
        let taken = match written {
            Ok(()) => self.core.store.attach_upload(grant.scope, grant.file, object).await.map_err(EngineError::from),
            Err(error) => Err(error),
        };
        if !matches!(taken, Ok(true)) {
            // If this fails too, the worker removes the object in two hours.
            let _ = self.core.store.discard_upload(grant.scope, grant.file, object).await;
        }
        if taken? { Ok(()) } else { Err(EngineError::Forbidden(Denial::FileComplete)) }
    }

    /// Opens the bytes of a complete file.
    ///
    /// # Errors
    /// When the file is missing or incomplete, or too many transfers are in progress.
    pub async fn download(&self, grant: Grant) -> EngineResult<FileDownload> {
        let (permit, row) = self.begin_transfer(grant).await?;
        let object = row.object_id.filter(|_| row.status == FileStatus::Complete);
        let object = object.ok_or(EngineError::NotFound(Missing::File))?;
        let bytes = self.storage.blobs.read(blob_key(grant.scope, grant.file, object)).await?;
        let bytes = bytes.ok_or_else(|| {
            tracing::error!(file.id = %grant.file, object.id = object, "the bytes of a complete file are missing");
            EngineError::Internal(Fault::FileBytesMissing)
        })?;
        // Bounds the memory of a download; the client's pace holds the reader back.
        let (sender, receiver) = mpsc::channel(READ_AHEAD);
        spawn_isolated("request", read_ahead(bytes, sender, permit));
        let bytes = futures::stream::unfold(receiver, |mut receiver| async move {
            receiver.recv().await.map(|piece| (piece, receiver))
        });
        Ok(FileDownload { row, bytes: bytes.boxed() })
    }

    /// Takes a place for a transfer and reads the file. Files of a deleted workspace are deleted; those of an expired one
    /// are kept for a while, and refused.
    async fn begin_transfer(&self, grant: Grant) -> EngineResult<(OwnedSemaphorePermit, FileRow)> {
        // Before the reads, so that a flood of transfers costs no queries.
        let permit = self.storage.transfers.clone().try_acquire_owned().map_err(|_| EngineError::Overloaded)?;
        if self.core.store.is_workspace_expired(grant.scope).await? {
            return Err(EngineError::Unauthenticated(BadCredential::WorkspaceExpired));
        }
        let row = self.core.store.file(grant.scope, grant.file).await?.ok_or(EngineError::NotFound(Missing::File))?;
        Ok((permit, row))
    }
}

/// Reads a little ahead of the reader. A reader without progress gets no more, so that it cannot hold its permit for
/// ever.
async fn read_ahead(
    mut bytes: BoxStream<'static, BlobResult<Bytes>>,
    sender: mpsc::Sender<BlobResult<Bytes>>,
    permit: OwnedSemaphorePermit,
) {
    while let Some(piece) = bytes.next().await {
        let failed = piece.is_err();
        if sender.send_timeout(piece, IDLE_TIMEOUT).await.is_err() {
            // The response breaks off: fewer bytes arrive than announced.
            break;
        }
        if failed {
            break;
        }
    }
    drop(permit);
}

/// Copies exactly the declared number of bytes.
async fn copy_exactly<S, E>(upload: &mut Upload, declared: u64, mut bytes: S) -> EngineResult<()>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let mut received = 0_u64;
    loop {
        let next = timeout(IDLE_TIMEOUT, bytes.next()).await.map_err(|_| upload_failed("The upload stopped"))?;
        let Some(piece) = next else { break };
        let piece = piece.map_err(|_| upload_failed("The upload broke off"))?;
        received = received.saturating_add(piece.len() as u64);
        if received > declared {
            return Err(wrong_size(received, declared));
        }
        upload.push(piece).await?;
    }
    if received == declared { Ok(()) } else { Err(wrong_size(received, declared)) }
}

fn wrong_size(received: u64, declared: u64) -> EngineError {
    if received > declared {
        EngineError::invalid_request(format!("More bytes came than the {declared} that were declared"))
    } else {
        EngineError::invalid_request(format!("{received} bytes came where {declared} were declared"))
    }
}

fn upload_failed(why: &str) -> EngineError {
    EngineError::invalid_request(why.to_owned())
}

impl From<BlobError> for EngineError {
    fn from(error: BlobError) -> Self {
        Self::DependencyUnavailable(Dependency::FileStorage(error))
    }
}
