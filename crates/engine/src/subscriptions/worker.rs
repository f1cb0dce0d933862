//! Subscriptions as a worker leases and serves them. Its writes change nothing once a subscription has another epoch.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{
    SubscriptionDeliveryId,
    events::{Event, EventBody},
    subscriptions::{
        DisabledReason,
        call::includes_kind,
        dispatch::{CallAttempt, PendingCall, SubscriptionClaim},
        secrets::SubscriptionSecrets,
    },
};
pub use relay_store::subscriptions::dispatch::LeasedSubscription as Lease;
use relay_store::subscriptions::dispatch::MatchedEvent;
use relay_tasks::byte_budget::ByteLease;

use super::{Subscriptions, matching, readers::EventAccess};
use crate::{EngineError, EngineResult, error::Fault, events::message_events};

const EVENT_BATCH_SIZE: i64 = 200;
/// Memory for matching one page of events: their messages, and the bodies built of them.
const MATCH_BYTES: usize = 4 * 1024 * 1024;
/// Bound of the messages of one page of events.
const MESSAGE_BYTES: usize = 1024 * 1024;
/// Bound of the bodies that are read for one subscription at a time.
const CALL_BYTES: i64 = 256 * 1024;
const WATCHED_BATCH_SIZE: i64 = 1000;

/// Subscription that a worker holds.
#[derive(Debug)]
pub struct LeasedSubscription {
    pub lease: Lease,
    /// `None` when they cannot be decrypted here, or do not suffice for the signature scheme.
    pub secrets: Option<SubscriptionSecrets>,
}

/// Result of matching events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventsMatched {
    /// Events were read; calls are queued for those that match.
    Read,
    /// There are no further events.
    None,
    /// Another worker has the subscription, or it was deleted.
    LeaseLost,
}

impl Subscriptions {
    /// Returns the time for which the oldest pending call has been due.
    pub async fn lag(&self) -> EngineResult<Duration> {
        Ok(Duration::from_secs_f64(self.core.store.subscription_lag().await?))
    }

    /// Marks the workspaces whose subscriptions want events of single deliveries as watched, for 10 minutes: such
    /// events are recorded only there.
    pub async fn watch_deliveries(&self) -> EngineResult<()> {
        let mut after = None;
        loop {
            let scopes = self.core.store.workspaces_with_delivery_subscriptions(after, WATCHED_BATCH_SIZE).await?;
            // In pages, so that no statement and no list grows with the number of workspaces.
            self.core.watch_events(&scopes).await?;
            after = scopes.last().copied();
            if i64::try_from(scopes.len()).is_ok_and(|found| found < WATCHED_BATCH_SIZE) {
                return Ok(());
            }
        }
    }

    /// Leases subscriptions that are due. A corrupt one is skipped; its lease expires.
    pub async fn claim(&self, claim: SubscriptionClaim<'_>) -> EngineResult<Vec<LeasedSubscription>> {
        let claimed = self.core.store.claim_subscriptions(claim).await?;
        for error in &claimed.corrupt {
            tracing::error!(error = error as &dyn std::error::Error, "a subscription is corrupt, skipping it");
        }
        let open = |lease| LeasedSubscription { secrets: self.usable_secrets(&lease), lease };
        Ok(claimed.leased.into_iter().map(open).collect())
    }

    /// Returns the secrets of a subscription if they can be decrypted here and suffice for its signature scheme.
    fn usable_secrets(&self, lease: &Lease) -> Option<SubscriptionSecrets> {
        let opened = lease.secret.as_ref().map(|sealed| self.open_secrets(lease.scope, lease.id, sealed));
        let usable = opened.transpose().map(Option::unwrap_or_default).and_then(|secrets| {
            let suffice = secrets.suffice_for(lease.signature_scheme);
            suffice.then_some(secrets).ok_or(EngineError::Internal(Fault::EndpointSecretUnusable))
        });
        if let Err(error) = &usable {
            tracing::error!(
                subscription.id = %lease.id,
                error = error as &dyn std::error::Error,
                "secrets of a subscription cannot be used, trying again later"
            );
        }
        usable.ok()
    }

