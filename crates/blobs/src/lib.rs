//! File contents in a directory or in a bucket with an S3-compatible API.
//!
//! Objects are named by [`BlobKey`], which consists of ids only: client text never becomes part of a path. The engine
//! decides on meaning, access and lifetime of objects; this crate writes, reads and deletes them with bounded memory.

mod config;
mod error;
mod upload;

use std::{fmt, sync::Arc};

use bytes::Bytes;
use futures::{StreamExt as _, stream::BoxStream};
use object_store::{ObjectStore, ObjectStoreExt as _, local::LocalFileSystem, path::Path};
use tokio::sync::OnceCell;

pub use config::{BlobConfig, S3Config};
pub use error::{BlobError, BlobResult};
pub use upload::Upload;

/// Name of an object: its workspace, its file, and the upload that created it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlobKey {
    /// Id of the workspace.
    pub workspace: i64,
    /// Id of the file.
    pub file: i64,
    /// Id of the upload. Every upload has its own object, so that concurrent uploads cannot overwrite each other.
    pub object: i64,
}

impl BlobKey {
    fn path(self) -> Path {
        let Self { workspace, file, object } = self;
        Path::from_iter([workspace.to_string(), file.to_string(), object.to_string()])
    }
}

impl fmt::Display for BlobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.workspace, self.file, self.object)
    }
}

/// Handle on file storage. Cheap to clone; opened on first use, so a process that touches no file needs no storage.
#[derive(Clone)]
pub struct Blobs {
    inner: Arc<Inner>,
}

struct Inner {
    config: BlobConfig,
    store: OnceCell<Arc<dyn ObjectStore>>,
}

impl Blobs {
    /// Creates a handle without opening the storage.
    #[must_use]
    pub fn new(config: BlobConfig) -> Self {
        Self { inner: Arc::new(Inner { config, store: OnceCell::new() }) }
    }

    /// Starts an object. It becomes visible as a whole when the upload is finished.
    ///
    /// # Errors
    /// If the storage cannot be opened.
    pub async fn upload(&self, key: BlobKey) -> BlobResult<Upload> {
        Ok(Upload::new(self.store().await?, key.path()))
    }

    /// Reads an object in order, in pieces. Returns `None` when there is no such object.
    ///
    /// # Errors
    /// If the storage is unavailable; the stream ends with an error if it fails while reading.
    pub async fn read(&self, key: BlobKey) -> BlobResult<Option<BoxStream<'static, BlobResult<Bytes>>>> {
        match self.store().await?.get(&key.path()).await {
            Ok(found) => {
                Ok(Some(found.into_stream().map(|piece| piece.map_err(BlobError::from_storage("reading"))).boxed()))
            }
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(BlobError::from_storage("opening")(error)),
        }
    }

    /// Deletes an object. Succeeds if it does not exist.
    ///
    /// # Errors
    /// If the storage is unavailable.
    pub async fn delete(&self, key: BlobKey) -> BlobResult<()> {
        match self.store().await?.delete(&key.path()).await {
            // A removal that was interrupted before its row was deleted is repeated.
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(BlobError::from_storage("deleting")(error)),
        }
    }

    async fn store(&self) -> BlobResult<Arc<dyn ObjectStore>> {
        // A failure leaves the cell empty, so that the next call opens the storage again.
        self.inner.store.get_or_try_init(|| async { open_store(&self.inner.config) }).await.cloned()
    }
}

impl fmt::Debug for Blobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Blobs").field(&self.inner.config).finish()
    }
}

fn open_store(config: &BlobConfig) -> BlobResult<Arc<dyn ObjectStore>> {
    match config {
        BlobConfig::Directory(directory) => {
            std::fs::create_dir_all(directory)
                .map_err(|source| BlobError::Directory { directory: directory.clone(), source })?;
            // Removes folders of ids with their last object.
            let store = LocalFileSystem::new_with_prefix(directory)
                .map_err(BlobError::from_storage("opening"))?
                .with_automatic_cleanup(true);
            Ok(Arc::new(store))
        }
        BlobConfig::S3(s3) => config::open_bucket(s3),
    }
}

#[cfg(test)]
mod tests {
    use futures::TryStreamExt as _;

    use super::*;

    const KEY: BlobKey = BlobKey { workspace: 1, file: 2, object: 3 };

    async fn content(blobs: &Blobs) -> Option<Vec<u8>> {
        let pieces: Vec<Bytes> = blobs.read(KEY).await.unwrap()?.try_collect().await.unwrap();
        Some(pieces.concat())
    }

    #[tokio::test]
    async fn an_object_is_there_once_it_is_finished() {
        let directory = tempfile::tempdir().unwrap();
        let blobs = Blobs::new(BlobConfig::Directory(directory.path().join("made/when/needed")));
        let mut upload = blobs.upload(KEY).await.unwrap();
        // Larger than one part.
        let piece = Bytes::from(vec![7; 3 << 20]);
        for _ in 0..4 {
            upload.push(piece.clone()).await.unwrap();
        }
        assert_eq!(content(&blobs).await, None, "not finished");
        upload.finish().await.unwrap();
        assert_eq!(content(&blobs).await.map(|bytes| bytes.len()), Some(12 << 20));

        blobs.delete(KEY).await.unwrap();
        assert_eq!(content(&blobs).await, None);
        blobs.delete(KEY).await.unwrap();
    }

    #[tokio::test]
    async fn an_aborted_upload_leaves_nothing_behind() {
        let directory = tempfile::tempdir().unwrap();
        let blobs = Blobs::new(BlobConfig::Directory(directory.path().to_owned()));
        let mut upload = blobs.upload(KEY).await.unwrap();
        for _ in 0..4 {
            upload.push(Bytes::from(vec![7; 3 << 20])).await.unwrap();
        }
        upload.abort().await;
        assert_eq!(content(&blobs).await, None);
        let files = || walk(directory.path());
        assert_eq!(files(), 0, "no part of it stays on the disk");
    }

    fn walk(directory: &std::path::Path) -> usize {
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        entries.map(|entry| if entry.path().is_dir() { walk(&entry.path()) } else { 1 }).sum()
    }
}
