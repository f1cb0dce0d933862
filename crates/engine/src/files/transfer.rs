//! Transfers of file contents in pieces, with bounded memory and bounded time.

use std::time::Duration;

use bytes::Bytes;
use chrono::TimeDelta;
use futures::{Stream, StreamExt as _, stream::BoxStream};
use relay_blobs::{BlobError, BlobKey, BlobResult, Blobs, Upload};
use relay_domain::{
    FileObjectId,
    files::{File, FileStatus},
};
use relay_tasks::spawn_isolated;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};

use super::{Files, Grant, blob_key, permits::TransferPermit};
use crate::{
    EngineError, EngineResult,
    error::{BadCredential, Denial, Dependency, Fault, Missing},
};

/// A transfer without progress for this long is aborted.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(3600);
/// A transfer whose client is slower is aborted: it would hold a permit of its workspace for the whole hour.
const MIN_BYTES_PER_SECOND: u64 = 8 * 1024;
/// The speed is judged over this much waiting for the client, so that pauses are allowed.
const SPEED_WINDOW: Duration = Duration::from_secs(30);
/// Cleanup time of an unfinished upload. Later than any upload lasts.
const CLEANUP_AFTER: TimeDelta = TimeDelta::hours(2);
const READ_AHEAD: usize = 4;

pub struct FileDownload {
    pub row: File,
    /// The file's bytes. Ends early with an error when the storage fails.
    pub bytes: BoxStream<'static, BlobResult<Bytes>>,
}

impl Files {
    /// Uploads the bytes of a file. Until the file is complete it may be uploaded again.
    ///
    /// The upload runs in a task of its own: it goes on when the caller is cancelled, and cleans up after a failure.
    ///
    /// # Errors
    /// When the file is missing or no longer pending, the number of bytes differs from the declared one, they come too
    /// slowly, or too many transfers are in progress.
    pub async fn upload<S, E>(&self, grant: Grant, announced: Option<u64>, bytes: S) -> EngineResult<File>
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
        // The task has panicked, perhaps after the upload was attached.
        upload.await.map_err(|_| EngineError::OutcomeUnknown)??;
        Ok(row)
    }

    async fn store_upload<S, E>(&self, grant: Grant, declared: u64, bytes: S) -> EngineResult<()>
    where
        S: Stream<Item = Result<Bytes, E>> + Unpin,
    {
        // Each upload has an object of its own, so that concurrent uploads of a file never mix their bytes.
        let object = FileObjectId::new(self.core.next_id());
        // The row precedes the first byte, so that the worker finds whatever a crash leaves behind.
        if !self.core.store.begin_upload(grant.scope, grant.file, object, self.core.now() + CLEANUP_AFTER).await? {
            return Err(EngineError::NotFound(Missing::File));
        }
        let written =
            write_object(&self.storage.blobs, blob_key(grant.scope, grant.file, object), declared, bytes).await;
        // Attached only when all bytes are stored: a reader never sees a part of a file.
        let taken = match written {
            Ok(()) => self.core.store.attach_upload(grant.scope, grant.file, object).await.map_err(EngineError::from),
            Err(error) => Err(error),
        };
        // Also after an unknown outcome: an object that was attached has no removal time, and is left alone.
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
            tracing::error!(file.id = %grant.file, object.id = %object, "the bytes of a complete file are missing");
            EngineError::Internal(Fault::FileBytesMissing)
        })?;
        Ok(FileDownload { row, bytes: at_pace_of_client(bytes, permit) })
    }

    /// Acquires a permit for a transfer and reads the file. Files of a deleted workspace are deleted; those of an
    /// expired one are kept for a while, and refused.
    async fn begin_transfer(&self, grant: Grant) -> EngineResult<(TransferPermit, File)> {
        // Before the reads, so that a flood of transfers costs no queries.
        let permit =
            self.storage.transfers.try_acquire(self.core.family(grant.scope).await).ok_or(EngineError::Overloaded)?;
        if self.core.store.is_workspace_expired(grant.scope).await? {
            return Err(EngineError::Unauthenticated(BadCredential::WorkspaceExpired));
        }
        let row = self.core.store.file(grant.scope, grant.file).await?.ok_or(EngineError::NotFound(Missing::File))?;
        Ok((permit, row))
    }
}

