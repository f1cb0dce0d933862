//! Leases and queued deliveries of event subscriptions. Main type: [`LeasedSubscription`]; called by the worker that
//! delivers events to the URLs of subscriptions.
//!
//! A subscription is leased as a whole, so that its events leave in order. Every write of the holder names the lease
//! epoch, so a holder that has lost the lease changes nothing.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, MessageId, SubscriptionDeliveryId, SubscriptionId, WorkspaceId, WorkspaceScope,
    events::kind,
    subscriptions::{
        DisabledReason, EventFilter, SignatureScheme,
        dispatch::{CallAttempt, ClaimedHealth, PendingCall, SubscriptionClaim},
    },
    workspaces::family::FamilyId,
};
use relay_wire::{events::recorded_data::SubscriptionDisabled, field::ToValue as _};
use sqlx::{FromRow, Row as _, postgres::PgRow, types::Json};

use crate::{
    Store, StoreError, StoreResult,
    decode::decode_row,
    events::{self, Event, RecordedEvents},
    messages::days::day_of_id,
    statement_timeout::StatementTimeout as _,
    subscriptions::definitions::EncryptedSecret,
    workspaces::suspensions::is_suspended,
};

/// Subscription whose lease this worker holds.
#[derive(Debug, Clone)]
pub struct LeasedSubscription {
    pub scope: WorkspaceScope,
    /// Tenant that its calls count for.
    pub family: FamilyId,
    pub id: SubscriptionId,
    /// Fences the holder's writes.
    pub epoch: i64,
    /// Event kinds; `*` includes all of them.
    pub events: Vec<String>,
    pub filter: Option<EventFilter>,
    /// Agent whose view limits it; `None` for the workspace key.
    pub owner: Option<AgentId>,
    pub url: String,
    /// `None` for a subscription without a signing secret.
    pub signature_scheme: Option<SignatureScheme>,
    /// Signing secret and header values.
    pub secret: Option<EncryptedSecret>,
    /// Seq of the last event that was matched. `None` before the first.
    pub event_cursor: Option<i64>,
    /// Consecutive failed attempts.
    pub failures: i32,
    /// Time of the first of them.
    pub failing_since: Option<DateTime<Utc>>,
}

impl FromRow<'_, PgRow> for LeasedSubscription {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let key_id: Option<String> = row.try_get("secret_key_id")?;
        let bytes: Option<Vec<u8>> = row.try_get("sealed")?;
        Ok(Self {
            scope: WorkspaceScope::from_engine_row(row.try_get("workspace_id")?),
            family: FamilyId::of_workspace(row.try_get("family")?, None),
            id: row.try_get("subscription_id")?,
            epoch: row.try_get("lease_epoch")?,
            events: row.try_get("events")?,
            filter: row.try_get::<Option<Json<EventFilter>>, _>("filter")?.map(|Json(filter)| filter),
            owner: row.try_get("created_by")?,
            url: row.try_get("url")?,
            signature_scheme: row.try_get("signature_scheme")?,
            secret: key_id.zip(bytes).map(|(key_id, bytes)| EncryptedSecret { key_id, bytes }),
            event_cursor: row.try_get("event_cursor")?,
            failures: row.try_get("failures")?,
            failing_since: row.try_get("failing_since")?,
        })
    }
}

/// Result of [`Store::claim_subscriptions`].
#[derive(Debug, Default)]
pub struct ClaimedSubscriptions {
    pub leased: Vec<LeasedSubscription>,
    /// Errors of claimed rows that do not decode. Their leases expire; they do not keep the others from being served.
    pub corrupt: Vec<StoreError>,
}

/// Event that matches a subscription.
#[derive(Debug, Clone)]
pub struct MatchedEvent {
    /// Id of the delivery to be queued.
    pub delivery_id: SubscriptionDeliveryId,
    pub event_seq: i64,
    pub kind: String,
    /// Request body. It depends on the event alone: all subscriptions share the first one that is stored.
    pub body: String,
    pub created_at: DateTime<Utc>,
    /// Message of the event, for its trace context.
    pub message_id: Option<MessageId>,
    /// Conversation of the event, which its reader may have left by the time of the call.
    pub conversation_id: Option<String>,
}

/// Row of a pending delivery.
struct PendingCallRow(PendingCall);

impl FromRow<'_, PgRow> for PendingCallRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self(PendingCall {
            delivery_id: row.try_get("delivery_id")?,
            event_kind: row.try_get("event_kind")?,
            body: row.try_get("body")?,
            attempts: row.try_get("attempts")?,
            next_attempt_at: row.try_get("next_attempt_at")?,
            created_at: row.try_get("created_at")?,
            traceparent: row.try_get("traceparent")?,
        }))
    }
}

