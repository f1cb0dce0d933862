//! Observer tokens: their rows, and the overrides that tell every gateway what has changed about them.
//!
//! A signed token carries its own scopes and filters. Whatever changes afterwards is written to
//! `observer_overrides` in the same transaction as the row.

use chrono::{DateTime, Utc};
use relay_domain::{ObserverTokenId, WorkspaceScope, token::TokenHash};
use serde_json::Value;
use sqlx::{PgConnection, PgTransaction};

use crate::{Store, StoreError, StoreResult, tokens::read_hash};

/// An observer token as stored.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct ObserverTokenRow {
    /// The token.
    pub token_id: i64,
    /// Its name, unique among the workspace's active ones.
    pub name: String,
    /// What it is for.
    pub description: Option<String>,
    /// Texts of its scopes.
    pub scopes: Vec<String>,
    /// Its filters, an object.
    pub filters: Value,
    /// How often it was rotated, from 1.
    pub version: i64,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it was last changed or rotated.
    pub updated_at: Option<DateTime<Utc>>,
    /// When it ends by itself.
    pub expires_at: Option<DateTime<Utc>>,
    /// When it was revoked.
    pub revoked_at: Option<DateTime<Utc>>,
    /// When it was last used, to half a minute.
    pub last_used_at: Option<DateTime<Utc>>,
    /// When it ends, or its workspace does.
    pub effective_expiry: Option<DateTime<Utc>>,
}

/// A token to be made.
#[derive(Debug)]
pub struct NewObserverToken<'a> {
    /// The token.
    pub token_id: ObserverTokenId,
    /// Its name.
    pub name: &'a str,
    /// What it is for.
    pub description: Option<&'a str>,
    /// Texts of its scopes.
    pub scopes: &'a [String],
    /// Its filters, an object.
    pub filters: &'a Value,
    /// When it ends by itself.
    pub expires_at: Option<DateTime<Utc>>,
    /// When it is made.
    pub created_at: DateTime<Utc>,
}

/// What to change of a token. `None` leaves a field as it is.
#[derive(Debug, Default)]
pub struct ObserverTokenChange<'a> {
    /// Its name.
    pub name: Option<&'a str>,
    /// What it is for; `Some(None)` clears it.
    pub description: Option<Option<&'a str>>,
    /// Texts of its scopes.
    pub scopes: Option<&'a [String]>,
    /// Its filters, an object.
    pub filters: Option<&'a Value>,
    /// When it ends by itself; `Some(None)`: never.
    pub expires_at: Option<Option<DateTime<Utc>>>,
}

/// What became of a creation.
#[derive(Debug)]
pub enum ObserverTokenCreation {
    /// It was made.
    Made(Box<ObserverTokenRow>),
    /// An active token has that name.
    NameTaken,
    /// The workspace has as many active tokens as it may.
    TooMany,
    /// The workspace is gone.
    NoWorkspace,
}

/// What became of a change.
#[derive(Debug)]
pub enum ObserverTokenUpdate {
    /// The token as it is now.
    Changed(Box<ObserverTokenRow>),
    /// Another active token has that name.
    NameTaken,
    /// There is no such token, or it is revoked.
    Missing,
}

macro_rules! columns {
    () => {
        "t.token_id, t.name, t.description, t.scopes, t.filters, t.version, t.created_at, t.updated_at, t.expires_at,
         t.revoked_at, t.last_used_at,
         least(t.expires_at, (SELECT w.expires_at FROM workspaces w WHERE w.workspace_id = t.workspace_id))
            AS effective_expiry"
    };
}

const NAME_TAKEN: &str = "observer_tokens_name_is_unique_while_active";

