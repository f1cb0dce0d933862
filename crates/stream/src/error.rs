//! Errors of NATS operations.

/// Result of a NATS operation.
pub type StreamResult<T> = Result<T, StreamError>;

/// Failure of a NATS operation. Never a reason to refuse a caller, because Postgres has the record.
#[derive(Debug, thiserror::Error)]
#[error("nats failed while {operation}")]
pub struct StreamError {
    /// Failed operation and its object.
    pub operation: &'static str,
    /// Cause of the failure.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl StreamError {
    pub(crate) fn from_nats<E>(doing: &'static str) -> impl FnOnce(E) -> Self
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        move |source| Self { operation: doing, source: source.into() }
    }
}
