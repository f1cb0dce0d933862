//! Management of observer tokens by workspaces: create, list, change, rotate, revoke.

use std::sync::Arc;

use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use relay_domain::{
    ObserverTokenId, WorkspaceScope,
    names::{MAX_AGENT_NAME_BYTES, MAX_NOTE_BYTES, check_length, check_name},
    observers::{ObserverFilters, ObserverToken, ObserverView, ScopeSet},
    workspaces::plan::Quota,
};
use relay_store::{
    ChangedToken, NewObserverToken, ObserverTokenChange, ObserverTokenCreation, ObserverTokenLimits,
    ObserverTokenUpdate, StoreError,
};

use super::{
    Observers,
    overrides::parse_view,
    signed::{self, VerifiedToken},
};
use crate::{
    EngineError, EngineResult,
    error::{Conflict, Limit, Missing},
};

/// Bound of the active tokens of a workspace, whatever its plan.
pub const MAX_OBSERVER_TOKENS: i64 = 500;
/// Bound of the tokens that a workspace creates within a day: revoked ones stay in the memory of every gateway until
/// their text has ended.
const MAX_CREATED_PER_DAY: i64 = 1_000;
/// A text ends after this long, whatever the expiry of its token. Workers renew those of active tokens by overrides.
const SIGNED_FOR: TimeDelta = TimeDelta::days(90);
/// Bound of a list: the active tokens, then the newest revoked ones.
pub const MAX_LISTED_OBSERVER_TOKENS: i64 = 1_000;

#[derive(Debug)]
pub struct NewObserver {
    /// Unique among the workspace's active tokens.
    pub name: String,
    pub description: Option<String>,
    /// Kinds of data; at least one.
    pub scopes: ScopeSet,
    pub filters: ObserverFilters,
    pub expires_at: Option<DateTime<Utc>>,
}

/// Changes of a token. `None` leaves a field as it is.
#[derive(Debug, Default)]
pub struct ObserverChange {
    pub name: Option<String>,
    /// `Some(None)` clears it.
    pub description: Option<Option<String>>,
    pub scopes: Option<ScopeSet>,
    pub filters: Option<ObserverFilters>,
    /// `Some(None)` removes the expiry.
    pub expires_at: Option<Option<DateTime<Utc>>>,
}

/// Token with its text, which is shown once.
#[derive(Debug)]
pub struct IssuedObserverToken {
    pub row: ObserverToken,
    pub text: String,
}

impl Observers {
    /// Creates a token.
    ///
    /// # Errors
    /// When a field is out of bounds, the name is taken, or the workspace has too many.
    pub async fn create_token(&self, scope: WorkspaceScope, new: NewObserver) -> EngineResult<IssuedObserverToken> {
        let now = self.core.now();
        check_fields(Some(&new.name), new.description.as_deref(), Some(new.scopes))?;
        let expires_at = check_expiry(new.expires_at, now)?;
        let (scopes, filters) = (scope_texts(new.scopes), encode_filters(check_filters(new.filters)?)?);
        let planned = self.quotas.limit(scope, Quota::ObserverTokens).await?;
        // An unlimited quota leaves the fixed bound.
        let at_most = planned.unwrap_or(MAX_OBSERVER_TOKENS).min(MAX_OBSERVER_TOKENS);
        let token = NewObserverToken {
            token_id: ObserverTokenId::new(self.core.next_id()),
            name: &new.name,
            description: new.description.as_deref(),
            scopes: &scopes,
            filters: &filters,
            expires_at,
            created_at: now,
            signed_until: now + SIGNED_FOR,
        };
        let limits = ObserverTokenLimits { active: at_most, per_day: MAX_CREATED_PER_DAY };
        match self.core.store.create_observer_token(scope, &token, limits).await? {
            ObserverTokenCreation::Created(row) => self.issue_token(scope, *row, token.signed_until),
            ObserverTokenCreation::TooManyToday => Err(EngineError::LimitExceeded(Limit::ObserverTokensPerDay)),
            ObserverTokenCreation::NameTaken => Err(EngineError::Conflict(Conflict::ObserverTokenName(new.name))),
            ObserverTokenCreation::TooMany => Err(EngineError::LimitExceeded(Limit::Quota(Quota::ObserverTokens))),
            ObserverTokenCreation::NoWorkspace => Err(EngineError::NotFound(Missing::Workspace)),
        }
    }

    /// Lists the workspace's tokens: active ones, then revoked ones; newest first.
    pub async fn tokens(&self, scope: WorkspaceScope) -> EngineResult<Vec<ObserverToken>> {
        Ok(self.core.store.observer_tokens(scope, MAX_LISTED_OBSERVER_TOKENS).await?)
    }

    /// Finds a token, revoked or not.
    pub async fn token(&self, scope: WorkspaceScope, id: &str) -> EngineResult<ObserverToken> {
        self.core
            .store
            .observer_token(scope, parse_token_id(id)?)
            .await?
            .ok_or(EngineError::NotFound(Missing::ObserverToken))
    }

