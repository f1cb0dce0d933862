//! What every gateway must know of observer tokens: overrides and signing keys. They have no tenant: a
//! gateway reads them whole.

use std::time::Duration;

use chrono::{DateTime, Utc};
use relay_domain::ObserverTokenId;
use serde_json::Value;
use sqlx::{FromRow, Row as _, postgres::PgRow};

use crate::{Store, StoreError, StoreResult};

/// Overrides read at once.
const PAGE: i64 = 5_000;

/// What has become of a token since it was signed.
#[derive(Debug, Clone)]
pub struct OverrideRow {
    /// The token.
    pub token_id: ObserverTokenId,
    /// Its state.
    pub state: OverrideState,
    /// The one version whose strings are alive.
    pub version: i64,
    /// Texts of its scopes.
    pub scopes: Vec<String>,
    /// Its filters, an object.
    pub filters: Value,
    /// When it ends.
    pub expires_at: Option<DateTime<Utc>>,
}

/// Whether a token lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverrideState {
    /// It does.
    Live,
    /// It was revoked.
    Revoked,
    /// Its workspace was deleted.
    WorkspaceDeleted,
}

impl FromRow<'_, PgRow> for OverrideRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            token_id: ObserverTokenId::new(row.try_get("token_id")?),
            state: match row.try_get::<&str, _>("state")? {
                "live" => OverrideState::Live,
                "workspace_deleted" => OverrideState::WorkspaceDeleted,
                _ => OverrideState::Revoked,
            },
            version: row.try_get("version")?,
            scopes: row.try_get("scopes")?,
            filters: row.try_get("filters")?,
            expires_at: row.try_get("expires_at")?,
        })
    }
}

/// How far a reader of overrides has come. The default is the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OverrideCursor(i64);

/// A key that signs tokens, or did.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct SigningKeyRow {
    /// Its name in token headers.
    pub kid: String,
    /// Ed25519, 32 bytes.
    pub public_key: Vec<u8>,
    /// PKCS#8, sealed or not; `None` once retired.
    pub private_key: Option<Vec<u8>>,
    /// Which secret the private half is sealed with; `None` when it is not.
    pub sealed_with: Option<String>,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it was retired.
    pub retired_at: Option<DateTime<Utc>>,
}

/// What became of a retirement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retirement {
    /// It is retired, now or before.
    Retired,
    /// It is the newest key: tokens are still signed with it.
    InUse,
    /// There is no such key.
    Missing,
}

impl Store {
    /// The overrides written since the cursor, and the next cursor. Some may be returned again; none is
    /// missed, whatever its transaction took.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn observer_overrides(&self, since: OverrideCursor) -> StoreResult<(Vec<OverrideRow>, OverrideCursor)> {
        let doing = "reading overrides of observer tokens";
        // Everything before this transaction has ended and is visible to what is read after it.
        let next: i64 = sqlx::query_scalar("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let mut all: Vec<OverrideRow> = Vec::new();
        loop {
            let after = all.last().map_or(-1, |row| row.token_id.get());
            let page: Vec<OverrideRow> = if since == OverrideCursor::default() {
                sqlx::query_as(
                    "SELECT token_id, state, version, scopes, filters, expires_at FROM observer_overrides
                      WHERE token_id > $1 ORDER BY token_id LIMIT $2",
                )
                .bind(after)
                .bind(PAGE)
                .fetch_all(&self.pool)
                .await
            } else {
                sqlx::query_as(
                    "SELECT token_id, state, version, scopes, filters, expires_at FROM observer_overrides
                      WHERE changed_in >= $3::text::xid8 AND token_id > $1 ORDER BY token_id LIMIT $2",
                )
                .bind(after)
                .bind(PAGE)
                .bind(since.0.to_string())
                .fetch_all(&self.pool)
                .await
            }
            .map_err(StoreError::from_sqlx(doing))?;
            let full = i64::try_from(page.len()).is_ok_and(|read| read == PAGE);
            all.extend(page);
            if !full {
                return Ok((all, OverrideCursor(next)));
            }
        }
    }