/// Speed of a client. Only the time spent waiting for it counts, so that a slow storage is not held against it.
#[derive(Debug, Default)]
struct ClientSpeed {
    waited: Duration,
    bytes: u64,
}

impl ClientSpeed {
    /// Adds a piece and the wait for it. Returns whether the client is fast enough.
    fn add(&mut self, waited: Duration, bytes: usize) -> bool {
        self.waited += waited;
        self.bytes = self.bytes.saturating_add(bytes as u64);
        if self.waited < SPEED_WINDOW {
            return true;
        }
        let is_fast_enough = self.bytes >= MIN_BYTES_PER_SECOND * self.waited.as_secs();
        *self = Self::default();
        is_fast_enough
    }
}

/// Reads a little ahead of the reader. A reader that is too slow gets no more, so that it cannot hold its permit for
/// long: the response breaks off, and fewer bytes arrive than announced.
async fn read_ahead(mut bytes: BoxStream<'static, BlobResult<Bytes>>, sender: mpsc::Sender<BlobResult<Bytes>>) {
    let mut speed = ClientSpeed::default();
    while let Some(piece) = bytes.next().await {
        let (failed, length) = (piece.is_err(), piece.as_ref().map_or(0, Bytes::len));
        let began = Instant::now();
        let sent = sender.send_timeout(piece, IDLE_TIMEOUT).await;
        if sent.is_err() || failed || !speed.add(began.elapsed(), length) {
            break;
        }
    }
}

/// Passes a file on to a client. Its permit is returned once the storage was read, or the client has taken too long.
fn at_pace_of_client(
    bytes: BoxStream<'static, BlobResult<Bytes>>,
    permit: TransferPermit,
) -> BoxStream<'static, BlobResult<Bytes>> {
    // Bounds the memory of a download; the client's pace holds the reader back.
    let (sender, receiver) = mpsc::channel(READ_AHEAD);
    spawn_isolated("request", async move {
        // The response breaks off when it takes longer: fewer bytes arrive than announced.
        let _ = timeout(TRANSFER_TIMEOUT, read_ahead(bytes, sender)).await;
        drop(permit);
    });
    let bytes = futures::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|piece| (piece, receiver))
    });
    bytes.boxed()
}

/// Writes an object of exactly the declared number of bytes, within the time of a transfer.
async fn write_object<S, E>(blobs: &Blobs, key: BlobKey, declared: u64, bytes: S) -> EngineResult<()>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let written = async {
        let mut upload = blobs.upload(key).await?;
        match copy_exactly(&mut upload, declared, bytes).await {
            Ok(()) => Ok(upload.finish().await?),
            Err(error) => {
                // Not just dropped: a bucket keeps the parts of an upload that was not aborted.
                upload.abort().await;
                Err(error)
            }
        }
    };
    let written = timeout(TRANSFER_TIMEOUT, written).await;
    written.unwrap_or_else(|_| Err(upload_failed("The upload took longer than an hour")))
}

