//! Events on their way to the addresses of subscriptions: who serves a subscription, what waits for it, and what
//! has become of it.
//!
//! A subscription is leased as a whole, so that its events leave in order. Each statement that changes something
//! for a holder repeats the holder's epoch: whoever has lost the lease changes nothing.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::{MessageId, SubscriptionId, WorkspaceId, WorkspaceScope, event};
use serde_json::{Value, json};
use sqlx::Row;

use crate::{
    Store, StoreError, StoreResult,
    events::{self, NewEvent, Recorded},
    holds::is_held,
    messages_read::day_of,
    patience::Patient as _,
    subscriptions::Sealed,
};

/// A subscription that is this worker's to serve.
#[derive(Debug, Clone)]
pub struct LeasedSubscription {
    /// The tenant.
    pub scope: WorkspaceScope,
    /// The subscription.
    pub id: SubscriptionId,
    /// What fences its holder's writes.
    pub epoch: i64,
    /// The kinds of events that it wants; `*` is all of them.
    pub events: Vec<String>,
    /// `{channel?, mentions?}`.
    pub filter: Option<Value>,
    /// Where they go.
    pub url: String,
    /// How calls are signed, if they are.
    pub signature_scheme: Option<String>,
    /// Its secret and its headers' values.
    pub sealed: Option<Sealed>,
    /// The last event that was looked at.
    pub event_cursor: Option<i64>,
    /// Failed tries in a row.
    pub failures: i32,
    /// Since when it fails.
    pub failing_since: Option<DateTime<Utc>>,
}

/// An event that waits to be sent.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct WaitingCall {
    /// Its id, the same at each try.
    pub delivery_id: i64,
    /// The kind of event.
    pub event_kind: String,
    /// What is sent.
    pub body: String,
    /// Tries so far.
    pub attempts: i32,
    /// Not to be tried before.
    pub next_attempt_at: DateTime<Utc>,
    /// When the event happened.
    pub created_at: DateTime<Utc>,
    /// W3C trace context of the event's message, if that was traced.
    pub traceparent: Option<String>,
}

/// An event that a subscription wants.
#[derive(Debug, Clone)]
pub struct WantedEvent {
    /// The id that its delivery gets.
    pub delivery_id: i64,
    /// The event's number.
    pub event_seq: i64,
    /// Its kind.
    pub kind: String,
    /// What is sent.
    pub body: String,
    /// When it happened.
    pub created_at: DateTime<Utc>,
    /// The message that it is of.
    pub message_id: Option<MessageId>,
}

/// What came of a try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallOutcome {
    /// It was taken.
    Delivered,
    /// It is tried again then.
    Retry(DateTime<Utc>),
    /// It is given up.
    DeadLetter,
}

/// A try that was made.
#[derive(Debug, Clone)]
pub struct CallTried {
    /// The event.
    pub delivery_id: i64,
    /// What came of it.
    pub outcome: CallOutcome,
    /// The HTTP status, if there was one.
    pub status: Option<i16>,
    /// What went wrong.
    pub error: Option<String>,
    /// Nothing else is sent before this.
    pub blocked_until: Option<DateTime<Utc>>,
}

// Due: not blocked, and something waits or has happened. Fair to tenants: at most $5 of one are served here at a time.
const CLAIM: &str = concat!(
    "
WITH due AS (
    SELECT s.workspace_id, s.subscription_id,
           row_number() OVER (PARTITION BY s.workspace_id ORDER BY s.lease_until NULLS FIRST) AS nth
      FROM subscriptions s
      LEFT JOIN event_heads h USING (workspace_id)
     WHERE s.is_active AND coalesce(s.lease_until < now(), true) AND coalesce(s.blocked_until <= now(), true)
       AND NOT ",
    is_held!("s"),
    "
       AND (s.failures >= $4) = $3
       AND (s.event_cursor IS NULL OR s.event_cursor < coalesce(h.next_seq, 1) - 1
            OR EXISTS (SELECT FROM subscription_deliveries d
                        WHERE d.workspace_id = s.workspace_id AND d.subscription_id = s.subscription_id
                          AND d.status = 'pending'))
), served AS MATERIALIZED (
    SELECT workspace_id, count(*) AS places
      FROM subscriptions
     WHERE lease_owner = $1 AND lease_until > now() AND (failures >= $4) = $3
     GROUP BY workspace_id
), taken AS (
    SELECT s.workspace_id, s.subscription_id
      FROM subscriptions s
      JOIN due USING (workspace_id, subscription_id)
      LEFT JOIN served USING (workspace_id)
     WHERE due.nth <= $5 - coalesce(served.places, 0) AND coalesce(s.lease_until < now(), true)
     ORDER BY s.lease_until NULLS FIRST LIMIT $2
       FOR UPDATE OF s SKIP LOCKED
)
UPDATE subscriptions s
   SET lease_owner = $1, lease_epoch = lease_epoch + 1, lease_until = now() + make_interval(secs => $6)
  FROM taken
 WHERE s.workspace_id = taken.workspace_id AND s.subscription_id = taken.subscription_id
RETURNING s.workspace_id, s.subscription_id, s.lease_epoch, s.events, s.filter, s.url, s.signature_scheme,
          s.secret_key_id, s.sealed, s.event_cursor, s.failures, s.failing_since"
);

