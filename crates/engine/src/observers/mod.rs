//! Observers: callers that read a workspace without taking part in it. Main types: [`Observers`], [`ObserverAccess`].
//!
//! An observer token is signed and carries its scopes and filters, so that any gateway checks it without reading
//! storage. Later changes of tokens are kept in memory as overrides: loaded before the gateway serves, refreshed each
//! second, and at once on a hint. ADR 0007 gives the reasons.

pub(crate) mod access;
mod keys;
mod overrides;
mod refresh;
mod signed;
mod signing_keys;
mod token_uses;
mod tokens;

use std::sync::{Arc, PoisonError, RwLock};

use chrono::{DateTime, Utc};
use moka::sync::Cache;
use relay_domain::{
    access::token::{TokenHash, TokenKind},
    observers::ObserverScope,
};
use relay_store::StoreError;
use relay_tasks::{TaskSet, batches::Batches};
use tokio::{sync::watch, time::Instant};

pub(crate) use self::token_uses::{TokenUse, write_token_uses};
pub use self::{
    access::ObserverAccess,
    keys::SealingSecret,
    overrides::AccessEndReason,
    signing_keys::SigningKey,
    tokens::{IssuedObserverToken, MAX_LISTED_OBSERVER_TOKENS, MAX_OBSERVER_TOKENS, NewObserver, ObserverChange},
};
use self::{
    access::{AccessBasis, EVERYTHING},
    keys::KeyRing,
    overrides::{CurrentView, Overrides},
    signed::{TokenForm, VerifiedToken},
};
use crate::{
    EngineError, EngineResult,
    access::{callers::Credential, limits::QuotaCache, tokens::Tokens},
    core::Core,
    error::{BadCredential, Denial},
    workspaces::suspensions::Suspensions,
};

/// Bound of the cache; further tokens evict the least used. Verifying one again costs about a tenth of a millisecond.
const VERIFIED_TOKENS: u64 = 100_000;

/// Cache of keys, overrides and verified tokens.
pub(crate) struct ObserverCache {
    ring: RwLock<Arc<KeyRing>>,
    overrides: RwLock<Overrides>,
    verified: Cache<TokenHash, Arc<VerifiedToken>>,
    refresher: refresh::Refresher,
    used: token_uses::TokenUseRecorder,
}

/// Handle of observers, their tokens and signing keys.
#[derive(Clone)]
pub struct Observers {
    pub(crate) core: Core,
    pub(crate) tokens: Tokens,
    pub(crate) quotas: QuotaCache,
    pub(crate) suspensions: Arc<Suspensions>,
    pub(crate) tasks: TaskSet,
    pub(crate) cache: Arc<ObserverCache>,
}

impl ObserverCache {
    /// Creates an empty cache, and the queue that [`write_token_uses`] empties.
    pub(crate) fn new() -> (Self, Batches<TokenUse>) {
        let (used, notes) = token_uses::recorder();
        let cache = Self {
            ring: RwLock::default(),
            overrides: RwLock::default(),
            verified: Cache::builder().max_capacity(VERIFIED_TOKENS).build(),
            refresher: refresh::Refresher::default(),
            used,
        };
        (cache, notes)
    }

