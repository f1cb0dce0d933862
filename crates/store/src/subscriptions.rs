//! Event subscriptions, and the events on their way to them. Secrets come in sealed and go out sealed.

use chrono::{DateTime, Utc};
use relay_domain::{SubscriptionId, WorkspaceScope};
use serde_json::Value;

use crate::{Store, StoreError, StoreResult};

/// An event subscription.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct SubscriptionRow {
    /// The subscription.
    pub subscription_id: i64,
    /// The kinds of events that it wants; `*` is all of them.
    pub events: Vec<String>,
    /// `{channel?, mentions?}`.
    pub filter: Option<Value>,
    /// Where the events go.
    pub url: String,
    /// The names of its own headers.
    pub header_names: Vec<String>,
    /// How calls are signed, if it has a secret.
    pub signature_scheme: Option<String>,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// Why it was switched off, if it was: `gone` or `failing`.
    pub disabled_reason: Option<String>,
    /// When it was switched off.
    pub disabled_at: Option<DateTime<Utc>>,
}

/// What a subscription keeps secret, as stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sealed {
    /// Which key it is sealed with.
    pub key_id: String,
    /// The sealed bytes.
    pub bytes: Vec<u8>,
}

/// A subscription to be made.
#[derive(Debug)]
pub struct NewSubscription<'a> {
    /// What is shown of it.
    pub row: &'a SubscriptionRow,
    /// Its secret and its headers' values.
    pub sealed: Option<&'a Sealed>,
}

/// An event on its way to a subscription's address.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct SubscriptionDeliveryRow {
    /// Its id.
    pub delivery_id: i64,
    /// The kind of event.
    pub event_kind: String,
    /// pending, delivered or dead_letter.
    pub status: String,
    /// How often it was tried.
    pub attempts: i32,
    /// The HTTP status of the last try, if it got one.
    pub last_status: Option<i16>,
    /// What went wrong at the last try.
    pub last_error: Option<String>,
    /// When it is tried next.
    pub next_attempt_at: Option<DateTime<Utc>>,
    /// When the event happened.
    pub created_at: DateTime<Utc>,
    /// When it was last tried or replayed.
    pub updated_at: Option<DateTime<Utc>>,
}

macro_rules! select {
    ($rest:literal) => {
        concat!(
            "SELECT subscription_id, events, filter, url, header_names, signature_scheme, created_at,
                    disabled_reason, disabled_at
               FROM subscriptions ",
            $rest
        )
    };
}

impl Store {
    /// Makes a subscription. False when the workspace has `limit` of them.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn create_subscription(
        &self,
        scope: WorkspaceScope,
        new: &NewSubscription<'_>,
        limit: i64,
    ) -> StoreResult<bool> {
        let row = new.row;
        let doing = "making a subscription";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        let made = sqlx::query(
            "INSERT INTO subscriptions (workspace_id, subscription_id, events, filter, url, header_names,
                                        signature_scheme, secret_key_id, sealed, created_at, event_cursor)
             SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10,
                    -- What happens from now on.
                    coalesce((SELECT next_seq - 1 FROM event_heads WHERE workspace_id = $1), 0)
              WHERE (SELECT count(*) FROM subscriptions WHERE workspace_id = $1) < $11",
        )
        .bind(scope.workspace_id().get())
        .bind(row.subscription_id)
        .bind(&row.events)
        .bind(&row.filter)
        .bind(&row.url)
        .bind(&row.header_names)
        .bind(&row.signature_scheme)
        .bind(new.sealed.map(|sealed| sealed.key_id.as_str()))
        .bind(new.sealed.map(|sealed| sealed.bytes.as_slice()))
        .bind(row.created_at)
        .bind(limit)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(made.rows_affected() == 1)
    }

    /// The subscriptions of a workspace, oldest first, at most `limit`.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn subscriptions(&self, scope: WorkspaceScope, limit: i64) -> StoreResult<Vec<SubscriptionRow>> {
        sqlx::query_as(select!("WHERE workspace_id = $1 ORDER BY subscription_id LIMIT $2"))
            .bind(scope.workspace_id().get())
            .bind(limit)
            .fetch_all(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("listing subscriptions"))
    }

    /// A subscription.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn subscription(
        &self,
        scope: WorkspaceScope,
        subscription: SubscriptionId,
    ) -> StoreResult<Option<SubscriptionRow>> {
        sqlx::query_as(select!("WHERE workspace_id = $1 AND subscription_id = $2"))
            .bind(scope.workspace_id().get())
            .bind(subscription.get())
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading a subscription"))
    }

    /// Deletes a subscription with what was on its way to it. False when there is none of that id.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn delete_subscription(&self, scope: WorkspaceScope, subscription: SubscriptionId) -> StoreResult<bool> {
        let gone: Option<i64> = sqlx::query_scalar(
            "WITH gone AS (
                DELETE FROM subscriptions WHERE workspace_id = $1 AND subscription_id = $2 RETURNING subscription_id
             ), deliveries AS (
                DELETE FROM subscription_deliveries d USING gone
                 WHERE d.workspace_id = $1 AND d.subscription_id = gone.subscription_id
             )
             SELECT subscription_id FROM gone",
        )
        .bind(scope.workspace_id().get())
        .bind(subscription.get())
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("deleting a subscription"))?;
        Ok(gone.is_some())
    }

    /// Events on their way to a subscription's address, newest first; with `status` only those.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn subscription_deliveries(
        &self,
        scope: WorkspaceScope,
        subscription: SubscriptionId,
        status: Option<&str>,
        limit: i64,
    ) -> StoreResult<Vec<SubscriptionDeliveryRow>> {
        sqlx::query_as(
            "SELECT delivery_id, event_kind, status, attempts, last_status, last_error, next_attempt_at, created_at,
                    updated_at
               FROM subscription_deliveries
              WHERE workspace_id = $1 AND subscription_id = $2 AND ($3::text IS NULL OR status = $3)
              ORDER BY delivery_id DESC LIMIT $4",
        )
        .bind(scope.workspace_id().get())
        .bind(subscription.get())
        .bind(status)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing the deliveries of a subscription"))
    }

    /// Sends an event once more that was given up or delivered before; one that is still on its way is
    /// left alone. `None` when there is no such delivery.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn replay_subscription_delivery(
        &self,
        scope: WorkspaceScope,
        subscription: SubscriptionId,
        delivery: i64,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<SubscriptionDeliveryRow>> {
        sqlx::query_as(
            "WITH unblocked AS (
                UPDATE subscriptions SET blocked_until = NULL WHERE workspace_id = $1 AND subscription_id = $2
             )
             UPDATE subscription_deliveries
                SET status = 'pending',
                    attempts = CASE WHEN status = 'pending' THEN attempts ELSE 0 END,
                    next_attempt_at = CASE WHEN status = 'pending' THEN next_attempt_at ELSE $4 END,
                    updated_at = CASE WHEN status = 'pending' THEN updated_at ELSE $4 END
              WHERE workspace_id = $1 AND subscription_id = $2 AND delivery_id = $3
             RETURNING delivery_id, event_kind, status, attempts, last_status, last_error, next_attempt_at,
                       created_at, updated_at",
        )
        .bind(scope.workspace_id().get())
        .bind(subscription.get())
        .bind(delivery)
        .bind(at)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("replaying a delivery of a subscription"))
    }
}
