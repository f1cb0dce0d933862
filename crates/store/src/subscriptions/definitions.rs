//! Definitions of event subscriptions, and lists of their deliveries. Main type: [`NewSubscription`]; called by the
//! engine's subscription use cases. Secrets are encrypted by the caller and stay encrypted here.

use chrono::{DateTime, Utc};
use relay_domain::{
    AgentId, SubscriptionDeliveryId, SubscriptionId, WorkspaceScope,
    subscriptions::{DeliveryStatus, Disabled, DisabledReason, EventFilter, Subscription, SubscriptionDelivery},
};
use sqlx::{FromRow, Row as _, postgres::PgRow, types::Json};

use crate::{
    Store, StoreError, StoreResult,
    decode::{decode_row, decode_rows},
};

/// Encrypted secret, as stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncryptedSecret {
    /// Key that it is encrypted with.
    pub key_id: String,
    /// Nonce and ciphertext.
    pub bytes: Vec<u8>,
}

/// Subscription to be created.
#[derive(Debug)]
pub struct NewSubscription<'a> {
    pub subscription: &'a Subscription,
    /// Signing secret and header values.
    pub secret: Option<&'a EncryptedSecret>,
}

/// Row of `subscriptions`.
struct SubscriptionRow(Subscription);

impl FromRow<'_, PgRow> for SubscriptionRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        let disabled_reason: Option<DisabledReason> = row.try_get("disabled_reason")?;
        let disabled_at: Option<DateTime<Utc>> = row.try_get("disabled_at")?;
        Ok(Self(Subscription {
            id: row.try_get("subscription_id")?,
            events: row.try_get("events")?,
            filter: row.try_get::<Option<Json<EventFilter>>, _>("filter")?.map(|Json(filter)| filter),
            url: row.try_get("url")?,
            header_names: row.try_get("header_names")?,
            signature_scheme: row.try_get("signature_scheme")?,
            created_at: row.try_get("created_at")?,
            created_by: row.try_get("created_by")?,
            // Both columns are written together.
            disabled: disabled_reason.zip(disabled_at).map(|(reason, at)| Disabled { reason, at }),
        }))
    }
}

/// Row of `subscription_deliveries`.
struct DeliveryRow(SubscriptionDelivery);

impl FromRow<'_, PgRow> for DeliveryRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self(SubscriptionDelivery {
            id: row.try_get("delivery_id")?,
            event_kind: row.try_get("event_kind")?,
            status: row.try_get("status")?,
            attempts: row.try_get("attempts")?,
            last_status: row.try_get("last_status")?,
            last_error: row.try_get("last_error")?,
            next_attempt_at: row.try_get("next_attempt_at")?,
            created_at: row.try_get("created_at")?,
            updated_at: row.try_get("updated_at")?,
        }))
    }
}

macro_rules! select {
    ($rest:literal) => {
        concat!(
            "SELECT subscription_id, events, filter, url, header_names, signature_scheme, created_at, created_by,
                    disabled_reason, disabled_at
               FROM subscriptions ",
            $rest
        )
    };
}