impl Store {
    /// Makes a token. An expired one of the same name gives way: it counts as revoked from its end on.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn create_observer_token(
        &self,
        scope: WorkspaceScope,
        new: &NewObserverToken<'_>,
        at_most: i64,
    ) -> StoreResult<ObserverTokenCreation> {
        let doing = "creating an observer token";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        if !hold_workspace(&mut tx, scope).await? {
            return Ok(ObserverTokenCreation::NoWorkspace);
        }
        let gave_way: Option<i64> = sqlx::query_scalar(
            "UPDATE observer_tokens SET revoked_at = expires_at, updated_at = $3
              WHERE workspace_id = $1 AND name = $2 AND revoked_at IS NULL AND expires_at <= $3
             RETURNING token_id",
        )
        .bind(scope.workspace_id().get())
        .bind(new.name)
        .bind(new.created_at)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if let Some(token) = gave_way {
            overrule(&mut tx, scope, ObserverTokenId::new(token)).await?;
        }
        // Another creation of this workspace may count at the same time; the ceiling is not exact.
        let active: i64 =
            sqlx::query_scalar("SELECT count(*) FROM observer_tokens WHERE workspace_id = $1 AND revoked_at IS NULL")
                .bind(scope.workspace_id().get())
                .fetch_one(&mut *tx)
                .await
                .map_err(StoreError::from_sqlx(doing))?;
        if active >= at_most {
            return Ok(ObserverTokenCreation::TooMany);
        }
        let made = sqlx::query_as::<_, ObserverTokenRow>(concat!(
            "INSERT INTO observer_tokens AS t
                (workspace_id, token_id, name, description, scopes, filters, expires_at, created_at, signed_until)
             SELECT $1, $2, $3, $4, $5, $6, $7, $8, coalesce(least($7, w.expires_at), 'infinity')
               FROM workspaces w WHERE w.workspace_id = $1
             RETURNING ",
            columns!()
        ))
        .bind(scope.workspace_id().get())
        .bind(new.token_id.get())
        .bind(new.name)
        .bind(new.description)
        .bind(new.scopes)
        .bind(new.filters)
        .bind(new.expires_at)
        .bind(new.created_at)
        .fetch_one(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing));
        match made {
            Err(error) if error.violates(NAME_TAKEN) => Ok(ObserverTokenCreation::NameTaken),
            Err(error) => Err(error),
            Ok(row) => {
                tx.commit().await.map_err(StoreError::from_commit(doing))?;
                Ok(ObserverTokenCreation::Made(Box::new(row)))
            }
        }
    }

    /// The workspace's tokens, active ones first, then newest first.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn observer_tokens(&self, scope: WorkspaceScope, limit: i64) -> StoreResult<Vec<ObserverTokenRow>> {
        sqlx::query_as(concat!(
            "SELECT ",
            columns!(),
            " FROM observer_tokens t WHERE t.workspace_id = $1
              ORDER BY t.revoked_at IS NOT NULL, t.token_id DESC LIMIT $2"
        ))
        .bind(scope.workspace_id().get())
        .bind(limit)
        .fetch_all(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("listing observer tokens"))
    }

    /// One token, revoked ones included.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn observer_token(
        &self,
        scope: WorkspaceScope,
        token: ObserverTokenId,
    ) -> StoreResult<Option<ObserverTokenRow>> {
        sqlx::query_as(concat!(
            "SELECT ",
            columns!(),
            " FROM observer_tokens t WHERE t.workspace_id = $1 AND t.token_id = $2"
        ))
        .bind(scope.workspace_id().get())
        .bind(token.get())
        .fetch_optional(&self.pool)
        .await
        .map_err(StoreError::from_sqlx("reading an observer token"))
    }

    /// Changes what is given of an active token.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn update_observer_token(
        &self,
        scope: WorkspaceScope,
        token: ObserverTokenId,
        change: &ObserverTokenChange<'_>,
        at: DateTime<Utc>,
    ) -> StoreResult<ObserverTokenUpdate> {
        let doing = "changing an observer token";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        if !hold_workspace(&mut tx, scope).await? {
            return Ok(ObserverTokenUpdate::Missing);
        }
        // What was signed stays as it is: `signed_until` does not follow `expires_at`.
        let changed = sqlx::query_as::<_, ObserverTokenRow>(concat!(
            "UPDATE observer_tokens t SET
                name = coalesce($3, t.name),
                description = CASE WHEN $4 THEN $5 ELSE t.description END,
                scopes = coalesce($6, t.scopes),
                filters = coalesce($7, t.filters),
                expires_at = CASE WHEN $8 THEN $9 ELSE t.expires_at END,
                updated_at = $10
              WHERE t.workspace_id = $1 AND t.token_id = $2 AND t.revoked_at IS NULL
             RETURNING ",
            columns!()
        ))
        .bind(scope.workspace_id().get())
        .bind(token.get())
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
        overrule(&mut tx, scope, token).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(ObserverTokenUpdate::Changed(Box::new(row)))
    }

    /// Begins a new version of an active token: strings of earlier ones are dead, opaque ones included.
    /// Returns the token, and the hashes of the opaque strings that died. `None` when there is no such
    /// token or it is revoked.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn rotate_observer_token(
        &self,
        scope: WorkspaceScope,
        token: ObserverTokenId,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<(ObserverTokenRow, Vec<TokenHash>)>> {
        let doing = "rotating an observer token";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        if !hold_workspace(&mut tx, scope).await? {
            return Ok(None);
        }
        let row = sqlx::query_as::<_, ObserverTokenRow>(concat!(
            "UPDATE observer_tokens t SET version = t.version + 1, updated_at = $3,
                signed_until = greatest(t.signed_until, coalesce(least(t.expires_at, w.expires_at), 'infinity'))
               FROM workspaces w
              WHERE t.workspace_id = $1 AND t.token_id = $2 AND t.revoked_at IS NULL AND w.workspace_id = $1
             RETURNING ",
            columns!()
        ))
        .bind(scope.workspace_id().get())
        .bind(token.get())
        .bind(at)
        .fetch_optional(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        let Some(row) = row else { return Ok(None) };
        let dead = drop_opaque(&mut tx, scope, token).await?;
        overrule(&mut tx, scope, token).await?;
        tx.commit().await.map_err(StoreError::from_commit(doing))?;
        Ok(Some((row, dead)))
    }

    /// Revokes an active token. Returns the hashes of the opaque strings that died; `None` when there is
    /// no such token or it is revoked.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn revoke_observer_token(
        &self,
        scope: WorkspaceScope,
        token: ObserverTokenId,
        at: DateTime<Utc>,
    ) -> StoreResult<Option<Vec<TokenHash>>> {
        let doing = "revoking an observer token";
        let mut tx = self.pool.begin().await.map_err(StoreError::from_sqlx(doing))?;
        if !hold_workspace(&mut tx, scope).await? {
            return Ok(None);
        }
        let revoked = sqlx::query(
            "UPDATE observer_tokens SET revoked_at = $3, updated_at = $3
              WHERE workspace_id = $1 AND token_id = $2 AND revoked_at IS NULL",
        )
        .bind(scope.workspace_id().get())
        .bind(token.get())
        .bind(at)
        .execute(&mut *tx)
        .await
        .map_err(StoreError::from_sqlx(doing))?;
        if revoked.rows_affected() == 0 {
            return Ok(None);
        }
        let dead = drop_opaque(&mut tx, scope, token).await?;
        overrule(&mut tx, scope, token).await?;
        tx.commit().await.map_err(StoreError::from_sqlx(doing))?;
        Ok(Some(dead))
    }

    /// Notes when tokens were used.
    ///
    /// # Errors
    /// When Postgres is away.
    pub async fn observer_tokens_used(
        &self,
        used: &[(WorkspaceScope, ObserverTokenId, DateTime<Utc>)],
    ) -> StoreResult<()> {
        let workspaces: Vec<i64> = used.iter().map(|(scope, ..)| scope.workspace_id().get()).collect();
        let tokens: Vec<i64> = used.iter().map(|(_, token, _)| token.get()).collect();
        let times: Vec<DateTime<Utc>> = used.iter().map(|(.., at)| *at).collect();
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
        .map_err(StoreError::from_sqlx("noting the use of observer tokens"))?;
        Ok(())
    }
}

