//! Observer tokens and the overrides that announce their changes to every gateway.
//!
//! A signed token contains its scopes and filters. A later change is written to `observer_overrides` in the transaction
//! that changes the row.

use chrono::{DateTime, TimeDelta, Utc};
use const_format::formatcp;
use relay_domain::{
    ObserverTokenId, WorkspaceId, WorkspaceScope,
    access::token::{ChangeOrigin, TokenHash},
    events::kind,
    observers::ObserverToken,
    snowflake::first_id_at,
};
use serde_json::Value;

use crate::{
    Store, StoreError, StoreResult,
    access::{
        rotation::{ChangedToken, TokenSubject, token_event},
        tokens::parse_hashes,
    },
    connections::{DatabaseSession, Transaction},
    events::{self, RecordedEvents},
};

/// Observer token to create.
#[derive(Debug)]
pub struct NewObserverToken<'a> {
    pub token_id: ObserverTokenId,
    pub name: &'a str,
    pub description: Option<&'a str>,
    pub scopes: &'a [String],
    pub filters: &'a Value,
    pub expires_at: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
    /// End of its text.
    pub signed_until: DateTime<Utc>,
}

/// Limits of a workspace's tokens.
#[derive(Debug, Clone, Copy)]
pub struct ObserverTokenLimits {
    /// Active tokens.
    pub active: i64,
    /// Tokens created within a day, revoked ones included.
    pub per_day: i64,
}

/// Change of a token. `None` leaves a field as it is, `Some(None)` clears it.
#[derive(Debug, Default)]
pub struct ObserverTokenChange<'a> {
    pub name: Option<&'a str>,
    pub description: Option<Option<&'a str>>,
    pub scopes: Option<&'a [String]>,
    pub filters: Option<&'a Value>,
    pub expires_at: Option<Option<DateTime<Utc>>>,
}

/// Outcome of a creation.
#[derive(Debug)]
pub enum ObserverTokenCreation {
    Created(Box<ObserverToken>),
    NameTaken,
    /// The quota of active tokens is used up.
    TooMany,
    /// Too many were created within a day.
    TooManyToday,
    /// The workspace is deleted.
    NoWorkspace,
}

/// Outcome of a change.
#[derive(Debug)]
pub enum ObserverTokenUpdate {
    Changed(Box<ObserverToken>),
    NameTaken,
    /// The token does not exist or is revoked.
    Missing,
}

const DAY: TimeDelta = TimeDelta::days(1);

const COLUMNS: &str = "t.token_id, t.name, t.description, t.scopes, t.filters, t.version, t.created_at, t.updated_at,
     t.expires_at, t.revoked_at, t.last_used_at,
     least(t.expires_at, (SELECT w.expires_at FROM workspaces w WHERE w.workspace_id = t.workspace_id))
        AS effective_expiry";

const NAME_TAKEN: &str = "observer_tokens_name_is_unique_while_active";