impl Store {
    /// Creates a subscription. Returns `false` when the workspace has `limit` of them.
    pub async fn create_subscription(
        &self,
        scope: WorkspaceScope,
        new: &NewSubscription<'_>,
        limit: i64,
    ) -> StoreResult<bool> {
        let subscription = new.subscription;
        let doing = "creating a subscription";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // The count is not locked: two creations at once may pass the limit by one, which does no harm.
        let created = sqlx::query(
            "INSERT INTO subscriptions (workspace_id, subscription_id, events, filter, url, header_names,
                                        signature_scheme, secret_key_id, sealed, created_at, created_by,
                                        event_cursor)
             SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $12,
                    -- Starts with the next event.
                    coalesce((SELECT next_seq - 1 FROM event_heads WHERE workspace_id = $1), 0)
              WHERE (SELECT count(*) FROM subscriptions WHERE workspace_id = $1) < $11",
        )
        .bind(scope.workspace_id())
        .bind(subscription.id)
        .bind(&subscription.events)
        .bind(subscription.filter.as_ref().map(Json))
        .bind(&subscription.url)
        .bind(&subscription.header_names)
        .bind(subscription.signature_scheme)
        .bind(new.secret.map(|secret| secret.key_id.as_str()))
        .bind(new.secret.map(|secret| secret.bytes.as_slice()))
        .bind(subscription.created_at)
        .bind(limit)
        .bind(subscription.created_by)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        // Not idempotent: a retry after an unknown outcome would create a second subscription.
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(created.rows_affected() == 1)
    }

    /// Lists the subscriptions of a workspace, oldest first, at most `limit`; with `owner`, only those that this agent
    /// created.
    pub async fn subscriptions(
        &self,
        scope: WorkspaceScope,
        owner: Option<AgentId>,
        limit: i64,
    ) -> StoreResult<Vec<Subscription>> {
        let rows = sqlx::query(select!(
            "WHERE workspace_id = $1 AND ($3::bigint IS NULL OR created_by = $3) ORDER BY subscription_id LIMIT $2"
        ))
        .bind(scope.workspace_id())
        .bind(limit)
        .bind(owner)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing subscriptions"))?;
        Ok(decode_rows::<SubscriptionRow>("subscriptions", &rows)?.into_iter().map(|row| row.0).collect())
    }

    pub async fn subscription(
        &self,
        scope: WorkspaceScope,
        subscription: SubscriptionId,
    ) -> StoreResult<Option<Subscription>> {
        let row = sqlx::query(select!("WHERE workspace_id = $1 AND subscription_id = $2"))
            .bind(scope.workspace_id())
            .bind(subscription)
            .fetch_optional(&self.pool)
            .await
            .map_err(StoreError::from_sqlx("reading a subscription"))?;
        row.map(|row| decode_row::<SubscriptionRow>("subscriptions", &row).map(|row| row.0)).transpose()
    }

    /// Deletes a subscription with its deliveries. Returns `false` when there is none of that id.
    pub async fn delete_subscription(&self, scope: WorkspaceScope, subscription: SubscriptionId) -> StoreResult<bool> {
        // One statement: a worker that holds the lease finds neither the subscription nor its deliveries afterwards.
        let deleted: Option<SubscriptionId> = sqlx::query_scalar(
            "WITH deleted AS (
                DELETE FROM subscriptions WHERE workspace_id = $1 AND subscription_id = $2 RETURNING subscription_id
             ), deliveries AS (
                DELETE FROM subscription_deliveries d USING deleted
                 WHERE d.workspace_id = $1 AND d.subscription_id = deleted.subscription_id
             )
             SELECT subscription_id FROM deleted",
        )
        .bind(scope.workspace_id())
        .bind(subscription)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("deleting a subscription"))?;
        Ok(deleted.is_some())
    }

    /// Lists the deliveries of a subscription, newest first, all or those with a status.
    pub async fn subscription_deliveries(
        &self,
        scope: WorkspaceScope,
        subscription: SubscriptionId,
        status: Option<DeliveryStatus>,
        limit: i64,
    ) -> StoreResult<Vec<SubscriptionDelivery>> {
        let rows = sqlx::query(
            "SELECT delivery_id, event_kind, status, attempts, last_status, last_error, next_attempt_at, created_at,
                    updated_at
               FROM subscription_deliveries
              WHERE workspace_id = $1 AND subscription_id = $2 AND ($3::text IS NULL OR status = $3)
              ORDER BY delivery_id DESC LIMIT $4",
        )
        .bind(scope.workspace_id())
        .bind(subscription)
        .bind(status)
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing the deliveries of a subscription"))?;
        Ok(decode_rows::<DeliveryRow>("subscription_deliveries", &rows)?.into_iter().map(|row| row.0).collect())
    }

    /// Makes a delivered or dead-lettered delivery pending again; a pending one keeps its schedule. `None` when there
    /// is no such delivery.
    pub async fn replay_subscription_delivery(
        &self,
        scope: WorkspaceScope,
        subscription: SubscriptionId,
        delivery: SubscriptionDeliveryId,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<SubscriptionDelivery>> {
        let row = sqlx::query(
            // The subscription is unblocked too, so that the replay does not wait for the end of a backoff.
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
        .bind(scope.workspace_id())
        .bind(subscription)
        .bind(delivery)
        .bind(at)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("replaying a delivery of a subscription"))?;
        row.map(|row| decode_row::<DeliveryRow>("subscription_deliveries", &row).map(|row| row.0)).transpose()
    }
}