/// Keeps the workspace from being deleted until the transaction ends, so that either the deletion sees
/// what the transaction did, or the transaction sees the deletion. False when the workspace is gone.
async fn hold_workspace(tx: &mut PgTransaction<'_>, scope: WorkspaceScope) -> StoreResult<bool> {
    sqlx::query("SELECT FROM workspaces WHERE workspace_id = $1 AND deleted_at IS NULL FOR SHARE")
        .bind(scope.workspace_id().get())
        .fetch_optional(&mut **tx)
        .await
        .map(|row| row.is_some())
        .map_err(StoreError::from_sqlx("holding a workspace"))
}

async fn drop_opaque(
    tx: &mut PgTransaction<'_>,
    scope: WorkspaceScope,
    token: ObserverTokenId,
) -> StoreResult<Vec<TokenHash>> {
    let hashes: Vec<Vec<u8>> = sqlx::query_scalar(
        "DELETE FROM tokens WHERE workspace_id = $1 AND observer_token_id = $2 AND kind = 'observer'
         RETURNING token_hash",
    )
    .bind(scope.workspace_id().get())
    .bind(token.get())
    .fetch_all(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx("dropping opaque observer tokens"))?;
    Ok(hashes.iter().filter_map(|bytes| read_hash(bytes)).collect())
}

/// Writes down what the token is now, for every gateway. Last statement before the commit.
async fn overrule(tx: &mut PgTransaction<'_>, scope: WorkspaceScope, token: ObserverTokenId) -> StoreResult<()> {
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
    .bind(scope.workspace_id().get())
    .bind(token.get())
    .execute(&mut **tx)
    .await
    .map_err(StoreError::from_sqlx("overruling an observer token"))?;
    Ok(())
}

/// All tokens of a workspace that has just been deleted in this transaction are dead.
pub(crate) async fn overrule_all(tx: &mut PgConnection, scope: WorkspaceScope) -> StoreResult<()> {
    sqlx::query(
        "INSERT INTO observer_overrides (token_id, workspace_id, state, version, scopes, filters)
         SELECT token_id, workspace_id, 'workspace_deleted', version, scopes, '{}'
           FROM observer_tokens WHERE workspace_id = $1
         ON CONFLICT (token_id) DO UPDATE SET state = EXCLUDED.state, changed_in = EXCLUDED.changed_in",
    )
    .bind(scope.workspace_id().get())
    .execute(tx)
    .await
    .map_err(StoreError::from_sqlx("overruling the observer tokens of a workspace"))?;
    Ok(())
}