    /// Removes up to `limit` tokens that were revoked longer than `age` ago, with their overrides, if no
    /// string of theirs could verify any more: all of them have ended, or every living key is younger than the
    /// revocation. Returns how many.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn prune_observer_tokens(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        let done = sqlx::query(
            "WITH old AS (
                SELECT workspace_id, token_id FROM observer_tokens
                 WHERE revoked_at < now() - make_interval(secs => $1)
                   AND (signed_until < now() - interval '1 day'
                        OR revoked_at < (SELECT min(created_at) FROM signing_keys WHERE retired_at IS NULL))
                 ORDER BY revoked_at LIMIT $2
                   FOR UPDATE SKIP LOCKED),
             forgotten AS (DELETE FROM observer_overrides o USING old WHERE o.token_id = old.token_id)
             DELETE FROM observer_tokens t USING old
              WHERE t.workspace_id = old.workspace_id AND t.token_id = old.token_id",
        )
        .bind(age.as_secs_f64())
        .bind(limit)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("pruning observer tokens"))?;
        Ok(done.rows_affected())
    }

    /// All signing keys, newest first; retired ones among them.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn signing_keys(&self) -> StoreResult<Vec<SigningKeyRow>> {
        sqlx::query_as(
            "SELECT kid, public_key, private_key, sealed_with, created_at, retired_at FROM signing_keys
              ORDER BY created_at DESC, kid",
        )
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading signing keys"))
    }

    /// Adds a key: the newest is signed with. With `first`, only where no living key is sealed with the
    /// same secret. At most `at_most` keys live at once. Returns whether it was added.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn add_signing_key(&self, key: &SigningKeyRow, first: bool, at_most: i64) -> StoreResult<bool> {
        let doing = "adding a signing key";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // Gateways that start together make one first key, not one each.
        sqlx::query("SELECT pg_advisory_xact_lock(hashtext('relay_signing_keys'))")
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let added = sqlx::query(
            "INSERT INTO signing_keys (kid, public_key, private_key, sealed_with, created_at)
             SELECT $1, $2, $3, $4, greatest($5, (SELECT max(created_at) FROM signing_keys) + interval '1 ms')
              WHERE NOT ($6 AND EXISTS (
                        SELECT FROM signing_keys WHERE retired_at IS NULL AND sealed_with IS NOT DISTINCT FROM $4))
                AND (SELECT count(*) FROM signing_keys WHERE retired_at IS NULL) < $7",
        )
        .bind(&key.kid)
        .bind(&key.public_key)
        .bind(&key.private_key)
        .bind(&key.sealed_with)
        .bind(key.created_at)
        .bind(first)
        .bind(at_most)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(added.rows_affected() == 1)
    }

    /// Retires a key: tokens that it signed are dead, and its private half is erased. The newest one stays.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn retire_signing_key(&self, kid: &str, at: DateTime<Utc>) -> StoreResult<Retirement> {
        let doing = "retiring a signing key";
        let found: Option<(bool, bool)> = sqlx::query_as(
            "WITH retired AS (
                UPDATE signing_keys SET retired_at = $2, private_key = NULL
                 WHERE kid = $1 AND retired_at IS NULL
                   AND kid <> (SELECT kid FROM signing_keys WHERE retired_at IS NULL
                                ORDER BY created_at DESC, kid LIMIT 1)
                RETURNING kid)
             SELECT EXISTS (SELECT FROM retired), retired_at IS NOT NULL FROM signing_keys WHERE kid = $1",
        )
        .bind(kid)
        .bind(at)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        Ok(match found {
            None => Retirement::Missing,
            Some((false, false)) => Retirement::InUse,
            Some(_) => Retirement::Retired,
        })
    }
}
