//! Bytes on their way in and out, in pieces, with bounded memory and bounded patience.

use std::time::Duration;

use bytes::Bytes;
use chrono::TimeDelta;
use futures::{Stream, StreamExt as _, stream::BoxStream};
use relay_blobs::{BlobError, BlobResult, Upload};
use relay_store::files::{FileRow, FileStatus};
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc},
    time::timeout,
};

use super::{Grant, key};
use crate::{Engine, EngineError, EngineResult};

/// The other side sends nothing, or takes nothing, for this long: it is gone.
const IDLE: Duration = Duration::from_secs(30);
/// An upload takes this long at most.
const UPLOAD_WITHIN: Duration = Duration::from_secs(3600);
/// When an upload that nobody finished is removed. Later than any upload lasts.
const REMOVED_AFTER: TimeDelta = TimeDelta::hours(2);
/// Pieces read ahead of a slow reader.
const READ_AHEAD: usize = 4;

/// A file on its way out.
pub struct Outgoing {
    /// The file.
    pub row: FileRow,
    /// Its bytes. Ends early with an error when the storage fails.
    pub bytes: BoxStream<'static, BlobResult<Bytes>>,
}

impl Engine {
    /// Takes the bytes of a file. Until the file is complete it may be uploaded again.
    ///
    /// The upload goes on by itself: whoever waits for it may go away, and what is given up then is cleaned.
    ///
    /// # Errors
    /// When the file is not there, not pending any more, or its bytes are not as many as declared; when
    /// they stop coming; when too many transfers are under way, or storage is away.
    pub async fn receive_file<S, E>(&self, grant: Grant, announced: Option<u64>, bytes: S) -> EngineResult<FileRow>
    where
        S: Stream<Item = Result<Bytes, E>> + Send + Unpin + 'static,
        E: Send + 'static,
    {
        let permit = self.transfer_permit()?;
        let row = self.store().file(grant.scope, grant.file).await?.ok_or(EngineError::FileNotFound)?;
        match row.status {
            FileStatus::Pending => {}
            FileStatus::Complete => return Err(EngineError::FileComplete),
            FileStatus::Deleted => return Err(EngineError::FileNotFound),
        }
        let declared = row.size_bytes.unsigned_abs();
        if let Some(announced) = announced.filter(|announced| *announced != declared) {
            return Err(wrong_size(announced, declared));
        }
        let engine = self.clone();
        let upload = tokio::spawn(async move {
            let done = engine.store_upload(grant, declared, bytes).await;
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
        let object = self.next_id();
        if !self.store().begin_upload(grant.scope, grant.file, object, self.now() + REMOVED_AFTER).await? {
            return Err(EngineError::FileNotFound);
        }
        let written = async {
            let mut upload = self.inner.files.blobs.upload(key(grant.scope, grant.file, object)).await?;
            match pump(&mut upload, declared, bytes).await {
                Ok(()) => Ok(upload.finish().await?),
                Err(error) => {
                    upload.abort().await;
                    Err(error)
                }
            }
        };
        let written = timeout(UPLOAD_WITHIN, written)
            .await
            .unwrap_or_else(|_| Err(broken("The upload took longer than an hour")));
        let taken = match written {
            Ok(()) => self.store().take_upload(grant.scope, grant.file, object).await.map_err(EngineError::from),
            Err(error) => Err(error),
        };
        if !matches!(taken, Ok(true)) {
            // If this fails too, the worker removes it in two hours.
            let _ = self.store().drop_upload(grant.scope, grant.file, object).await;
        }
        if taken? { Ok(()) } else { Err(EngineError::FileComplete) }
    }

    /// Hands out the bytes of a complete file.
    ///
    /// # Errors
    /// When the file is not there or not complete, too many transfers are under way, or storage is away.
    pub async fn send_file(&self, grant: Grant) -> EngineResult<Outgoing> {
        let permit = self.transfer_permit()?;
        let row = self.store().file(grant.scope, grant.file).await?.ok_or(EngineError::FileNotFound)?;
        let object = row.object_id.filter(|_| row.status == FileStatus::Complete);
        let object = object.ok_or(EngineError::FileNotFound)?;
        let bytes = self.inner.files.blobs.read(key(grant.scope, grant.file, object)).await?;
        let bytes = bytes.ok_or_else(|| {
            tracing::error!(file.id = %grant.file, object.id = object, "the bytes of a complete file are missing");
            EngineError::FileBytesMissing
        })?;
        let (sender, receiver) = mpsc::channel(READ_AHEAD);
        tokio::spawn(feed(bytes, sender, permit));
        let bytes = futures::stream::unfold(receiver, |mut receiver| async move {
            receiver.recv().await.map(|piece| (piece, receiver))
        });
        Ok(Outgoing { row, bytes: bytes.boxed() })
    }

    fn transfer_permit(&self) -> EngineResult<OwnedSemaphorePermit> {
        self.inner.files.transfers.clone().try_acquire_owned().map_err(|_| EngineError::Overloaded)
    }
}

/// Reads ahead of the reader a little. One that takes nothing for too long gets no more, so that it cannot
/// hold its place for ever.
async fn feed(
    mut bytes: BoxStream<'static, BlobResult<Bytes>>,
    sender: mpsc::Sender<BlobResult<Bytes>>,
    permit: OwnedSemaphorePermit,
) {
    while let Some(piece) = bytes.next().await {
        let failed = piece.is_err();
        if sender.send_timeout(piece, IDLE).await.is_err() {
            // Its answer breaks off: fewer bytes come than were announced.
            break;
        }
        if failed {
            break;
        }
    }
    drop(permit);
}

/// Passes exactly the declared number of bytes on.
async fn pump<S, E>(upload: &mut Upload, declared: u64, mut bytes: S) -> EngineResult<()>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let mut received = 0_u64;
    loop {
        let next = timeout(IDLE, bytes.next()).await.map_err(|_| broken("The upload stopped"))?;
        let Some(piece) = next else { break };
        let piece = piece.map_err(|_| broken("The upload broke off"))?;
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
        EngineError::InvalidRequest(format!("More bytes came than the {declared} that were declared"))
    } else {
        EngineError::InvalidRequest(format!("{received} bytes came where {declared} were declared"))
    }
}

fn broken(why: &str) -> EngineError {
    EngineError::InvalidRequest(why.to_owned())
}

impl From<BlobError> for EngineError {
    fn from(error: BlobError) -> Self {
        Self::FileStorage(error)
    }
}
