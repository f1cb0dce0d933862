//! Errors of file storage.

use std::path::PathBuf;

/// Result of a storage operation.
pub type BlobResult<T> = Result<T, BlobError>;

/// Failure of file storage.
#[derive(Debug, thiserror::Error)]
pub enum BlobError {
    /// The directory cannot be created.
    #[error("the directory {directory} for files cannot be created")]
    Directory {
        /// Path of the directory.
        directory: PathBuf,
        /// Cause of the failure.
        source: std::io::Error,
    },
    /// The directory or bucket failed.
    #[error("file storage failed while {doing} an object")]
    Storage {
        /// Operation that failed, as a participle.
        doing: &'static str,
        /// Cause of the failure.
        source: Box<object_store::Error>,
    },
    /// The upload failed while it was being completed.
    #[error("file storage failed while finishing an object")]
    Finish(#[source] std::io::Error),
}

impl BlobError {
    pub(crate) fn from_storage(doing: &'static str) -> impl Fn(object_store::Error) -> Self {
        move |source| Self::Storage { doing, source: Box::new(source) }
    }
}