    /// Changes an active token. Its text stays valid; overrides replace its claims everywhere.
    ///
    /// # Errors
    /// When a field is out of bounds, the name is taken, or there is no such active token.
    pub async fn update_token(
        &self,
        scope: WorkspaceScope,
        id: &str,
        change: ObserverChange,
    ) -> EngineResult<ObserverToken> {
        let (token, now) = (parse_token_id(id)?, self.core.now());
        check_fields(change.name.as_deref(), change.description.as_ref().and_then(Option::as_deref), change.scopes)?;
        let expires_at = change.expires_at.map(|end| check_expiry(end, now)).transpose()?;
        let scopes = change.scopes.map(scope_texts);
        let filters = change.filters.map(|filters| check_filters(filters).and_then(encode_filters)).transpose()?;
        let stored = ObserverTokenChange {
            name: change.name.as_deref(),
            description: change.description.as_ref().map(Option::as_deref),
            scopes: scopes.as_deref(),
            filters: filters.as_ref(),
            expires_at,
        };
        match self.core.store.update_observer_token(scope, token, &stored, now).await? {
            // Refreshed before the answer: this process must not apply the former limits afterwards.
            ObserverTokenUpdate::Changed(row) => {
                self.refresh_after_change().await;
                Ok(*row)
            }
            ObserverTokenUpdate::NameTaken => {
                // Only a given name can be taken.
                Err(EngineError::Conflict(Conflict::ObserverTokenName(change.name.unwrap_or_default())))
            }
            ObserverTokenUpdate::Missing => Err(EngineError::NotFound(Missing::ObserverToken)),
        }
    }

    /// Rotates an active token; the old text is revoked when this returns.
    ///
    /// # Errors
    /// When there is no such active token.
    pub async fn rotate_token(&self, scope: WorkspaceScope, id: &str) -> EngineResult<IssuedObserverToken> {
        let now = self.core.now();
        let signed_until = now + SIGNED_FOR;
        let rotated = self.core.store.rotate_observer_token(scope, parse_token_id(id)?, now, signed_until).await?;
        let (row, rotated) = rotated.ok_or(EngineError::NotFound(Missing::ObserverToken))?;
        self.end_tokens(rotated).await;
        self.issue_token(scope, row, signed_until)
    }

    /// Revokes an active token; effective here when this returns.
    ///
    /// # Errors
    /// When there is no such active token.
    pub async fn revoke_token(&self, scope: WorkspaceScope, id: &str) -> EngineResult<()> {
        let revoked = self.core.store.revoke_observer_token(scope, parse_token_id(id)?, self.core.now()).await?;
        self.end_tokens(revoked.ok_or(EngineError::NotFound(Missing::ObserverToken))?).await;
        Ok(())
    }

    async fn end_tokens(&self, ended: ChangedToken) {
        // The event is announced last, when this process no longer accepts the token.
        ended.changed.into_iter().for_each(|hash| self.tokens.revoke(hash));
        self.refresh_after_change().await;
        self.core.announce(ended.recorded);
    }

    /// Signs a text that ends at `signed_until`, or with the token.
    fn issue_token(
        &self,
        scope: WorkspaceScope,
        row: ObserverToken,
        signed_until: DateTime<Utc>,
    ) -> EngineResult<IssuedObserverToken> {
        let known = VerifiedToken {
            scope,
            token_id: row.token_id,
            version: row.version,
            view: parse_view(&row.scopes, &row.filters).unwrap_or_else(|| Arc::new(empty_view())),
            expires_at: Some(row.effective_expiry.map_or(signed_until, |expiry| expiry.min(signed_until))),
            // `sign` names its key itself.
            kid: None,
        };
        // Before its first refresh, a process has no signing key.
        let text = signed::sign(&self.cache.ring(), &known, self.core.now())
            .ok_or_else(|| StoreError::unavailable("signing an observer token"))?;
        Ok(IssuedObserverToken { row, text })
    }
}

/// View of a row that this version cannot parse.
fn empty_view() -> ObserverView {
    ObserverView { scopes: ScopeSet::default(), filters: ObserverFilters::default() }
}

fn parse_token_id(id: &str) -> EngineResult<ObserverTokenId> {
    id.parse().map_err(|_| EngineError::NotFound(Missing::ObserverToken))
}

fn scope_texts(scopes: ScopeSet) -> Vec<String> {
    scopes.iter().map(|scope| scope.to_string()).collect()
}

fn check_filters(filters: ObserverFilters) -> EngineResult<ObserverFilters> {
    filters.into_validated().map_err(|error| EngineError::invalid_request(error.to_string()))
}

fn encode_filters(filters: ObserverFilters) -> EngineResult<serde_json::Value> {
    serde_json::to_value(filters).map_err(|error| EngineError::invalid_request(error.to_string()))
}

fn check_fields(name: Option<&str>, description: Option<&str>, scopes: Option<ScopeSet>) -> EngineResult<()> {
    if let Some(name) = name {
        check_name("name", name, MAX_AGENT_NAME_BYTES)?;
    }
    if let Some(description) = description {
        check_length("description", description, MAX_NOTE_BYTES)?;
    }
    if scopes.is_some_and(ScopeSet::is_empty) {
        return Err(EngineError::invalid_request("scopes must name at least one scope"));
    }
    Ok(())
}

/// Checks an expiry and truncates it to milliseconds, the precision of the token's claim and of the engine's clock: the
/// row and the token's text expire at the same moment.
fn check_expiry(expires_at: Option<DateTime<Utc>>, now: DateTime<Utc>) -> EngineResult<Option<DateTime<Utc>>> {
    let expires_at = expires_at.map(|at| at.trunc_subsecs(3));
    if expires_at.is_some_and(|at| at <= now) {
        return Err(EngineError::invalid_request("expires_at must be in the future"));
    }
    Ok(expires_at)
}
