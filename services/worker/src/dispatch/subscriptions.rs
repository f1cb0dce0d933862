//! Event subscriptions.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use relay_dispatch::{
    QueueResult,
    subscriptions::{FailureRun, LeasedSubscription, QueuedEvents, SubscriptionQueue},
};
use relay_domain::subscriptions::{
    DisabledReason,
    dispatch::{CallAttempt, PendingCall, SubscriptionClaim},
};
use relay_engine::{
    Engine,
    subscriptions::{self, EventsMatched, Lease},
};
use relay_tasks::byte_budget::ByteLease;

use super::queue_error;

/// Queue of one dispatcher.
pub(crate) struct EngineSubscriptionQueue(pub(crate) Engine);

#[async_trait]
impl SubscriptionQueue for EngineSubscriptionQueue {
    type Lease = Lease;

    fn now(&self) -> DateTime<Utc> {
        self.0.now()
    }

    fn client(&self) -> &relay_egress::Client {
        self.0.egress()
    }

    async fn lag(&self) -> QueueResult<Duration> {
        self.0.subscriptions().lag().await.map_err(queue_error)
    }

    async fn watch_deliveries(&self) -> QueueResult<()> {
        self.0.subscriptions().watch_deliveries().await.map_err(queue_error)
    }

    async fn claim(&self, claim: SubscriptionClaim<'_>) -> QueueResult<Vec<LeasedSubscription<Lease>>> {
        let claimed = self.0.subscriptions().claim(claim).await.map_err(queue_error)?;
        let leased = |subscriptions::LeasedSubscription { lease, secrets }| LeasedSubscription {
            family: lease.family,
            id: lease.id,
            url: lease.url.clone(),
            signature_scheme: lease.signature_scheme,
            secrets,
            failures: lease.failures,
            lease,
        };
        Ok(claimed.into_iter().map(leased).collect())
    }

    async fn queue_events(
        &self,
        leased: &mut LeasedSubscription<Lease>,
        renew_for: Duration,
    ) -> QueueResult<QueuedEvents> {
        Ok(match self.0.subscriptions().match_events(&mut leased.lease, renew_for).await.map_err(queue_error)? {
            EventsMatched::Read => QueuedEvents::Read,
            EventsMatched::None => QueuedEvents::None,
            EventsMatched::LeaseLost => QueuedEvents::LeaseLost,
        })
    }

    async fn pending(
        &self,
        leased: &LeasedSubscription<Lease>,
        limit: i64,
    ) -> QueueResult<(Vec<PendingCall>, ByteLease)> {
        self.0.subscriptions().pending_calls(&leased.lease, limit).await.map_err(queue_error)
    }

    async fn record(
        &self,
        leased: &LeasedSubscription<Lease>,
        attempt: &CallAttempt,
        renew_for: Duration,
    ) -> QueueResult<Option<FailureRun>> {
        let run =
            self.0.subscriptions().record_attempt(&leased.lease, attempt, renew_for).await.map_err(queue_error)?;
        Ok(run.map(|(failures, since)| FailureRun { failures, since }))
    }

    async fn release(
        &self,
        leased: &LeasedSubscription<Lease>,
        blocked_until: Option<DateTime<Utc>>,
    ) -> QueueResult<()> {
        self.0.subscriptions().release(&leased.lease, blocked_until).await.map_err(queue_error)
    }

    async fn disable(&self, leased: &LeasedSubscription<Lease>, reason: DisabledReason) -> QueueResult<bool> {
        self.0.subscriptions().disable(&leased.lease, reason).await.map_err(queue_error)
    }
}