    /// Matches the next events of the log and queues calls for them, in one statement with the new position.
    pub async fn match_events(&self, lease: &mut Lease, renew_for: Duration) -> EngineResult<EventsMatched> {
        let store = &self.core.store;
        // The head is read before the log: later events are seen the next time.
        let heads = store.event_heads(&[lease.scope]).await?;
        let head = heads.first().map_or(0, |head| head.next_seq - 1);
        let Some(since) = lease.event_cursor else {
            return self.move_cursor(lease, head, &[], renew_for).await;
        };
        if since >= head {
            return Ok(EventsMatched::None);
        }
        // Held until the bodies are stored, with the most that a page may take: their sizes are not known before.
        let _memory = self.core.bodies.reserve(lease.family, MATCH_BYTES).await;
        let mut records = store.events_since(lease.scope, since, EVENT_BATCH_SIZE).await?;
        // Retention may have dropped the remaining events.
        let mut last = records
            .last()
            .map_or(head, |record| record.first_seq + i64::try_from(record.events.len()).unwrap_or(i64::MAX) - 1);
        let reader = self.reader_of_events(lease, &records, since).await?;
        let is_wanted = |event: &Event| includes_kind(&lease.events, &event.kind) && reader.reads(event);
        let mut message_events = message_events(&records, |seq, event| seq > since && is_wanted(event));
        let fitting = store.count_fitting_messages(lease.scope, &message_events, MESSAGE_BYTES).await?;
        if let Some((later, _)) = message_events.get(fitting) {
            // Events whose messages do not fit come with the next page, so the position stays below them.
            last = later - 1;
            message_events.truncate(fitting);
        }
        let messages = store.messages_of_events(lease.scope, &message_events).await?;
        let mut matched = Vec::new();
        for record in &mut records {
            for (event_seq, event) in (record.first_seq..).zip(std::mem::take(&mut record.events)) {
                if event_seq <= since || event_seq > last || !is_wanted(&event) {
                    continue;
                }
                let message = messages.get(&event_seq);
                let text = matching::event_text(&event, message);
                let matches = |filter| matching::matches_filter(filter, event.channel_name.as_deref(), text);
                if !lease.filter.as_ref().is_none_or(matches) {
                    continue;
                }
                let data = matching::event_data(&event, message);
                matched.push(MatchedEvent {
                    // An id of a repeated match is not used: the event keeps its first delivery.
                    delivery_id: SubscriptionDeliveryId::new(self.core.next_id()),
                    event_seq,
                    message_id: match &event.body {
                        EventBody::Message(id) => Some(*id),
                        EventBody::Data(_) => None,
                    },
                    conversation_id: event.conversation_id.clone(),
                    body: matching::call_body(lease.scope, &event.kind, record.created_at, data),
                    kind: event.kind.into_owned(),
                    created_at: record.created_at,
                });
            }
        }
        self.move_cursor(lease, last, &matched, renew_for).await
    }

    async fn move_cursor(
        &self,
        lease: &mut Lease,
        to: i64,
        matched: &[MatchedEvent],
        renew_for: Duration,
    ) -> EngineResult<EventsMatched> {
        if !self.core.store.queue_events(lease, to, matched, renew_for).await? {
            return Ok(EventsMatched::LeaseLost);
        }
        // Only after the commit: a failed statement must not skip events.
        lease.event_cursor = Some(to);
        Ok(EventsMatched::Read)
    }

    /// Reads pending calls in the order of their events, after giving up those that the subscription's agent may not
    /// read any more: at most `limit`, as many as fit into [`CALL_BYTES`]. Waits for the memory, which is free again
    /// when the lease is dropped.
    pub async fn pending_calls(&self, lease: &Lease, limit: i64) -> EngineResult<(Vec<PendingCall>, ByteLease)> {
        // Checked again before each page: the agent may have lost a right or left a conversation since the event was
        // queued.
        if let Some(owner) = lease.owner {
            match self.event_access(lease.scope, owner).await? {
                EventAccess::All => {}
                EventAccess::Own => self.core.store.drop_unreadable_calls(lease, owner, true).await?,
                EventAccess::None => self.core.store.drop_unreadable_calls(lease, owner, false).await?,
            }
        }
        let (fitting, bytes) = self.core.store.fitting_calls(lease, limit, CALL_BYTES).await?;
        // Reserved before the bodies are read. The lease keeps other workers from the rows meanwhile.
        let memory = self.core.bodies.reserve(lease.family, bytes).await;
        let calls = if fitting == 0 { Vec::new() } else { self.core.store.pending_calls(lease, fitting).await? };
        Ok((calls, memory))
    }

    /// Records an attempt and renews the lease. Returns the consecutive failures and the time of the first one; `None`
    /// when the lease is lost.
    pub async fn record_attempt(
        &self,
        lease: &Lease,
        attempt: &CallAttempt,
        renew_for: Duration,
    ) -> EngineResult<Option<(i32, Option<DateTime<Utc>>)>> {
        Ok(self.core.store.record_call_attempt(lease, attempt, renew_for).await?)
    }

    /// Releases a subscription; with a time, it is not claimed before.
    pub async fn release(&self, lease: &Lease, blocked_until: Option<DateTime<Utc>>) -> EngineResult<()> {
        Ok(self.core.store.release_subscription(lease, blocked_until).await?)
    }

    /// Disables a subscription and announces it. Returns `false` when the lease is lost.
    pub async fn disable(&self, lease: &Lease, reason: DisabledReason) -> EngineResult<bool> {
        let recorded = self.core.store.disable_subscription(lease, reason, self.core.now()).await?;
        // Without a record the epoch no longer matched, and nothing was changed.
        let is_disabled = recorded.is_some();
        recorded.into_iter().for_each(|recorded| self.core.announce(recorded));
        Ok(is_disabled)
    }
}
