//! Observer tokens as workspaces manage them: create, list, change, rotate, revoke.

use std::sync::Arc;

use chrono::{DateTime, SubsecRound, Utc};
use relay_domain::{
    ObserverTokenId, WorkspaceScope,
    names::{MAX_AGENT_NAME_BYTES, MAX_NOTE_BYTES, check_length, check_name},
    observer::{ObserverFilters, ObserverView, ScopeSet},
    plan::Ceiling,
};
use relay_store::{
    NewObserverToken, ObserverTokenChange, ObserverTokenCreation, ObserverTokenRow, ObserverTokenUpdate, StoreError,
};

use super::{
    overrides::read_view_of,
    signed::{self, Known},
};
use crate::{Engine, EngineError, EngineResult};

/// Active tokens that a workspace may have, whatever its plan.
pub const MAX_OBSERVER_TOKENS: i64 = 500;
/// Tokens that a list answers with: the active ones, then the newest revoked ones.
pub const MAX_LISTED_OBSERVER_TOKENS: i64 = 1_000;

/// A token to be made.
#[derive(Debug)]
pub struct NewObserver {
    /// Its name, unique among the workspace's active ones.
    pub name: String,
    /// What it is for.
    pub description: Option<String>,
    /// Which kinds of data it reads; at least one.
    pub scopes: ScopeSet,
    /// Which part of it.
    pub filters: ObserverFilters,
    /// When it ends by itself.
    pub expires_at: Option<DateTime<Utc>>,
}

/// What to change of a token. `None` leaves a field as it is.
#[derive(Debug, Default)]
pub struct ObserverChange {
    /// Its name.
    pub name: Option<String>,
    /// What it is for; `Some(None)` clears it.
    pub description: Option<Option<String>>,
    /// Which kinds of data it reads.
    pub scopes: Option<ScopeSet>,
    /// Which part of it.
    pub filters: Option<ObserverFilters>,
    /// When it ends by itself; `Some(None)`: never.
    pub expires_at: Option<Option<DateTime<Utc>>>,
}

/// A token with its text, which is shown once.
#[derive(Debug)]
pub struct IssuedObserverToken {
    /// The token.
    pub row: ObserverTokenRow,
    /// Its text.
    pub text: String,
}

impl Engine {
    /// Makes a token.
    ///
    /// # Errors
    /// When a field is out of bounds, the name is taken, the workspace has too many, or storage is away.
    pub async fn create_observer_token(
        &self,
        scope: WorkspaceScope,
        new: NewObserver,
    ) -> EngineResult<IssuedObserverToken> {
        let now = self.now();
        check_fields(Some(&new.name), new.description.as_deref(), Some(new.scopes))?;
        let expires_at = checked_end(new.expires_at, now)?;
        let (scopes, filters) = (texts(new.scopes), stored(checked(new.filters)?)?);
        let planned = self.ceiling(scope, Ceiling::ObserverTokens).await?;
        let at_most = planned.unwrap_or(MAX_OBSERVER_TOKENS).min(MAX_OBSERVER_TOKENS);
        let token = NewObserverToken {
            token_id: ObserverTokenId::new(self.next_id()),
            name: &new.name,
            description: new.description.as_deref(),
            scopes: &scopes,
            filters: &filters,
            expires_at,
            created_at: now,
        };
        match self.store().create_observer_token(scope, &token, at_most).await? {
            ObserverTokenCreation::Made(row) => self.issued(scope, *row),
            ObserverTokenCreation::NameTaken => Err(EngineError::ObserverTokenNameConflict(new.name)),
            ObserverTokenCreation::TooMany => Err(EngineError::PlanLimitExceeded(Ceiling::ObserverTokens)),
            ObserverTokenCreation::NoWorkspace => Err(EngineError::WorkspaceNotFound),
        }
    }

    /// The workspace's tokens: active ones, then revoked ones; newest first.
    ///
    /// # Errors
    /// When storage is away.
    pub async fn observer_tokens(&self, scope: WorkspaceScope) -> EngineResult<Vec<ObserverTokenRow>> {
        Ok(self.store().observer_tokens(scope, MAX_LISTED_OBSERVER_TOKENS).await?)
    }

    /// One token, revoked or not.
    ///
    /// # Errors
    /// When there is none of that id.
    pub async fn observer_token(&self, scope: WorkspaceScope, id: &str) -> EngineResult<ObserverTokenRow> {
        self.store().observer_token(scope, parse(id)?).await?.ok_or(EngineError::ObserverTokenNotFound)
    }

