//! An object on its way in, piece by piece.

use std::sync::Arc;

use bytes::Bytes;
use object_store::{ObjectStore, buffered::BufWriter, path::Path};
use tokio::io::AsyncWriteExt as _;

use crate::{BlobError, BlobResult};

/// Bytes kept in memory before a part is sent: the least that buckets take as a part. Smaller objects go
/// out in one request.
const PART_BYTES: usize = 5 << 20;
/// Parts under way at once, for each upload.
const PARTS: usize = 2;

/// An object that is being written. Dropping it leaves parts behind: finish it or give it up.
#[derive(Debug)]
pub struct Upload {
    writer: BufWriter,
}

impl Upload {
    pub(crate) fn new(store: Arc<dyn ObjectStore>, path: Path) -> Self {
        Self { writer: BufWriter::with_capacity(store, path, PART_BYTES).with_max_concurrency(PARTS) }
    }

    /// Adds bytes. Waits while the storage is slower than they come.
    ///
    /// # Errors
    /// When the storage fails. Give the upload up then.
    pub async fn push(&mut self, bytes: Bytes) -> BlobResult<()> {
        self.writer.put(bytes).await.map_err(BlobError::of("writing"))
    }

    /// Makes the object visible, as a whole.
    ///
    /// # Errors
    /// When the storage fails; the object is not there then.
    pub async fn finish(mut self) -> BlobResult<()> {
        self.writer.shutdown().await.map_err(BlobError::Finish)
    }

    /// Gives the upload up. What the storage does not remove now it is asked to remove later: an
    /// object's name is known before its first byte.
    pub async fn abort(mut self) {
        let _ = self.writer.abort().await;
    }
}
