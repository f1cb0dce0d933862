//! Overrides of signed observer tokens and the keys that sign them. They take no scope, because every gateway reads
//! those of all workspaces.

use std::time::Duration;

use chrono::{DateTime, Utc};
use const_format::formatcp;
use relay_domain::ObserverTokenId;
use serde_json::Value;
use sqlx::{FromRow, Row as _, postgres::PgRow};

use crate::{Store, StoreError, StoreResult, decode::decode_rows};

/// Overrides read by one statement.
const PAGE: i64 = 5_000;
/// Ended tokens, of which there may be many, come without what they could see.
const COLUMNS: &str = "token_id, state, version, expires_at,
    CASE WHEN state = 'live' THEN scopes ELSE '{}' END AS scopes,
    CASE WHEN state = 'live' THEN filters ELSE '{}' END AS filters";

/// State of a token that was changed after it was signed.
#[derive(Debug, Clone)]
pub struct OverrideRow {
    pub token_id: ObserverTokenId,
    pub state: OverrideState,
    /// The only valid version.
    pub version: i64,
    pub scopes: Vec<String>,
    pub filters: Value,
    pub expires_at: Option<DateTime<Utc>>,
}

/// Validity of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverrideState {
    Live,
    Revoked,
    WorkspaceDeleted,
}

impl FromRow<'_, PgRow> for OverrideRow {
    fn from_row(row: &PgRow) -> sqlx::Result<Self> {
        Ok(Self {
            token_id: row.try_get("token_id")?,
            state: match row.try_get::<&str, _>("state")? {
                "live" => OverrideState::Live,
                "workspace_deleted" => OverrideState::WorkspaceDeleted,
                // "revoked", or a state of a newer release. Failing would leave this process with stale overrides of
                // all tokens, so the token alone is refused.
                _ => OverrideState::Revoked,
            },
            version: row.try_get("version")?,
            scopes: row.try_get("scopes")?,
            filters: row.try_get("filters")?,
            expires_at: row.try_get("expires_at")?,
        })
    }
}

/// Position of a reader of overrides: a transaction id. The default is the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OverrideCursor(i64);

/// Key that signs tokens, or retired key.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct SigningKeyRow {
    /// Key id in token headers.
    pub kid: String,
    /// Ed25519, 32 bytes.
    pub public_key: Vec<u8>,
    /// PKCS#8, possibly encrypted; `None` once retired.
    pub private_key: Option<Vec<u8>>,
    /// Id of the secret that encrypts the private key; `None` if it is not encrypted.
    pub sealed_with: Option<String>,
    pub created_at: DateTime<Utc>,
    pub retired_at: Option<DateTime<Utc>>,
}

/// Outcome of a retirement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetireOutcome {
    /// Retired by this call or earlier.
    Retired,
    /// Not retired: the newest key signs tokens.
    InUse,
    Missing,
}

/// Signs of changes to what the validity of observer tokens depends on.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct ObserverChanges {
    /// Overrides were written since the cursor.
    pub has_overrides: bool,
    /// Digest of all signing keys.
    pub keys: String,
}