impl Store {
    /// Creates a token. Releases the name of an expired token, which counts as revoked since its expiry.
    pub async fn create_observer_token(
        &self,
        scope: WorkspaceScope,
        new: &NewObserverToken<'_>,
        limits: ObserverTokenLimits,
    ) -> StoreResult<ObserverTokenCreation> {
        let doing = "creating an observer token";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        if !lock_workspace(&mut tx, scope).await? {
            return Ok(ObserverTokenCreation::NoWorkspace);
        }
        let replaced: Option<ObserverTokenId> = sqlx::query_scalar(
            "UPDATE observer_tokens SET revoked_at = expires_at, updated_at = $3
              WHERE workspace_id = $1 AND name = $2 AND revoked_at IS NULL AND expires_at <= $3
             RETURNING token_id",
        )
        .bind(scope.workspace_id())
        .bind(new.name)
        .bind(new.created_at)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if let Some(token) = replaced {
            write_override(&mut tx, scope, token).await?;
        }
        if let Some(refused) = check_limits(&mut tx, scope, limits, new.created_at).await? {
            return Ok(refused);
        }
        // The text ends with the token, with its workspace, or at `$9` (90 days after its creation), whichever is
        // first. Nulls do not count.
        let created = sqlx::query_as::<_, ObserverToken>(formatcp!(
            "INSERT INTO observer_tokens AS t
                (workspace_id, token_id, name, description, scopes, filters, expires_at, created_at, signed_until)
             SELECT $1, $2, $3, $4, $5, $6, $7, $8, least($7, w.expires_at, $9)
               FROM workspaces w WHERE w.workspace_id = $1
             RETURNING {COLUMNS}"
        ))
        .bind(scope.workspace_id())
        .bind(new.token_id)
        .bind(new.name)
        .bind(new.description)
        .bind(new.scopes)
        .bind(new.filters)
        .bind(new.expires_at)
        .bind(new.created_at)
        .bind(new.signed_until)
        .fetch_one(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing));
        match created {
            // The unique index decides between two creations at once.
            Err(error) if error.violates(NAME_TAKEN) => Ok(ObserverTokenCreation::NameTaken),
            Err(error) => Err(error),
            Ok(row) => {
                // A repetition would find the name taken by the token itself.
                tx.commit().await.map_err(StoreError::from_commit(doing))?;
                Ok(ObserverTokenCreation::Created(Box::new(row)))
            }
        }
    }

    /// Returns the tokens of the workspace, active ones first, then newest first.
    pub async fn observer_tokens(&self, scope: WorkspaceScope, limit: i64) -> StoreResult<Vec<ObserverToken>> {
        sqlx::query_as(formatcp!(
            "SELECT {COLUMNS} FROM observer_tokens t WHERE t.workspace_id = $1
              ORDER BY t.revoked_at IS NOT NULL, t.token_id DESC LIMIT $2"
        ))
        .bind(scope.workspace_id())
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing observer tokens"))
    }

    /// Returns a token, also if it is revoked.
    pub async fn observer_token(
        &self,
        scope: WorkspaceScope,
        token: ObserverTokenId,
    ) -> StoreResult<Option<ObserverToken>> {
        sqlx::query_as(formatcp!(
            "SELECT {COLUMNS} FROM observer_tokens t WHERE t.workspace_id = $1 AND t.token_id = $2"
        ))
        .bind(scope.workspace_id())
        .bind(token)
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading an observer token"))
    }

    /// Changes an active token.
    pub async fn update_observer_token(
        &self,
        scope: WorkspaceScope,
        token: ObserverTokenId,
        change: &ObserverTokenChange<'_>,
        at: DateTime<Utc>,
    ) -> StoreResult<ObserverTokenUpdate> {
        let doing = "changing an observer token";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        if !lock_workspace(&mut tx, scope).await? {
            return Ok(ObserverTokenUpdate::Missing);
        }
        // `signed_until` does not follow `expires_at`: strings that were signed before keep their own expiry, and
        // pruning must keep the override for as long as they verify.
        let changed = sqlx::query_as::<_, ObserverToken>(formatcp!(
            "UPDATE observer_tokens t SET
                name = coalesce($3, t.name),
                description = CASE WHEN $4 THEN $5 ELSE t.description END,
                scopes = coalesce($6, t.scopes),
                filters = coalesce($7, t.filters),
                expires_at = CASE WHEN $8 THEN $9 ELSE t.expires_at END,
                updated_at = $10
              WHERE t.workspace_id = $1 AND t.token_id = $2 AND t.revoked_at IS NULL
             RETURNING {COLUMNS}"
        ))
        .bind(scope.workspace_id())
        .bind(token)
        .bind(change.name)
        .bind(change.description.is_some())
        .bind(change.description.flatten())
        .bind(change.scopes)
        .bind(change.filters)
        .bind(change.expires_at.is_some())
        .bind(change.expires_at.flatten())
        .bind(at)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing));
        let row = match changed {
            Err(error) if error.violates(NAME_TAKEN) => return Ok(ObserverTokenUpdate::NameTaken),
            Err(error) => return Err(error),
            Ok(None) => return Ok(ObserverTokenUpdate::Missing),
            Ok(Some(row)) => row,
        };
        write_override(&mut tx, scope, token).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(ObserverTokenUpdate::Changed(Box::new(row)))
    }

    /// Begins a new version of an active token, whose text ends at `signed_until`; all earlier strings are revoked.
    /// `None` if it does not exist or is revoked.
    pub async fn rotate_observer_token(
        &self,
        scope: WorkspaceScope,
        token: ObserverTokenId,
        at: DateTime<Utc>,
        signed_until: DateTime<Utc>,
    ) -> StoreResult<Option<(ObserverToken, ChangedToken)>> {
        let doing = "rotating an observer token";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        if !lock_workspace(&mut tx, scope).await? {
            return Ok(None);
        }
        // The later end counts: pruning keeps the override for as long as any string of the token may verify.
        let row = sqlx::query_as::<_, ObserverToken>(formatcp!(
            "UPDATE observer_tokens t SET version = t.version + 1, updated_at = $3,
                signed_until = greatest(t.signed_until, least(t.expires_at, w.expires_at, $4))
               FROM workspaces w
              WHERE t.workspace_id = $1 AND t.token_id = $2 AND t.revoked_at IS NULL AND w.workspace_id = $1
             RETURNING {COLUMNS}"
        ))
        .bind(scope.workspace_id())
        .bind(token)
        .bind(at)
        .bind(signed_until)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(row) = row else { return Ok(None) };
        let changed = delete_opaque_tokens(&mut tx, scope, token).await?;
        write_override(&mut tx, scope, token).await?;
        let recorded = record(&mut tx, scope, kind::TOKEN_ROTATED, token, at).await?;
        // A repetition would begin another version, which revokes the text of this one.
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(Some((row, ChangedToken { changed, recorded })))
    }

    /// Revokes an active token. `None` if it does not exist or is revoked.
    pub async fn revoke_observer_token(
        &self,
        scope: WorkspaceScope,
        token: ObserverTokenId,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<ChangedToken>> {
        let doing = "revoking an observer token";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        if !lock_workspace(&mut tx, scope).await? {
            return Ok(None);
        }
        let done = sqlx::query(
            "UPDATE observer_tokens SET revoked_at = $3, updated_at = $3
              WHERE workspace_id = $1 AND token_id = $2 AND revoked_at IS NULL",
        )
        .bind(scope.workspace_id())
        .bind(token)
        .bind(at)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if done.rows_affected() == 0 {
            return Ok(None);
        }
        let changed = delete_opaque_tokens(&mut tx, scope, token).await?;
        write_override(&mut tx, scope, token).await?;
        let recorded = record(&mut tx, scope, kind::TOKEN_REVOKED, token, at).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(ChangedToken { changed, recorded }))
    }

    /// Records the last use of tokens.
    pub async fn record_observer_token_use(
        &self,
        used: &[(WorkspaceScope, ObserverTokenId, DateTime<Utc>)],
    ) -> StoreResult<()> {
        let workspaces: Vec<WorkspaceId> = used.iter().map(|(scope, ..)| scope.workspace_id()).collect();
        let tokens: Vec<ObserverTokenId> = used.iter().map(|(_, token, _)| *token).collect();
        let times: Vec<DateTime<Utc>> = used.iter().map(|(.., at)| *at).collect();
        // Gateways note uses independently and may write them in any order.
        sqlx::query(
            "UPDATE observer_tokens t SET last_used_at = greatest(t.last_used_at, u.at)
               FROM unnest($1::bigint[], $2::bigint[], $3::timestamptz[]) AS u (workspace_id, token_id, at)
              WHERE t.workspace_id = u.workspace_id AND t.token_id = u.token_id",
        )
        .bind(workspaces)
        .bind(tokens)
        .bind(times)
        .execute(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("recording the use of observer tokens"))?;
        Ok(())
    }
}