    /// Changes an active token. Its text stays: what it says of itself is overruled, everywhere.
    ///
    /// # Errors
    /// When a field is out of bounds, the name is taken, there is no such active token, or storage is away.
    pub async fn update_observer_token(
        &self,
        scope: WorkspaceScope,
        id: &str,
        change: ObserverChange,
    ) -> EngineResult<ObserverTokenRow> {
        let (token, now) = (parse(id)?, self.now());
        check_fields(change.name.as_deref(), change.description.as_ref().and_then(Option::as_deref), change.scopes)?;
        let expires_at = change.expires_at.map(|end| checked_end(end, now)).transpose()?;
        let scopes = change.scopes.map(texts);
        let filters = change.filters.map(|filters| checked(filters).and_then(stored)).transpose()?;
        let stored = ObserverTokenChange {
            name: change.name.as_deref(),
            description: change.description.as_ref().map(Option::as_deref),
            scopes: scopes.as_deref(),
            filters: filters.as_ref(),
            expires_at,
        };
        match self.store().update_observer_token(scope, token, &stored, now).await? {
            ObserverTokenUpdate::Changed(row) => {
                self.observers_are_changed().await;
                Ok(*row)
            }
            ObserverTokenUpdate::NameTaken => {
                Err(EngineError::ObserverTokenNameConflict(change.name.unwrap_or_default()))
            }
            ObserverTokenUpdate::Missing => Err(EngineError::ObserverTokenNotFound),
        }
    }

    /// Gives an active token a new text; the old one is dead when this returns.
    ///
    /// # Errors
    /// When there is no such active token, or storage is away.
    pub async fn rotate_observer_token(&self, scope: WorkspaceScope, id: &str) -> EngineResult<IssuedObserverToken> {
        let rotated = self.store().rotate_observer_token(scope, parse(id)?, self.now()).await?;
        let (row, dead) = rotated.ok_or(EngineError::ObserverTokenNotFound)?;
        for hash in dead {
            self.revoke_token(hash);
        }
        self.observers_are_changed().await;
        self.issued(scope, row)
    }

    /// Revokes an active token; it is dead when this returns.
    ///
    /// # Errors
    /// When there is no such active token, or storage is away.
    pub async fn revoke_observer_token(&self, scope: WorkspaceScope, id: &str) -> EngineResult<()> {
        let dead = self.store().revoke_observer_token(scope, parse(id)?, self.now()).await?;
        for hash in dead.ok_or(EngineError::ObserverTokenNotFound)? {
            self.revoke_token(hash);
        }
        self.observers_are_changed().await;
        Ok(())
    }

    fn issued(&self, scope: WorkspaceScope, row: ObserverTokenRow) -> EngineResult<IssuedObserverToken> {
        let known = Known {
            scope,
            token_id: ObserverTokenId::new(row.token_id),
            version: row.version,
            view: read_view_of(&row.scopes, &row.filters).unwrap_or_else(|| Arc::new(nothing())),
            expires_at: row.effective_expiry,
            kid: None,
        };
        // Before its first reading a process has no key to sign with.
        let text = signed::sign(&self.inner.observers.ring(), &known, self.now())
            .ok_or_else(|| StoreError::still_away("signing an observer token"))?;
        Ok(IssuedObserverToken { row, text })
    }
}

/// The view of a row that this version cannot read.
fn nothing() -> ObserverView {
    ObserverView { scopes: ScopeSet::default(), filters: ObserverFilters::default() }
}

fn parse(id: &str) -> EngineResult<ObserverTokenId> {
    id.parse().map_err(|_| EngineError::ObserverTokenNotFound)
}

fn texts(scopes: ScopeSet) -> Vec<String> {
    scopes.iter().map(|scope| scope.to_string()).collect()
}

fn checked(filters: ObserverFilters) -> EngineResult<ObserverFilters> {
    filters.checked().map_err(|error| EngineError::InvalidRequest(error.to_string()))
}

fn stored(filters: ObserverFilters) -> EngineResult<serde_json::Value> {
    serde_json::to_value(filters).map_err(|error| EngineError::InvalidRequest(error.to_string()))
}

fn check_fields(name: Option<&str>, description: Option<&str>, scopes: Option<ScopeSet>) -> EngineResult<()> {
    if let Some(name) = name {
        check_name("name", name, MAX_AGENT_NAME_BYTES)?;
    }
    if let Some(description) = description {
        check_length("description", description, MAX_NOTE_BYTES)?;
    }
    if scopes.is_some_and(ScopeSet::is_empty) {
        return Err(EngineError::InvalidRequest("scopes must name at least one scope".into()));
    }
    Ok(())
}

/// An end in whole milliseconds, which is what a token says of it and what the engine's clock counts: the
/// row and the token's text end in the same moment.
fn checked_end(expires_at: Option<DateTime<Utc>>, now: DateTime<Utc>) -> EngineResult<Option<DateTime<Utc>>> {
    let expires_at = expires_at.map(|at| at.trunc_subsecs(3));
    if expires_at.is_some_and(|at| at <= now) {
        return Err(EngineError::InvalidRequest("expires_at must be in the future".into()));
    }
    Ok(expires_at)
}
