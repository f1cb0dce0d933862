//! What can go wrong between the engine and NATS.

/// The result of a stream call.
pub type StreamResult<T> = Result<T, StreamError>;

/// NATS did not do what was asked. Never a reason to refuse a caller: Postgres has the record.
#[derive(Debug, thiserror::Error)]
#[error("nats failed while {doing}")]
pub struct StreamError {
    /// The operation and its object.
    pub doing: &'static str,
    /// The cause.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl StreamError {
    pub(crate) fn from_nats<E>(doing: &'static str) -> impl FnOnce(E) -> Self
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        move |source| Self { doing, source: source.into() }
    }
}
