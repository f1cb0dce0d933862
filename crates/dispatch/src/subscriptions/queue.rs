//! [`SubscriptionQueue`]: what the dispatcher needs of the engine.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use relay_domain::{
    SubscriptionId,
    subscriptions::{
        DisabledReason, SignatureScheme,
        dispatch::{CallAttempt, PendingCall, SubscriptionClaim},
        secrets::SubscriptionSecrets,
    },
    workspaces::family::FamilyId,
};
use relay_tasks::byte_budget::ByteLease;

use crate::QueueResult;

/// Subscriptions, as one worker leases and serves them. Each write is fenced by the epoch of the lease.
#[async_trait]
pub trait SubscriptionQueue: Send + Sync + 'static {
    /// The engine's part of a lease.
    type Lease: Send + Sync + 'static;

    /// Current time by the clock that all workers share.
    fn now(&self) -> DateTime<Utc>;
    /// Guarded client for the URLs of tenants.
    fn client(&self) -> &relay_egress::Client;

    /// Returns the time for which the oldest pending call has been due.
    async fn lag(&self) -> QueueResult<Duration>;
    /// Marks the workspaces whose subscriptions want events of single deliveries, which are recorded only there.
    async fn watch_deliveries(&self) -> QueueResult<()>;
    /// Leases subscriptions that are due.
    async fn claim(&self, claim: SubscriptionClaim<'_>) -> QueueResult<Vec<LeasedSubscription<Self::Lease>>>;
    /// Matches the next events of the log and queues calls for them. It is only called while no call is pending.
    async fn queue_events(
        &self,
        leased: &mut LeasedSubscription<Self::Lease>,
        lease: Duration,
    ) -> QueueResult<QueuedEvents>;
    /// Reads pending calls in the order of their events, as many as fit into memory.
    async fn pending(
        &self,
        leased: &LeasedSubscription<Self::Lease>,
        limit: i64,
    ) -> QueueResult<(Vec<PendingCall>, ByteLease)>;
    /// Records an attempt, and renews the lease. `None` when the lease is lost: the new holder calls again.
    async fn record(
        &self,
        leased: &LeasedSubscription<Self::Lease>,
        attempt: &CallAttempt,
        lease: Duration,
    ) -> QueueResult<Option<FailureRun>>;
    /// Releases a subscription; with a time, it is not claimed before.
    async fn release(
        &self,
        leased: &LeasedSubscription<Self::Lease>,
        blocked_until: Option<DateTime<Utc>>,
    ) -> QueueResult<()>;
    /// Disables a subscription. Returns `false` when the lease is lost.
    async fn disable(&self, leased: &LeasedSubscription<Self::Lease>, reason: DisabledReason) -> QueueResult<bool>;
}

/// Subscription that this worker holds.
#[derive(Debug)]
pub struct LeasedSubscription<L> {
    /// Tenant that its calls count for.
    pub family: FamilyId,
    pub id: SubscriptionId,
    pub url: String,
    /// `None` for a subscription without a signing secret.
    pub signature_scheme: Option<SignatureScheme>,
    /// `None` when they cannot be decrypted here, or do not suffice for the scheme.
    pub secrets: Option<SubscriptionSecrets>,
    /// Consecutive failed attempts, as of the last one recorded.
    pub failures: i32,
    pub lease: L,
}

/// Result of matching events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueuedEvents {
    /// Events were read; some may have matched.
    Read,
    /// There are no further events.
    None,
    /// Another worker has the subscription, or it was deleted.
    LeaseLost,
}

/// Consecutive failures of a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FailureRun {
    /// Number of the failures.
    pub failures: i32,
    /// Time of the first of them.
    pub since: Option<DateTime<Utc>>,
}