const QUEUE: &str = "
WITH held AS (
    UPDATE subscriptions
       SET event_cursor = $4, lease_until = now() + make_interval(secs => $10)
     WHERE workspace_id = $1 AND subscription_id = $2 AND lease_epoch = $3 AND is_active
    RETURNING subscription_id
), queued AS (
    INSERT INTO subscription_deliveries (workspace_id, subscription_id, delivery_id, event_seq, event_kind, body,
                                         next_attempt_at, created_at, traceparent)
    SELECT $1, $2, e.delivery_id, e.event_seq, e.kind, e.body, now(), e.created_at,
           (SELECT m.traceparent FROM messages m
             WHERE m.workspace_id = $1 AND m.message_id = e.message_id AND m.created_on = e.message_day)
      FROM held
     CROSS JOIN unnest($5::bigint[], $6::bigint[], $7::text[], $8::text[], $9::timestamptz[], $11::bigint[], $12::date[])
           AS e (delivery_id, event_seq, kind, body, created_at, message_id, message_day)
    ON CONFLICT (workspace_id, subscription_id, event_seq) WHERE event_seq > 0 DO NOTHING
)
SELECT count(*) FROM held";

const TRIED: &str = "
WITH held AS (
    UPDATE subscriptions
       SET failures = CASE WHEN $5 = 'delivered' THEN 0 ELSE failures + 1 END,
           failing_since = CASE WHEN $5 = 'delivered' THEN NULL ELSE coalesce(failing_since, now()) END,
           blocked_until = $9, lease_until = now() + make_interval(secs => $10)
     WHERE workspace_id = $1 AND subscription_id = $2 AND lease_epoch = $3 AND is_active
    RETURNING failures, failing_since
), noted AS (
    UPDATE subscription_deliveries d
       SET status = $5, attempts = attempts + 1, next_attempt_at = $6, last_status = $7, last_error = $8,
           updated_at = now()
      FROM held
     WHERE d.workspace_id = $1 AND d.subscription_id = $2 AND d.delivery_id = $4 AND d.status = 'pending'
)
SELECT failures, failing_since FROM held";