impl Store {
    /// Returns the changes since the cursor. One small read, where most find none.
    pub async fn observer_changes(&self, since: OverrideCursor) -> StoreResult<ObserverChanges> {
        sqlx::query_as(
            "SELECT (SELECT true FROM observer_overrides WHERE changed_in >= $1::text::xid8
                      ORDER BY changed_in LIMIT 1) IS NOT NULL AS has_overrides,
                    (SELECT md5(coalesce(string_agg(k::text, ',' ORDER BY kid), '')) FROM signing_keys k) AS keys",
        )
        .bind(since.0.to_string())
        .fetch_one(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("looking for changes of observer tokens"))
    }

    /// Returns the overrides written since the cursor, and the next cursor. Some may be returned again; none is missed,
    /// however long its transaction took.
    pub async fn observer_overrides(&self, since: OverrideCursor) -> StoreResult<(Vec<OverrideRow>, OverrideCursor)> {
        let doing = "reading overrides of observer tokens";
        // Transactions before this one have ended, so the statements below see their rows. Those that are still open
        // have a later id and are read with the next cursor.
        let next: i64 = sqlx::query_scalar("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint")
            .fetch_one(&self.pool)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        let mut all: Vec<OverrideRow> = Vec::new();
        loop {
            let after = all.last().map_or(ObserverTokenId::new(-1), |row| row.token_id);
            // Two statements: the first reading pages through the key, later ones read the index over changes.
            let page = if since == OverrideCursor::default() {
                sqlx::query(formatcp!(
                    "SELECT {COLUMNS} FROM observer_overrides WHERE token_id > $1 ORDER BY token_id LIMIT $2"
                ))
                .bind(after)
                .bind(PAGE)
                .fetch_all(&self.pool)
                .await
            } else {
                sqlx::query(formatcp!(
                    "SELECT {COLUMNS} FROM observer_overrides
                      WHERE changed_in >= $3::text::xid8 AND token_id > $1 ORDER BY token_id LIMIT $2"
                ))
                .bind(after)
                .bind(PAGE)
                .bind(since.0.to_string())
                .fetch_all(&self.pool)
                .await
            }
            .map_err(StoreError::from_sqlx(doing))?;
            all.extend(decode_rows::<OverrideRow>("observer_overrides", &page)?);
            let full = i64::try_from(page.len()).is_ok_and(|read| read == PAGE);
            if !full {
                return Ok((all, OverrideCursor(next)));
            }
        }
    }

    /// Removes up to `limit` tokens that were revoked longer than `age` ago, with their overrides. Returns their
    /// number.
    ///
    /// An override is kept while a string of its token could still verify: until all strings have expired, or all keys
    /// that are not retired are newer than the revocation.
    pub async fn prune_observer_tokens(&self, age: Duration, limit: i64) -> StoreResult<u64> {
        let done = sqlx::query(
            "WITH old AS (
                SELECT workspace_id, token_id FROM observer_tokens
                 WHERE revoked_at < relay_now() - make_interval(secs => $1)
                   AND (signed_until < relay_now() - interval '1 day'
                        OR revoked_at < (SELECT min(created_at) FROM signing_keys WHERE retired_at IS NULL))
                 ORDER BY revoked_at LIMIT $2
                   FOR UPDATE SKIP LOCKED),
             removed AS (DELETE FROM observer_overrides o USING old WHERE o.token_id = old.token_id)
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

    /// Renews the texts of up to `limit` active tokens that end within `time`, by overrides with the expiry of the
    /// tokens themselves. Returns their number. An override that another transaction writes in the meantime is newer.
    pub async fn renew_observer_tokens(&self, time: Duration, limit: i64) -> StoreResult<u64> {
        let done = sqlx::query(
            "INSERT INTO observer_overrides (token_id, workspace_id, state, version, scopes, filters, expires_at)
             SELECT t.token_id, t.workspace_id, 'live', t.version, t.scopes, t.filters, least(t.expires_at, w.expires_at)
               FROM observer_tokens t JOIN workspaces w USING (workspace_id)
              WHERE t.revoked_at IS NULL AND w.deleted_at IS NULL
                AND t.signed_until BETWEEN relay_now() AND relay_now() + make_interval(secs => $1)
                -- The text of others ends with the token.
                AND coalesce(least(t.expires_at, w.expires_at) > t.signed_until, true)
                AND NOT EXISTS (SELECT FROM observer_overrides o WHERE o.token_id = t.token_id)
              LIMIT $2
             ON CONFLICT (token_id) DO NOTHING",
        )
        .bind(time.as_secs_f64())
        .bind(limit)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("renewing observer tokens"))?;
        Ok(done.rows_affected())
    }

    /// Returns all signing keys, newest first, retired ones included.
    pub async fn signing_keys(&self) -> StoreResult<Vec<SigningKeyRow>> {
        sqlx::query_as(
            "SELECT kid, public_key, private_key, sealed_with, created_at, retired_at FROM signing_keys
              ORDER BY created_at DESC, kid",
        )
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading signing keys"))
    }

    /// Adds a key, which signs tokens while it is the newest. `first` adds it only if no key that is not retired is
    /// encrypted with the same secret. Returns whether it was added: at most `max_active` keys are not retired.
    pub async fn add_signing_key(&self, key: &SigningKeyRow, first: bool, max_active: i64) -> StoreResult<bool> {
        let doing = "adding a signing key";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        // Serializes gateways that start together, so that they add one first key and not one each.
        sqlx::query("SELECT pg_advisory_xact_lock(hashtext('relay_signing_keys'))")
            .execute(&mut *tx)
            .await
            .map_err(StoreError::from_sqlx(doing))?;
        // The newest key signs, so a new one must be newer than all others, whatever this process's clock says.
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
        .bind(max_active)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(added.rows_affected() == 1)
    }

    /// Retires a key, which invalidates the tokens that it signed, and erases its private key. The newest key cannot be
    /// retired.
    pub async fn retire_signing_key(&self, kid: &str, at: DateTime<Utc>) -> StoreResult<RetireOutcome> {
        let doing = "retiring a signing key";
        // The last SELECT reads the row from before the update, which tells a key that was retired earlier.
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
            None => RetireOutcome::Missing,
            Some((false, false)) => RetireOutcome::InUse,
            Some(_) => RetireOutcome::Retired,
        })
    }
}