/// Condition: an active subscription has unmatched events or pending deliveries. Otherwise none can be claimed.
pub(crate) const HAS_OPEN: &str = "EXISTS (
    SELECT FROM subscriptions s LEFT JOIN event_heads h USING (workspace_id)
     WHERE s.is_active
       AND (s.event_cursor IS NULL OR s.event_cursor < coalesce(h.next_seq, 1) - 1
            OR EXISTS (SELECT FROM subscription_deliveries d
                        WHERE d.workspace_id = s.workspace_id AND d.subscription_id = s.subscription_id
                          AND d.status = 'pending')))";

// A subscription is due when it is not blocked and has a pending delivery or an unmatched event. SKIP LOCKED: a row
// that another worker is claiming is not waited for; the lease is checked again on the locked row, because `due` was
// read without locks. Places are those of a family: a workspace and those created with its key. The epoch is the time
// in milliseconds, so that it is not that of a lease which a failover has lost, and whose worker records its call after
// the recovery.
const CLAIM: &str = concat!(
    "
WITH due AS (
    SELECT s.workspace_id, s.subscription_id, coalesce(w.created_by, s.workspace_id) AS family,
           row_number() OVER (PARTITION BY coalesce(w.created_by, s.workspace_id)
                              ORDER BY s.lease_until NULLS FIRST) AS nth
      FROM subscriptions s
      LEFT JOIN workspaces w USING (workspace_id)
      LEFT JOIN event_heads h USING (workspace_id)
     WHERE s.is_active AND coalesce(s.lease_until < relay_now(), true) AND coalesce(s.blocked_until <= relay_now(), true)
       AND NOT ",
    is_suspended!("s"),
    "
       AND (s.failures >= $4) = $3
       AND (s.event_cursor IS NULL OR s.event_cursor < coalesce(h.next_seq, 1) - 1
            OR EXISTS (SELECT FROM subscription_deliveries d
                        WHERE d.workspace_id = s.workspace_id AND d.subscription_id = s.subscription_id
                          AND d.status = 'pending'))
), held AS MATERIALIZED (
    SELECT coalesce(w.created_by, s.workspace_id) AS family, count(*) AS places
      FROM subscriptions s
      LEFT JOIN workspaces w USING (workspace_id)
     WHERE s.lease_owner = $1 AND s.lease_until > relay_now() AND (s.failures >= $4) = $3
     GROUP BY 1
), claimed AS (
    SELECT s.workspace_id, s.subscription_id, family
      FROM subscriptions s
      JOIN due USING (workspace_id, subscription_id)
      LEFT JOIN held USING (family)
     WHERE due.nth <= $5 - coalesce(held.places, 0) AND coalesce(s.lease_until < relay_now(), true)
     ORDER BY s.lease_until NULLS FIRST LIMIT $2
       FOR UPDATE OF s SKIP LOCKED
)
UPDATE subscriptions s
   SET lease_owner = $1, lease_until = relay_now() + make_interval(secs => $6),
       lease_epoch = greatest(lease_epoch + 1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint)
  FROM claimed
 WHERE s.workspace_id = claimed.workspace_id AND s.subscription_id = claimed.subscription_id
RETURNING s.workspace_id, claimed.family, s.subscription_id, s.lease_epoch, s.events, s.filter, s.created_by, s.url,
          s.signature_scheme, s.secret_key_id, s.sealed, s.event_cursor, s.failures, s.failing_since"
);

