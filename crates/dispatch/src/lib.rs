//! Outbound HTTP deliveries: mailboxes to the endpoints of http_push nodes ([`push`]), and events to the URLs of
//! subscriptions ([`subscriptions`]).
//!
//! Both lease a queue, attempt its deliveries in order, record the outcome under the lease, wait as a retry schedule
//! and a circuit breaker say, and release the queue. What they share: one call with its trace and its errors
//! ([`call`]), limits per host ([`destinations`]), signatures ([`signature`]), and the errors of their queues
//! ([`QueueError`]).
//!
//! The crate knows neither Postgres nor the engine. The worker gives it both as [`push::PushQueue`] and
//! [`subscriptions::SubscriptionQueue`].

mod call;
pub mod destinations;
pub mod push;
mod signature;
pub mod subscriptions;

use std::error::Error;

/// Error of a queue, by the effect that a repetition may have.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// Storage is unavailable.
    #[error(transparent)]
    Unavailable(Box<dyn Error + Send + Sync>),
    /// A repetition may succeed.
    #[error(transparent)]
    Temporary(Box<dyn Error + Send + Sync>),
    /// A repetition fails as well: one of the items is at fault.
    #[error(transparent)]
    Permanent(Box<dyn Error + Send + Sync>),
}

impl QueueError {
    pub(crate) const fn is_permanent(&self) -> bool {
        matches!(self, Self::Permanent(_))
    }
}

/// Result of a queue's operation.
pub type QueueResult<T> = Result<T, QueueError>;