/// Prevents the deletion of the workspace until the transaction ends, so that either the deletion sees the rows of the
/// transaction, or the transaction sees the deletion. Returns false if the workspace is deleted.
async fn lock_workspace(tx: &mut Transaction, scope: WorkspaceScope) -> StoreResult<bool> {
    sqlx::query("SELECT FROM workspaces WHERE workspace_id = $1 AND deleted_at IS NULL FOR SHARE")
        .bind(scope.workspace_id())
        .fetch_optional(&mut **tx)
        .await
        .map(|row| row.is_some())
        .map_err(StoreError::from_sqlx("locking a workspace"))
}

/// Records a change that the workspace key made to a token. The last statement before the commit.
async fn record(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    kind: &'static str,
    token: ObserverTokenId,
    at: DateTime<Utc>,
) -> StoreResult<RecordedEvents> {
    let event = token_event(kind, TokenSubject::Observer(token), ChangeOrigin::WorkspaceKey);
    events::append(tx, scope, at, vec![event]).await
}

/// Returns the reason for refusing a further token. Concurrent creations do not see each other, because FOR SHARE locks
/// are compatible: together they may exceed a limit by a few tokens, which is accepted.
async fn check_limits(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    limits: ObserverTokenLimits,
    at: DateTime<Utc>,
) -> StoreResult<Option<ObserverTokenCreation>> {
    // Ids are in the order of creation, so the second count reads no older token.
    let (active, today): (i64, i64) = sqlx::query_as(
        "SELECT (SELECT count(*) FROM observer_tokens WHERE workspace_id = $1 AND revoked_at IS NULL),
                (SELECT count(*) FROM observer_tokens WHERE workspace_id = $1 AND token_id >= $2)",
    )
    .bind(scope.workspace_id())
    .bind(first_id_at((at - DAY).timestamp_millis()))
    .fetch_one(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx("counting observer tokens"))?;
    Ok(match (active >= limits.active, today >= limits.per_day) {
        (true, _) => Some(ObserverTokenCreation::TooMany),
        (false, true) => Some(ObserverTokenCreation::TooManyToday),
        (false, false) => None,
    })
}