/// Copies exactly the declared number of bytes.
async fn copy_exactly<S, E>(upload: &mut Upload, declared: u64, mut bytes: S) -> EngineResult<()>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    let (mut received, mut speed) = (0_u64, ClientSpeed::default());
    loop {
        let began = Instant::now();
        let next = timeout(IDLE_TIMEOUT, bytes.next()).await.map_err(|_| upload_failed("The upload stopped"))?;
        let Some(piece) = next else { break };
        let piece = piece.map_err(|_| upload_failed("The upload broke off"))?;
        if !speed.add(began.elapsed(), piece.len()) {
            return Err(upload_failed("The upload was too slow: send at least 8 KiB per second"));
        }
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

#[cfg(test)]
mod tests {
    use relay_blobs::BlobConfig;
    use relay_domain::{WorkspaceId, workspaces::family::FamilyId};

    use super::*;
    use crate::files::permits::TransferPermits;

    const PIECE: usize = 8 * 1024;
    /// Pace of a client that is fast enough, with few pieces.
    const PAUSE: Duration = Duration::from_secs(20);
    const LARGE_PIECE: usize = 32 * PIECE;

    /// Downloads a file of ten minutes at the minimum rate, in pieces that the client takes at this pace. Returns
    /// whether it arrives.
    async fn downloads_at(pace: Duration) -> bool {
        const PIECES: usize = 600;
        let (sender, mut receiver) = mpsc::channel(READ_AHEAD);
        let pieces = futures::stream::iter((0..PIECES).map(|_| Ok(Bytes::from_static(&[0; PIECE]))));
        let reading = read_ahead(pieces.boxed(), sender);
        let client = async {
            let mut taken = 0;
            while receiver.recv().await.is_some() {
                taken += 1;
                tokio::time::sleep(pace).await;
            }
            taken
        };
        tokio::join!(reading, client).1 == PIECES
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_must_be_fast_enough() {
        assert!(downloads_at(Duration::ZERO).await);
        assert!(downloads_at(Duration::from_millis(900)).await);
        assert!(!downloads_at(Duration::from_millis(1200)).await, "too slow on average");
        assert!(!downloads_at(Duration::from_secs(29)).await, "as slow as one without a minimum rate could be");
    }

    /// Pieces without an end.
    fn endless() -> impl Stream<Item = BlobResult<Bytes>> + Send {
        futures::stream::repeat_with(|| Ok(Bytes::from_static(&[0; LARGE_PIECE])))
    }

    #[tokio::test(start_paused = true)]
    async fn a_download_ends_after_an_hour_and_leaves_its_permit() {
        let (permits, family) = (TransferPermits::default(), FamilyId::of_workspace(WorkspaceId::new(1), None));
        let mut taken: Vec<_> = std::iter::from_fn(|| permits.try_acquire(family)).collect();
        let began = Instant::now();
        let mut download = at_pace_of_client(endless().boxed(), taken.pop().unwrap());
        while download.next().await.is_some() {
            tokio::time::sleep(PAUSE).await;
            if began.elapsed() < TRANSFER_TIMEOUT {
                assert!(permits.try_acquire(family).is_none(), "the permit is taken");
            }
        }
        // Pieces that were read ahead arrive later.
        let late = PAUSE * (u32::try_from(READ_AHEAD).unwrap() + 2);
        assert!((TRANSFER_TIMEOUT..TRANSFER_TIMEOUT + late).contains(&began.elapsed()), "{:?}", began.elapsed());
        assert!(permits.try_acquire(family).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn an_upload_ends_after_an_hour() {
        let folder = tempfile::tempdir().unwrap();
        let blobs = Blobs::new(BlobConfig::Directory(folder.path().to_owned()));
        let key = BlobKey { workspace: 1, file: 2, object: 3 };
        let began = Instant::now();
        let pieces = endless().then(|piece| async {
            tokio::time::sleep(PAUSE).await;
            piece
        });
        let written = write_object(&blobs, key, u64::MAX, pieces.boxed()).await;
        let error = written.expect_err("it never ends").to_string();
        assert!(error.contains("longer than an hour"), "{error}");
        assert!((TRANSFER_TIMEOUT..TRANSFER_TIMEOUT + PAUSE).contains(&began.elapsed()), "{:?}", began.elapsed());
        assert!(blobs.read(key).await.unwrap().is_none(), "nothing is kept");
    }

    #[test]
    fn a_pause_is_allowed_within_a_fast_transfer() {
        let mut speed = ClientSpeed::default();
        assert!(speed.add(Duration::from_secs(1), 1 << 20));
        assert!(speed.add(Duration::from_secs(29), PIECE));
        assert!(!speed.add(Duration::from_secs(30), PIECE), "the next window counts for itself");
    }
}