impl Store {
    /// Leases subscriptions for which something is to be done: with `failing` those that have failed
    /// `failing_from` times in a row or more, else the others. At most `per_workspace` of a tenant, with those that
    /// this owner serves already.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn claim_subscriptions(
        &self,
        owner: &str,
        failing: bool,
        failing_from: i32,
        limit: i64,
        per_workspace: i64,
        lease: Duration,
    ) -> StoreResult<Vec<LeasedSubscription>> {
        let rows = sqlx::query(CLAIM)
            .bind(owner)
            .bind(limit)
            .bind(failing)
            .bind(failing_from)
            .bind(per_workspace)
            .bind(lease.as_secs_f64())
            .fetch_all(&self.pool)
            .patiently()
            .await
            .map_err(StoreError::from_sqlx("claiming subscriptions"))?;
        let leased = rows.iter().map(|row| LeasedSubscription {
            scope: WorkspaceScope::from_engine_row(WorkspaceId::new(row.get("workspace_id"))),
            id: SubscriptionId::new(row.get("subscription_id")),
            epoch: row.get("lease_epoch"),
            events: row.get("events"),
            filter: row.get("filter"),
            url: row.get("url"),
            signature_scheme: row.get("signature_scheme"),
            sealed: row
                .get::<Option<String>, _>("secret_key_id")
                .zip(row.get("sealed"))
                .map(|(key_id, bytes)| Sealed { key_id, bytes }),
            event_cursor: row.get("event_cursor"),
            failures: row.get("failures"),
            failing_since: row.get("failing_since"),
        });
        Ok(leased.collect())
    }

    /// What waits to be sent, in the order of the events.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn waiting_calls(&self, of: &LeasedSubscription, limit: i64) -> StoreResult<Vec<WaitingCall>> {
        sqlx::query_as(
            "SELECT delivery_id, event_kind, body, attempts, next_attempt_at, created_at, traceparent
               FROM subscription_deliveries
              WHERE workspace_id = $1 AND subscription_id = $2 AND status = 'pending'
              ORDER BY event_seq, delivery_id LIMIT $3",
        )
        .bind(of.scope.workspace_id().get())
        .bind(of.id.get())
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading what waits for a subscription"))
    }

    /// Queues events and moves the subscription's cursor behind the last one that was looked at. An event that it
    /// has had before is left out. False when the lease is lost: nothing has changed then.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn queue_wanted(
        &self,
        of: &LeasedSubscription,
        cursor: i64,
        wanted: &[WantedEvent],
        lease: Duration,
    ) -> StoreResult<bool> {
        let held: i64 = sqlx::query_scalar(QUEUE)
            .bind(of.scope.workspace_id().get())
            .bind(of.id.get())
            .bind(of.epoch)
            .bind(cursor)
            .bind(wanted.iter().map(|event| event.delivery_id).collect::<Vec<_>>())
            .bind(wanted.iter().map(|event| event.event_seq).collect::<Vec<_>>())
            .bind(wanted.iter().map(|event| event.kind.as_str()).collect::<Vec<_>>())
            .bind(wanted.iter().map(|event| event.body.as_str()).collect::<Vec<_>>())
            .bind(wanted.iter().map(|event| event.created_at).collect::<Vec<_>>())
            .bind(lease.as_secs_f64())
            .bind(wanted.iter().map(|event| event.message_id.map(MessageId::get)).collect::<Vec<_>>())
            .bind(wanted.iter().map(|event| event.message_id.map(|id| day_of(id.get()))).collect::<Vec<_>>())
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("queueing events for a subscription"))?;
        Ok(held > 0)
    }

    /// Notes a try. Returns how often the subscription has failed in a row and since when; `None` when the lease
    /// is lost, so that the event will be sent once more by whoever has it.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn note_call(
        &self,
        of: &LeasedSubscription,
        tried: &CallTried,
        lease: Duration,
    ) -> StoreResult<Option<(i32, Option<DateTime<Utc>>)>> {
        let (status, next_attempt_at) = match tried.outcome {
            CallOutcome::Delivered => ("delivered", None),
            CallOutcome::Retry(at) => ("pending", Some(at)),
            CallOutcome::DeadLetter => ("dead_letter", None),
        };
        sqlx::query_as(TRIED)
            .bind(of.scope.workspace_id().get())
            .bind(of.id.get())
            .bind(of.epoch)
            .bind(tried.delivery_id)
            .bind(status)
            .bind(next_attempt_at)
            .bind(tried.status)
            .bind(&tried.error)
            .bind(tried.blocked_until)
            .bind(lease.as_secs_f64())
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("noting a call to a subscription"))
    }

    /// Gives a subscription back; with a time, nobody takes it before.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn release_subscription(
        &self,
        of: &LeasedSubscription,
        blocked_until: Option<DateTime<Utc>>,
    ) -> StoreResult<()> {
        sqlx::query(
            "UPDATE subscriptions
                SET lease_owner = NULL, lease_until = now(), blocked_until = coalesce($4, blocked_until)
              WHERE workspace_id = $1 AND subscription_id = $2 AND lease_epoch = $3 AND lease_owner IS NOT NULL",
        )
        .bind(of.scope.workspace_id().get())
        .bind(of.id.get())
        .bind(of.epoch)
        .bind(blocked_until)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("releasing a subscription"))?;
        Ok(())
    }

    /// Switches a subscription off, with an event that says so. `None` when the lease is lost.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn disable_subscription(
        &self,
        of: &LeasedSubscription,
        reason: &'static str,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<Recorded>> {
        let doing = "disabling a subscription";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let since: Option<(Option<DateTime<Utc>>,)> = sqlx::query_as(
            "UPDATE subscriptions
                SET is_active = false, disabled_reason = $4, disabled_at = $5, lease_owner = NULL, lease_until = now()
              WHERE workspace_id = $1 AND subscription_id = $2 AND lease_epoch = $3 AND is_active
             RETURNING failing_since",
        )
        .bind(of.scope.workspace_id().get())
        .bind(of.id.get())
        .bind(of.epoch)
        .bind(reason)
        .bind(at)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some((failing_since,)) = since else { return Ok(None) };
        // The address stays out of it: it may hold a secret, and observers read this.
        let data = json!({
            "subscription_id": of.id.to_string(), "reason": reason,
            "failing_since": failing_since.map(|at| at.to_rfc3339_opts(chrono::SecondsFormat::Millis, true)),
        });
        let event = NewEvent::new(event::SUBSCRIPTION_DISABLED, data);
        let recorded = events::append(&mut tx, of.scope, at, vec![event]).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(recorded))
    }

    /// Sends what a subscription has missed since then: what was given up is due again, events that it never got
    /// are looked at again, and it is active. What was delivered stays delivered. False when there is no such
    /// subscription.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn replay_subscription(
        &self,
        scope: WorkspaceScope,
        id: SubscriptionId,
        since: DateTime<Utc>,
    ) -> StoreResult<bool> {
        let doing = "replaying a subscription";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // A new epoch: whoever is at it works with a cursor that is over.
        let known = sqlx::query(
            "UPDATE subscriptions s
                SET is_active = true, disabled_reason = NULL, disabled_at = NULL, failures = 0, failing_since = NULL,
                    blocked_until = NULL, lease_owner = NULL, lease_until = NULL, lease_epoch = lease_epoch + 1,
                    event_cursor = coalesce(
                        (SELECT max(l.last_seq) FROM event_log l WHERE l.workspace_id = $1 AND l.created_at < $3),
                        (SELECT min(l.first_seq) - 1 FROM event_log l WHERE l.workspace_id = $1),
                        s.event_cursor)
              WHERE workspace_id = $1 AND subscription_id = $2",
        )
        .bind(scope.workspace_id().get())
        .bind(id.get())
        .bind(since)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        sqlx::query(
            "UPDATE subscription_deliveries
                SET status = 'pending', attempts = 0, next_attempt_at = now(), updated_at = now()
              WHERE workspace_id = $1 AND subscription_id = $2 AND status = 'dead_letter' AND created_at >= $3",
        )
        .bind(scope.workspace_id().get())
        .bind(id.get())
        .bind(since)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(known.rows_affected() > 0)
    }

    /// Workspaces that have a subscription to what happens to single deliveries: such events are made only where
    /// somebody looks. At most `limit` above `after`, in order.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn workspaces_to_watch(
        &self,
        after: Option<WorkspaceScope>,
        limit: i64,
    ) -> StoreResult<Vec<WorkspaceScope>> {
        let ids: Vec<i64> = sqlx::query_scalar(
            "SELECT DISTINCT workspace_id FROM subscriptions
              WHERE workspace_id > $1 AND is_active
                AND events && ARRAY['*', 'delivery.accepted', 'delivery.delivered', 'delivery.deferred', 'delivery.failed']
              ORDER BY workspace_id LIMIT $2",
        )
        .bind(after.map_or(i64::MIN, |scope| scope.workspace_id().get()))
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("finding workspaces to watch"))?;
        Ok(ids.into_iter().map(|id| WorkspaceScope::from_engine_row(WorkspaceId::new(id))).collect())
    }

    /// How long the oldest event that waits to be sent has been due, in seconds; 0 when none is. What waits for a
    /// subscription that was switched off, or whose workspace is held, is not due.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn subscription_lag(&self) -> StoreResult<f64> {
        sqlx::query_scalar(concat!(
            "SELECT coalesce(greatest(extract(epoch FROM now() - min(d.next_attempt_at)), 0), 0)::float8
                   FROM subscription_deliveries d JOIN subscriptions s USING (workspace_id, subscription_id)
                  WHERE d.status = 'pending' AND s.is_active AND NOT ",
            is_held!("s")
        ))
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("measuring the lag of subscriptions"))
    }

    /// Removes what is older than `age` and was delivered or given up, or waits for a subscription that is switched off: a
    /// bounded number of rows.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn prune_subscription_deliveries(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        let done = sqlx::query(
            "DELETE FROM subscription_deliveries d
              USING (SELECT workspace_id, subscription_id, delivery_id FROM subscription_deliveries o
                      WHERE created_at < now() - make_interval(secs => $1)
                        AND (status <> 'pending'
                             OR NOT EXISTS (SELECT FROM subscriptions s
                                             WHERE s.workspace_id = o.workspace_id
                                               AND s.subscription_id = o.subscription_id AND s.is_active))
                      ORDER BY created_at LIMIT $2 FOR UPDATE SKIP LOCKED) AS old
              WHERE d.workspace_id = old.workspace_id AND d.subscription_id = old.subscription_id
                AND d.delivery_id = old.delivery_id",
        )
        .bind(age.as_secs_f64())
        .bind(limit)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("pruning what subscriptions have had"))?;
        Ok(done.rows_affected())
    }
}
