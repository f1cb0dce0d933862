//! Deliveries of events to the URLs of subscriptions: claims, queued calls and their attempts. Main types:
//! [`PendingCall`] and [`CallAttempt`]; made by the worker's dispatcher, written by the store.

use std::time::Duration;

use chrono::{DateTime, Utc};

use super::DeliveryStatus;
use crate::SubscriptionDeliveryId;

/// Subscriptions that a claim selects. Failing ones are claimed separately, so that slow or broken URLs do not delay
/// the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimedHealth {
    /// Those whose last calls succeeded.
    Healthy,
    /// Those with [`PROBE_FAILURES`](super::call::PROBE_FAILURES) consecutive failures or more.
    Failing,
}

/// Parameters of a claim.
#[derive(Debug, Clone, Copy)]
pub struct SubscriptionClaim<'a> {
    /// Worker that claims.
    pub owner: &'a str,
    /// Health of those to be claimed.
    pub health: ClaimedHealth,
    /// Consecutive failures from which a subscription counts as failing.
    pub failing_from: i32,
    /// Number of subscriptions at most.
    pub limit: i64,
    /// Maximum number of subscriptions of one family of workspaces, including those that the owner holds already.
    pub per_family: i64,
    /// Duration of the lease.
    pub lease: Duration,
}

/// Queued event that was neither delivered nor dead-lettered.
#[derive(Debug, Clone)]
pub struct PendingCall {
    /// The same at each attempt.
    pub delivery_id: SubscriptionDeliveryId,
    pub event_kind: String,
    /// Request body.
    pub body: String,
    /// Attempts so far.
    pub attempts: i32,
    /// Time of the next attempt.
    pub next_attempt_at: DateTime<Utc>,
    /// Time of the event.
    pub created_at: DateTime<Utc>,
    /// W3C trace context of the event's message, if it was traced.
    pub traceparent: Option<String>,
}

/// Outcome of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallOutcome {
    /// The URL took it.
    Delivered,
    /// Due again at this time.
    Retry(DateTime<Utc>),
    /// No further attempt.
    DeadLetter,
}

impl CallOutcome {
    /// Returns the status of the delivery from then on.
    #[must_use]
    pub const fn status(self) -> DeliveryStatus {
        match self {
            Self::Delivered => DeliveryStatus::Delivered,
            Self::Retry(_) => DeliveryStatus::Pending,
            Self::DeadLetter => DeliveryStatus::DeadLetter,
        }
    }

    /// Returns the time of the next attempt; `None` when there is none.
    #[must_use]
    pub const fn next_attempt_at(self) -> Option<DateTime<Utc>> {
        match self {
            Self::Retry(at) => Some(at),
            Self::Delivered | Self::DeadLetter => None,
        }
    }
}

/// Attempt to deliver one event.
#[derive(Debug, Clone)]
pub struct CallAttempt {
    /// Delivery that was attempted.
    pub delivery_id: SubscriptionDeliveryId,
    /// Meaning of the answer.
    pub outcome: CallOutcome,
    /// HTTP status, if the URL answered.
    pub status: Option<i16>,
    /// Error text, if it failed.
    pub error: Option<String>,
    /// End of the subscription's backoff: no other event is sent before.
    pub blocked_until: Option<DateTime<Utc>>,
}
