//! Outbound HTTP deliveries: mailboxes to the endpoints of http_push nodes ([`push`]), and events to the URLs of
//! subscriptions ([`subscriptions`]).
//!
//! Both lease a queue, attempt its deliveries in order, record the outcome under the lease, wait as a retry schedule and a
//! circuit breaker say, and release the queue. What they share: one call with its trace and its errors ([`call`]),
//! signatures ([`signature`]), and the errors of their queues ([`QueueError`]).
//!
//! The crate knows neither Postgres nor the engine. The worker gives it both as [`push::PushQueue`] and
//! [`subscriptions::SubscriptionQueue`].

mod call;
pub mod push;
mod signature;
pub mod subscriptions;

use std::error::Error;

/// Error of a queue.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
pub struct QueueError {
    source: Box<dyn Error + Send + Sync>,
    /// What a repetition may achieve.
    pub kind: QueueErrorKind,
}

/// Kind of a queue's error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueErrorKind {
    /// Storage is unavailable.
    Unavailable,
    /// A repetition may succeed.
    Temporary,
    /// A repetition fails as well: one of the items is at fault.
    Permanent,
}

impl QueueError {
    /// Wraps an error of the engine.
    pub fn new(source: impl Error + Send + Sync + 'static, kind: QueueErrorKind) -> Self {
        Self { source: Box::new(source), kind }
    }

    pub(crate) fn is_permanent(&self) -> bool {
        self.kind == QueueErrorKind::Permanent
    }
}

/// Result of a queue's operation.
pub type QueueResult<T> = Result<T, QueueError>;
