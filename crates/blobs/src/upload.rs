//! Uploads of objects in parts. Main type: [`Upload`].

use std::sync::Arc;

use bytes::Bytes;
use object_store::{ObjectStore, buffered::BufWriter, path::Path};
use tokio::io::AsyncWriteExt as _;

use crate::{BlobError, BlobResult};

/// Part size: the minimum that buckets accept. Smaller objects are sent in one request.
const PART_BYTES: usize = 5 << 20;
/// Maximum number of parts in flight per upload.
const PARTS: usize = 2;

/// Object that is being written. Finish or abort it; dropping it leaves parts behind.
#[derive(Debug)]
pub struct Upload {
    writer: BufWriter,
}

impl Upload {
    pub(crate) fn new(store: Arc<dyn ObjectStore>, path: Path) -> Self {
        Self { writer: BufWriter::with_capacity(store, path, PART_BYTES).with_max_concurrency(PARTS) }
    }

    /// Appends bytes. Waits while the storage is slower than the sender.
    ///
    /// # Errors
    /// If the storage fails. Abort the upload then.
    pub async fn push(&mut self, bytes: Bytes) -> BlobResult<()> {
        self.writer.put(bytes).await.map_err(BlobError::from_storage("writing"))
    }

    /// Makes the object visible as a whole.
    ///
    /// # Errors
    /// If the storage fails; the object does not exist then.
    pub async fn finish(mut self) -> BlobResult<()> {
        self.writer.shutdown().await.map_err(BlobError::Finish)
    }

    /// Aborts the upload. Parts that the storage does not remove now are removed later, because the object's name is
    /// known before its first byte.
    pub async fn abort(mut self) {
        let _ = self.writer.abort().await;
    }
}