    fn ring(&self) -> Arc<KeyRing> {
        Arc::clone(&self.ring.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn current_view(&self, known: &VerifiedToken, now: DateTime<Utc>) -> Result<CurrentView, AccessEndReason> {
        // Verified tokens are cached without a time limit: retiring a key must end them all the same.
        if known.kid.as_ref().is_some_and(|kid| self.ring().verifying_key(kid).is_none()) {
            return Err(AccessEndReason::Revoked);
        }
        self.overrides.read().unwrap_or_else(PoisonError::into_inner).current_view(known, now)
    }
}

impl Observers {
    /// Authorizes a reader of the stream and the event log: a workspace key sees everything, an observer token what its
    /// scopes and filters allow.
    ///
    /// # Errors
    /// When the token is of another kind, unknown or revoked, or lacks `stream:read`.
    pub async fn authorize(&self, token: &str) -> EngineResult<ObserverAccess> {
        let access = match TokenKind::from_prefix(token) {
            None => return Err(EngineError::Unauthenticated(BadCredential::TokenFormat)),
            Some(TokenKind::Observer) => self.authenticate(token).await?,
            Some(kind @ TokenKind::Workspace) => {
                let hash = TokenHash::from_token(token);
                ObserverAccess {
                    scope: self.tokens.cached_credential(kind, hash).await?.scope(),
                    token_id: None,
                    version: 0,
                    view: Arc::clone(&EVERYTHING),
                    expires_at: None,
                    by: AccessBasis::Key(hash),
                }
            }
            Some(kind) => return Err(EngineError::Unauthenticated(BadCredential::NotForObserving { kind })),
        };
        self.suspensions.check_not_suspended(access.scope)?;
        if access.view.has_scope(ObserverScope::Stream) {
            Ok(access)
        } else {
            Err(EngineError::Forbidden(Denial::InsufficientScope(ObserverScope::Stream.to_string())))
        }
    }

    /// Checks an access again: `None` if it is unchanged, else the access as it is now. In memory for signed tokens;
    /// others are looked up at most every second.
    ///
    /// # Errors
    /// The reason when the access has ended.
    pub async fn recheck(&self, access: &ObserverAccess) -> Result<Option<ObserverAccess>, AccessEndReason> {
        if !self.cache.refresher.is_fresh() {
            return Err(AccessEndReason::Unverifiable);
        }
        if self.suspensions.is_suspended(access.scope.workspace_id()) {
            return Err(AccessEndReason::WorkspaceEnded);
        }
        let now = match &access.by {
            AccessBasis::Signed(known) => self.current_access(Arc::clone(known))?,
            AccessBasis::Opaque(hash) => match self.recheck_credential(TokenKind::Observer, *hash).await {
                Ok(Some(Credential::Observer(now))) => self.refresh_access(now)?,
                Ok(_) => return Err(AccessEndReason::Revoked),
                // Storage is unavailable. The access goes on until the refreshes are too old.
                Err(()) => return Ok(None),
            },
            AccessBasis::Key(hash) => match self.recheck_credential(TokenKind::Workspace, *hash).await {
                Ok(Some(_)) | Err(()) => return Ok(None),
                Ok(None) => return Err(AccessEndReason::WorkspaceEnded),
            },
        };
        if now.view.has_scope(ObserverScope::Stream) {
            let same = now.view == access.view && now.expires_at == access.expires_at && now.version == access.version;
            Ok((!same).then_some(now))
        } else {
            Err(AccessEndReason::Revoked)
        }
    }

    /// Changes whenever the access of an observer may have changed and needs [`Observers::recheck`].
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.cache.refresher.subscribe()
    }

    /// Authenticates an observer token.
    pub(crate) async fn authenticate(&self, token: &str) -> EngineResult<ObserverAccess> {
        let unknown = || EngineError::Unauthenticated(BadCredential::UnknownToken { kind: TokenKind::Observer });
        let hash = TokenHash::from_token(token);
        let access = match signed::classify(token) {
            TokenForm::Neither => return Err(unknown()),
            TokenForm::Opaque => match self.tokens.cached_credential(TokenKind::Observer, hash).await? {
                Credential::Observer(access) => self.refresh_access(access),
                Credential::Workspace { .. } | Credential::Agent(_) | Credential::Node(_) => return Err(unknown()),
            },
            TokenForm::Signed { kid } => {
                let known = match self.cache.verified.get(&hash) {
                    Some(known) => known,
                    None => {
                        let known = self.verify(token, kid).await?.ok_or_else(unknown)?;
                        // Only the signature is remembered. Revocation and expiry are looked at on each use.
                        self.cache.verified.insert(hash, Arc::clone(&known));
                        known
                    }
                };
                // After the verification, so that a forged token gets 401 and not 503.
                if !self.cache.refresher.is_fresh() {
                    // It may have been revoked without this gateway having read it.
                    return Err(StoreError::unavailable("checking an observer token").into());
                }
                let scope = known.scope;
                let access = self.current_access(known);
                // A token's end is that of its workspace, if that comes first. Only tokens that were genuine lead to
                // this read; without an answer the token counts as expired.
                if matches!(access, Err(AccessEndReason::Expired))
                    && self.core.store.is_workspace_expired(scope).await.unwrap_or(false)
                {
                    return Err(EngineError::Unauthenticated(BadCredential::WorkspaceExpired));
                }
                access
            }
        };
        let access = access.map_err(|_| unknown())?;
        if let Some(token) = access.token_id {
            let scope = access.scope;
            self.cache.used.add(token, || (scope, token, self.core.now()));
        }
        Ok(access)
    }

    /// Verifies a signed token. With an unknown key id, it waits for a refresh of the keys first.
    async fn verify(&self, token: &str, kid: String) -> EngineResult<Option<Arc<VerifiedToken>>> {
        let mut ring = self.cache.ring();
        if ring.verifying_key(&kid).is_none() {
            self.cache.refresher.wait_for_refresh(Instant::now()).await?;
            ring = self.cache.ring();
        }
        Ok(signed::verify(&ring, token, kid).map(Arc::new))
    }

    fn current_access(&self, known: Arc<VerifiedToken>) -> Result<ObserverAccess, AccessEndReason> {
        let present = self.cache.current_view(&known, self.core.now())?;
        Ok(ObserverAccess {
            scope: known.scope,
            token_id: Some(known.token_id),
            version: known.version,
            view: present.view,
            expires_at: present.expires_at,
            by: AccessBasis::Signed(known),
        })
    }

    /// Applies the overrides to the access of an opaque token.
    fn refresh_access(&self, access: ObserverAccess) -> Result<ObserverAccess, AccessEndReason> {
        let Some(token_id) = access.token_id else { return Ok(access) };
        let known = VerifiedToken {
            scope: access.scope,
            token_id,
            version: access.version,
            view: Arc::clone(&access.view),
            expires_at: access.expires_at,
            kid: None,
        };
        let present = self.cache.current_view(&known, self.core.now())?;
        Ok(ObserverAccess { view: present.view, expires_at: present.expires_at, ..access })
    }

    /// Looks a token up by its hash. `Ok(None)`: it is revoked. `Err`: storage is unavailable.
    async fn recheck_credential(&self, kind: TokenKind, hash: TokenHash) -> Result<Option<Credential>, ()> {
        match self.tokens.cached_credential(kind, hash).await {
            Ok(credential) => Ok(Some(credential)),
            Err(EngineError::Unauthenticated(_)) => Ok(None),
            Err(_) => Err(()),
        }
    }
}