// Moves the cursor and queues in one statement under the lease. The unique event seq makes a repeated match harmless:
// after a replay the cursor goes back over events that were queued before.
//
// The first subscription to match an event stores its body, in the order of the events, so that two statements do not
// wait for each other. A live worker of the previous version would find no body there, so meanwhile each delivery has
// its own.
const QUEUE: &str = "
WITH held AS (
    UPDATE subscriptions
       SET event_cursor = $4, lease_until = relay_now() + make_interval(secs => $10)
     WHERE workspace_id = $1 AND subscription_id = $2 AND lease_epoch = $3 AND is_active AND relay_require_epoch($14)
    RETURNING NOT EXISTS (SELECT FROM push_workers WHERE lease_until > relay_now() AND NOT reads_shared_bodies)
              AS shares_bodies
), matched AS (
    SELECT e.*, held.shares_bodies
      FROM held
     CROSS JOIN unnest($5::bigint[], $6::bigint[], $7::text[], $8::text[], $9::timestamptz[], $11::bigint[], $12::date[],
                       $13::text[])
           AS e (delivery_id, event_seq, kind, body, created_at, message_id, message_day, conversation_id)
), bodies AS (
    INSERT INTO subscription_bodies (workspace_id, event_seq, body, created_at)
    SELECT $1, e.event_seq, e.body, e.created_at FROM matched e WHERE e.shares_bodies ORDER BY e.event_seq
    ON CONFLICT (workspace_id, event_seq) DO NOTHING
), queued AS (
    INSERT INTO subscription_deliveries (workspace_id, subscription_id, delivery_id, event_seq, event_kind, body,
                                         next_attempt_at, created_at, conversation_id, traceparent)
    SELECT $1, $2, e.delivery_id, e.event_seq, e.kind, CASE WHEN NOT e.shares_bodies THEN e.body END, relay_now(),
           e.created_at, e.conversation_id,
           (SELECT m.traceparent FROM messages m
             WHERE m.workspace_id = $1 AND m.message_id = e.message_id AND m.created_on = e.message_day)
      FROM matched e
    ON CONFLICT (workspace_id, subscription_id, event_seq) WHERE event_seq > 0 DO NOTHING
)
SELECT count(*) FROM held";

// The subscription row first: its epoch decides whether the delivery may be changed.
const RECORD_ATTEMPT: &str = "
WITH held AS (
    UPDATE subscriptions
       SET failures = CASE WHEN $5 = 'delivered' THEN 0 ELSE failures + 1 END,
           failing_since = CASE WHEN $5 = 'delivered' THEN NULL ELSE coalesce(failing_since, relay_now()) END,
           blocked_until = $9, lease_until = relay_now() + make_interval(secs => $10)
     WHERE workspace_id = $1 AND subscription_id = $2 AND lease_epoch = $3 AND is_active
    RETURNING failures, failing_since
), noted AS (
    UPDATE subscription_deliveries d
       SET status = $5, attempts = attempts + 1, next_attempt_at = $6, last_status = $7, last_error = $8,
           updated_at = relay_now()
      FROM held
     WHERE d.workspace_id = $1 AND d.subscription_id = $2 AND d.delivery_id = $4 AND d.status = 'pending'
)
SELECT failures, failing_since FROM held";

impl Store {
    /// Leases subscriptions that are due.
    pub async fn claim_subscriptions(&self, claim: SubscriptionClaim<'_>) -> StoreResult<ClaimedSubscriptions> {
        let rows = sqlx::query(CLAIM)
            .bind(claim.owner)
            .bind(claim.limit)
            .bind(claim.health == ClaimedHealth::Failing)
            .bind(claim.failing_from)
            .bind(claim.per_family)
            .bind(claim.lease.as_secs_f64())
            .fetch_all(&self.pool)
            .with_timeout()
            .await
            .map_err(StoreError::from_sqlx("claiming subscriptions"))?;
        let mut claimed = ClaimedSubscriptions::default();
        for row in &rows {
            match decode_row("subscriptions", row) {
                Ok(leased) => claimed.leased.push(leased),
                Err(error) => claimed.corrupt.push(error),
            }
        }
        Ok(claimed)
    }