async fn delete_opaque_tokens(
    tx: &mut Transaction,
    scope: WorkspaceScope,
    token: ObserverTokenId,
) -> StoreResult<Vec<TokenHash>> {
    let hashes: Vec<Vec<u8>> = sqlx::query_scalar(
        "DELETE FROM tokens WHERE workspace_id = $1 AND observer_token_id = $2 AND kind = 'observer'
         RETURNING token_hash",
    )
    .bind(scope.workspace_id())
    .bind(token)
    .fetch_all(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx("revoking opaque observer tokens"))?;
    Ok(parse_hashes(&hashes))
}

/// Copies the current state of a token to its override, so it comes after all changes of the transaction.
async fn write_override(tx: &mut Transaction, scope: WorkspaceScope, token: ObserverTokenId) -> StoreResult<()> {
    sqlx::query(
        "INSERT INTO observer_overrides (token_id, workspace_id, state, version, scopes, filters, expires_at)
         SELECT t.token_id, t.workspace_id, CASE WHEN t.revoked_at IS NULL THEN 'live' ELSE 'revoked' END,
                t.version, t.scopes, t.filters, least(t.expires_at, w.expires_at)
           FROM observer_tokens t JOIN workspaces w USING (workspace_id)
          WHERE t.workspace_id = $1 AND t.token_id = $2
         ON CONFLICT (token_id) DO UPDATE SET
            state = EXCLUDED.state, version = EXCLUDED.version, scopes = EXCLUDED.scopes,
            filters = EXCLUDED.filters, expires_at = EXCLUDED.expires_at, changed_in = EXCLUDED.changed_in",
    )
    .bind(scope.workspace_id())
    .bind(token)
    .execute(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx("writing the override of an observer token"))?;
    Ok(())
}

/// Marks all tokens of a workspace that was deleted in this transaction.
pub(crate) async fn override_workspace_tokens(tx: &mut DatabaseSession, scope: WorkspaceScope) -> StoreResult<()> {
    sqlx::query(
        "INSERT INTO observer_overrides (token_id, workspace_id, state, version, scopes, filters)
         SELECT token_id, workspace_id, 'workspace_deleted', version, scopes, '{}'
           FROM observer_tokens WHERE workspace_id = $1
         ON CONFLICT (token_id) DO UPDATE SET state = EXCLUDED.state, changed_in = EXCLUDED.changed_in",
    )
    .bind(scope.workspace_id())
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("writing the overrides of a deleted workspace"))?;
    Ok(())
}
