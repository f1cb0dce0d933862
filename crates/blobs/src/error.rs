//! What can go wrong between the engine and the bytes of files.

use std::path::PathBuf;

/// The result of a call.
pub type BlobResult<T> = Result<T, BlobError>;

/// The storage of files did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum BlobError {
    /// The directory cannot be made.
    #[error("the directory {directory} for files cannot be made")]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The directory or bucket failed.
    #[error("the storage of files failed while {doing} an object")]
    Storage {
        /// What was being done.
        doing: &'static str,
        /// The cause.
        source: Box<object_store::Error>,
    },
    /// The upload broke off between the engine and its storage.
    #[error("the storage of files failed while finishing an object")]
    Finish(#[source] std::io::Error),
}

impl BlobError {
    pub(crate) fn of(doing: &'static str) -> impl Fn(object_store::Error) -> Self {
        move |source| Self::Storage { doing, source: Box::new(source) }
    }
}
