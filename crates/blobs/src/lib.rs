//! The bytes of files: a directory, or a bucket that speaks the protocol of S3.
//!
//! Objects are named by [`BlobKey`], which is made of ids only: no text of a client ever becomes part of
//! a path. What an object means, who may read it and when it goes is decided elsewhere; this crate puts,
//! reads and deletes, with bounded memory.

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

/// What an object is called: its workspace, its file, and which upload of the file it came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlobKey {
    /// The tenant.
    pub workspace: i64,
    /// The file.
    pub file: i64,
    /// The upload: each has an object of its own, so that none overwrites another.
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

/// Where the bytes are. Cheap to clone; opened with the first use, so that a process which never touches
/// a file needs no storage for them.
#[derive(Clone)]
pub struct Blobs {
    inner: Arc<Inner>,
}

struct Inner {
    config: BlobConfig,
    store: OnceCell<Arc<dyn ObjectStore>>,
}

impl Blobs {
    /// Storage as configured. Nothing is opened yet.
    #[must_use]
    pub fn new(config: BlobConfig) -> Self {
        Self { inner: Arc::new(Inner { config, store: OnceCell::new() }) }
    }

    /// Begins an object. It is there, as a whole, once the upload is finished.
    ///
    /// # Errors
    /// When the storage cannot be opened.
    pub async fn upload(&self, key: BlobKey) -> BlobResult<Upload> {
        Ok(Upload::new(self.store().await?, key.path()))
    }

    /// The bytes of an object in order, in pieces. `None` when there is no such object.
    ///
    /// # Errors
    /// When the storage is away; the stream ends with an error when it goes away in between.
    pub async fn read(&self, key: BlobKey) -> BlobResult<Option<BoxStream<'static, BlobResult<Bytes>>>> {
        match self.store().await?.get(&key.path()).await {
            Ok(found) => Ok(Some(found.into_stream().map(|piece| piece.map_err(BlobError::of("reading"))).boxed())),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(BlobError::of("opening")(error)),
        }
    }

    /// Deletes an object; one that is not there is fine.
    ///
    /// # Errors
    /// When the storage is away.
    pub async fn delete(&self, key: BlobKey) -> BlobResult<()> {
        match self.store().await?.delete(&key.path()).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(BlobError::of("deleting")(error)),
        }
    }

    async fn store(&self) -> BlobResult<Arc<dyn ObjectStore>> {
        self.inner.store.get_or_try_init(|| async { open(&self.inner.config) }).await.cloned()
    }
}

impl fmt::Debug for Blobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Blobs").field(&self.inner.config).finish()
    }
}

fn open(config: &BlobConfig) -> BlobResult<Arc<dyn ObjectStore>> {
    match config {
        BlobConfig::Directory(directory) => {
            std::fs::create_dir_all(directory)
                .map_err(|source| BlobError::Directory { directory: directory.clone(), source })?;
            // Folders of ids go with their last object.
            let store = LocalFileSystem::new_with_prefix(directory)
                .map_err(BlobError::of("opening"))?
                .with_automatic_cleanup(true);
            Ok(Arc::new(store))
        }
        BlobConfig::S3(s3) => config::bucket(s3),
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
        // More than one part.
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
    async fn nothing_is_left_of_an_upload_that_was_given_up() {
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
