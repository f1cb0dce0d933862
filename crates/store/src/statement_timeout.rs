//! Upper bound on waiting for a statement's result.
//!
//! A host that disappears without a TCP reset leaves connections open until the kernel stops retransmitting, about a
//! quarter of an hour. The loops on which a whole process depends must not wait for that, so they give up and use
//! another connection.

use std::time::Duration;

/// Longer than any statement of these loops runs, including a lock wait of 2 s.
pub(crate) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(8);

/// Future of a statement that is given up after [`STATEMENT_TIMEOUT`].
pub(crate) trait StatementTimeout<T>: Future<Output = Result<T, sqlx::Error>> + Send + Sized {
    /// Fails with an error that maps to `Unavailable` after the timeout. The statement may nevertheless have run, or
    /// may still run.
    fn with_timeout(self) -> impl Future<Output = Result<T, sqlx::Error>> + Send {
        async move { tokio::time::timeout(STATEMENT_TIMEOUT, self).await.unwrap_or(Err(sqlx::Error::PoolTimedOut)) }
    }
}

impl<T, F: Future<Output = Result<T, sqlx::Error>> + Send> StatementTimeout<T> for F {}
