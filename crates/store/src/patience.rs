//! How long an answer of Postgres is waited for.
//!
//! A host that vanishes without a reset leaves its connections open for as long as the kernel goes on
//! sending again, a quarter of an hour. The loops on which a whole process depends must not wait for that:
//! they give the connection up and take another.

use std::time::Duration;

/// Longer than any statement of those loops takes, its wait for a lock (2 s) included.
pub(crate) const PATIENCE: Duration = Duration::from_secs(8);

/// A statement whose answer is not waited for without end.
pub(crate) trait Patient<T>: Future<Output = Result<T, sqlx::Error>> + Send + Sized {
    /// The outcome, or an error that counts as unavailable once it takes too long. What was asked may have
    /// happened, or may still happen.
    fn patiently(self) -> impl Future<Output = Result<T, sqlx::Error>> + Send {
        async move { tokio::time::timeout(PATIENCE, self).await.unwrap_or(Err(sqlx::Error::PoolTimedOut)) }
    }
}

impl<T, F: Future<Output = Result<T, sqlx::Error>> + Send> Patient<T> for F {}