    /// Returns the number of pending deliveries, the oldest events first and at most `limit`, whose bodies have `bytes`
    /// bytes together, and their bytes. The first one counts whatever its size.
    pub async fn fitting_calls(
        &self,
        leased: &LeasedSubscription,
        limit: i64,
        bytes: i64,
    ) -> StoreResult<(i64, usize)> {
        // The length of a body is known without reading it.
        let (fitting, size): (i64, i64) = sqlx::query_as(
            "SELECT count(*), coalesce(sum(bytes), 0)::bigint
               FROM (SELECT bytes, sum(bytes) OVER (ORDER BY event_seq, delivery_id) - bytes AS before
                       FROM (SELECT d.event_seq, d.delivery_id, octet_length(coalesce(d.body, b.body)) AS bytes
                               FROM subscription_deliveries d
                               LEFT JOIN subscription_bodies b
                                      ON d.body IS NULL AND b.workspace_id = $1 AND b.event_seq = d.event_seq
                              WHERE d.workspace_id = $1 AND d.subscription_id = $2 AND d.status = 'pending'
                              ORDER BY d.event_seq, d.delivery_id LIMIT $3) AS next) AS summed
              WHERE before = 0 OR before + bytes <= $4",
        )
        .bind(leased.scope.workspace_id())
        .bind(leased.id)
        .bind(limit)
        .bind(bytes)
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("measuring pending deliveries of a subscription"))?;
        // A sum of lengths, which is never negative.
        Ok((fitting, usize::try_from(size).unwrap_or(0)))
    }

    /// Reads pending deliveries in the order of their events.
    pub async fn pending_calls(&self, leased: &LeasedSubscription, limit: i64) -> StoreResult<Vec<PendingCall>> {
        let pending: Vec<PendingCallRow> = sqlx::query_as(
            "SELECT d.delivery_id, d.event_kind, coalesce(d.body, b.body) AS body, d.attempts, d.next_attempt_at,
                    d.created_at, d.traceparent
               FROM subscription_deliveries d
               LEFT JOIN subscription_bodies b ON d.body IS NULL AND b.workspace_id = $1 AND b.event_seq = d.event_seq
              WHERE d.workspace_id = $1 AND d.subscription_id = $2 AND d.status = 'pending'
              ORDER BY d.event_seq, d.delivery_id LIMIT $3",
        )
        .bind(leased.scope.workspace_id())
        .bind(leased.id)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading pending deliveries of a subscription"))?;
        Ok(pending.into_iter().map(|row| row.0).collect())
    }

    /// Queues matched events and moves the subscription's cursor. An event that was queued before is skipped. Returns
    /// `false`, without a change, when the lease is lost.
    pub async fn queue_events(
        &self,
        leased: &LeasedSubscription,
        cursor: i64,
        matched: &[MatchedEvent],
        lease: Duration,
    ) -> StoreResult<bool> {
        let doing = "queueing events for a subscription";
        let epoch = self.epoch(doing)?;
        let held: StoreResult<i64> = sqlx::query_scalar(QUEUE)
            .bind(leased.scope.workspace_id())
            .bind(leased.id)
            .bind(leased.epoch)
            .bind(cursor)
            .bind(matched.iter().map(|event| event.delivery_id).collect::<Vec<_>>())
            .bind(matched.iter().map(|event| event.event_seq).collect::<Vec<_>>())
            .bind(matched.iter().map(|event| event.kind.as_str()).collect::<Vec<_>>())
            .bind(matched.iter().map(|event| event.body.as_str()).collect::<Vec<_>>())
            .bind(matched.iter().map(|event| event.created_at).collect::<Vec<_>>())
            .bind(lease.as_secs_f64())
            .bind(matched.iter().map(|event| event.message_id).collect::<Vec<_>>())
            .bind(matched.iter().map(|event| event.message_id.map(|id| day_of_id(id.get()))).collect::<Vec<_>>())
            .bind(matched.iter().map(|event| event.conversation_id.as_deref()).collect::<Vec<_>>())
            .bind(epoch)
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx(doing));
        Ok(self.note_epoch(epoch, held)? > 0)
    }

    /// Records an attempt. Returns the subscription's consecutive failures and the time of the first one. `None` when
    /// the lease is lost: the new holder sends the event again.
    pub async fn record_call_attempt(
        &self,
        leased: &LeasedSubscription,
        attempt: &CallAttempt,
        lease: Duration,
    ) -> StoreResult<Option<(i32, Option<DateTime<Utc>>)>> {
        sqlx::query_as(RECORD_ATTEMPT)
            .bind(leased.scope.workspace_id())
            .bind(leased.id)
            .bind(leased.epoch)
            .bind(attempt.delivery_id)
            .bind(attempt.outcome.status())
            .bind(attempt.outcome.next_attempt_at())
            .bind(attempt.status)
            .bind(&attempt.error)
            .bind(attempt.blocked_until)
            .bind(lease.as_secs_f64())
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("recording a call to a subscription"))
    }

    /// Releases a subscription; with a time, it is not claimed before.
    pub async fn release_subscription(
        &self,
        leased: &LeasedSubscription,
        blocked_until: Option<DateTime<Utc>>,
    ) -> StoreResult<()> {
        sqlx::query(
            "UPDATE subscriptions
                SET lease_owner = NULL, lease_until = relay_now(), blocked_until = coalesce($4, blocked_until)
              WHERE workspace_id = $1 AND subscription_id = $2 AND lease_epoch = $3 AND lease_owner IS NOT NULL",
        )
        .bind(leased.scope.workspace_id())
        .bind(leased.id)
        .bind(leased.epoch)
        .bind(blocked_until)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("releasing a subscription"))?;
        Ok(())
    }

    /// Disables a subscription, and records the event. `None` when the lease is lost.
    pub async fn disable_subscription(
        &self,
        leased: &LeasedSubscription,
        reason: DisabledReason,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<RecordedEvents>> {
        let doing = "disabling a subscription";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let disabled: Option<(Option<DateTime<Utc>>,)> = sqlx::query_as(
            "UPDATE subscriptions
                SET is_active = false, disabled_reason = $4, disabled_at = $5, lease_owner = NULL, lease_until = relay_now()
              WHERE workspace_id = $1 AND subscription_id = $2 AND lease_epoch = $3 AND is_active
             RETURNING failing_since",
        )
        .bind(leased.scope.workspace_id())
        .bind(leased.id)
        .bind(leased.epoch)
        .bind(reason)
        .bind(at)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some((failing_since,)) = disabled else { return Ok(None) };
        let data = SubscriptionDisabled {
            subscription_id: leased.id,
            reason: reason.as_str(),
            failing_since: failing_since.map(Into::into),
        };
        let event = Event::new(kind::SUBSCRIPTION_DISABLED, data.to_value());
        let recorded = events::append(&mut tx, leased.scope, at, vec![event]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(recorded))
    }

    /// Replays a subscription from `since`: its dead letters are pending again, its cursor goes back to that time, and
    /// it is active. Delivered events stay delivered. Returns `false` when there is no such subscription.
    pub async fn replay_subscription(
        &self,
        scope: WorkspaceScope,
        id: SubscriptionId,
        since: DateTime<Utc>,
    ) -> StoreResult<bool> {
        let doing = "replaying a subscription";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The cursor goes to the last event before `since`, or to the start of the log if that has been pruned.
        // The new epoch fences the current holder, which works with the former cursor.
        let replayed = sqlx::query(
            "UPDATE subscriptions s
                SET is_active = true, disabled_reason = NULL, disabled_at = NULL, failures = 0, failing_since = NULL,
                    blocked_until = NULL, lease_owner = NULL, lease_until = NULL, lease_epoch = lease_epoch + 1,
                    event_cursor = coalesce(
                        (SELECT max(l.last_seq) FROM event_log l WHERE l.workspace_id = $1 AND l.created_at < $3),
                        (SELECT min(l.first_seq) - 1 FROM event_log l WHERE l.workspace_id = $1),
                        s.event_cursor)
              WHERE workspace_id = $1 AND subscription_id = $2",
        )
        .bind(scope.workspace_id())
        .bind(id)
        .bind(since)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        sqlx::query(
            "UPDATE subscription_deliveries
                SET status = 'pending', attempts = 0, next_attempt_at = relay_now(), updated_at = relay_now()
              WHERE workspace_id = $1 AND subscription_id = $2 AND status = 'dead_letter' AND created_at >= $3",
        )
        .bind(scope.workspace_id())
        .bind(id)
        .bind(since)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(replayed.rows_affected() > 0)
    }

    /// Lists workspaces that subscribe to events of single deliveries, at most `limit` above `after`, in order. Such
    /// events are recorded only in watched workspaces.
    pub async fn workspaces_with_delivery_subscriptions(
        &self,
        after: Option<WorkspaceScope>,
        limit: i64,
    ) -> StoreResult<Vec<WorkspaceScope>> {
        let ids: Vec<WorkspaceId> = sqlx::query_scalar(
            "SELECT DISTINCT workspace_id FROM subscriptions
              WHERE workspace_id > $1 AND is_active
                AND events && ARRAY['*', 'delivery.accepted', 'delivery.delivered', 'delivery.deferred', 'delivery.failed']
              ORDER BY workspace_id LIMIT $2",
        )
        .bind(after.map_or(i64::MIN, |scope| scope.workspace_id().get()))
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing workspaces with delivery subscriptions"))?;
        Ok(ids.into_iter().map(WorkspaceScope::from_engine_row).collect())
    }

    /// Returns the time for which the oldest pending delivery has been due, in seconds; 0 when none is due. Deliveries
    /// of disabled subscriptions and of suspended workspaces are not due.
    pub async fn subscription_lag(&self) -> StoreResult<f64> {
        sqlx::query_scalar(concat!(
            "SELECT coalesce(greatest(extract(epoch FROM relay_now() - min(d.next_attempt_at)), 0), 0)::float8
                   FROM subscription_deliveries d JOIN subscriptions s USING (workspace_id, subscription_id)
                  WHERE d.status = 'pending' AND s.is_active AND NOT ",
            is_suspended!("s")
        ))
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("measuring the lag of subscriptions"))
    }
}
