//! Observers: who may look into a workspace without taking part in it, and what they see.
//!
//! An observer token is signed and carries its scopes and filters, so that any gateway checks one without
//! reading anything. What has changed since it was signed is kept in memory as overrides: loaded before
//! the gateway serves, read again each second, and at once on a hint. ADR 0007 tells why.

mod keys;
mod overrides;
mod refresh;
mod signed;
mod signing_keys;
mod tokens;
mod used;

use std::{
    sync::{Arc, LazyLock, PoisonError, RwLock},
    time::Instant,
};

use chrono::{DateTime, Utc};
use moka::sync::Cache;
use relay_domain::{
    ObserverTokenId, WorkspaceScope,
    observer::{ObserverScope, ObserverView},
    token::{TokenHash, TokenKind},
};
use relay_store::StoreError;
use tokio::sync::{mpsc, watch};

pub(crate) use self::used::write_used;
use self::{
    keys::KeyRing,
    overrides::{Overrides, Present},
    signed::{Form, Known},
};
pub use self::{
    keys::SealingSecret,
    signing_keys::SigningKey,
    tokens::{IssuedObserverToken, MAX_LISTED_OBSERVER_TOKENS, MAX_OBSERVER_TOKENS, NewObserver, ObserverChange},
};
use crate::{Engine, EngineError, EngineResult, auth::Credential};

/// Verified tokens remembered at once; further ones push out the least used. Verifying one again costs
/// about a tenth of a millisecond.
const VERIFIED_TOKENS: u64 = 100_000;

/// What the holder of a workspace's key sees.
static EVERYTHING: LazyLock<Arc<ObserverView>> = LazyLock::new(|| Arc::new(ObserverView::everything()));

/// Someone who may look, and what they see. Checked when it was made; [`Engine::observer_still`] checks
/// again.
#[derive(Debug, Clone)]
pub struct ObserverAccess {
    /// The workspace.
    pub scope: WorkspaceScope,
    /// The token; `None` for a workspace's key.
    pub token_id: Option<ObserverTokenId>,
    /// How often the token was rotated, from 1; 0 for a workspace's key.
    pub version: i64,
    /// What is seen.
    pub view: Arc<ObserverView>,
    /// When it ends by itself.
    pub expires_at: Option<DateTime<Utc>>,
    by: By,
}

/// What the access stands on.
#[derive(Debug, Clone)]
enum By {
    Key(TokenHash),
    Signed(Arc<Known>),
    Opaque(TokenHash),
}

/// Why an observer may look no longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GoneReason {
    /// The token was revoked, or the key that signed it was retired.
    Revoked,
    /// The token was rotated: there is a newer string.
    Rotated,
    /// The token has ended.
    Expired,
    /// The workspace was deleted or has ended.
    WorkspaceGone,
    /// This gateway cannot tell any more whether the token lives: it has not heard from Postgres for half
    /// a minute, or does not understand what the token is limited to. Another gateway may.
    Unverifiable,
}

impl GoneReason {
    /// As told to a client whose socket is closed.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Revoked => "observer token revoked",
            Self::Rotated => "observer token rotated",
            Self::Expired => "observer token expired",
            Self::WorkspaceGone => "workspace deleted",
            Self::Unverifiable => "observer token cannot be verified now",
        }
    }
}

/// What this process knows of observer tokens.
pub(crate) struct Observers {
    ring: RwLock<Arc<KeyRing>>,
    overrides: RwLock<Overrides>,
    verified: Cache<TokenHash, Arc<Known>>,
    refresher: refresh::Refresher,
    used: used::UsedNotes,
}

impl Observers {
    /// Knowing nothing yet, and what [`write_used`] reads.
    pub(crate) fn new() -> (Self, mpsc::Receiver<used::Used>) {
        let (used, notes) = used::UsedNotes::new();
        let observers = Self {
            ring: RwLock::default(),
            overrides: RwLock::default(),
            verified: Cache::builder().max_capacity(VERIFIED_TOKENS).build(),
            refresher: refresh::Refresher::default(),
            used,
        };
        (observers, notes)
    }

    fn ring(&self) -> Arc<KeyRing> {
        Arc::clone(&self.ring.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn present(&self, known: &Known, now: DateTime<Utc>) -> Result<Present, GoneReason> {
        if known.kid.as_ref().is_some_and(|kid| self.ring().verifying(kid).is_none()) {
            return Err(GoneReason::Revoked);
        }
        self.overrides.read().unwrap_or_else(PoisonError::into_inner).present(known, now)
    }
}

impl Engine {
    /// Who looks, for the stream and the event log: a workspace's key sees everything, an observer token
    /// what its scopes and filters allow.
    ///
    /// # Errors
    /// When the token is of another kind, unknown or dead, lacks `stream:read`; or storage is away and
    /// the token cannot be judged without it.
    pub async fn observe(&self, token: &str) -> EngineResult<ObserverAccess> {
        match TokenKind::of(token) {
            None => return Err(EngineError::InvalidTokenFormat),
            Some(TokenKind::Workspace | TokenKind::Observer) => {}
            Some(kind) => return Err(EngineError::NotForObserving { kind }),
        }
        let access = match self.authenticate(token).await? {
            Credential::Observer(access) => access,
            caller => ObserverAccess {
                scope: caller.scope(),
                token_id: None,
                version: 0,
                view: Arc::clone(&EVERYTHING),
                expires_at: None,
                by: By::Key(TokenHash::of(token)),
            },
        };
        if access.view.has(ObserverScope::Stream) {
            Ok(access)
        } else {
            Err(EngineError::InsufficientScope(ObserverScope::Stream.to_string()))
        }
    }

    /// Whether an observer may still look: `None` if nothing has changed, or the access as it is now.
    /// In memory for signed tokens; others are looked up at most each 2 s.
    ///
    /// # Errors
    /// Why it is over.
    pub async fn observer_still(&self, access: &ObserverAccess) -> Result<Option<ObserverAccess>, GoneReason> {
        if !self.inner.observers.refresher.is_fresh() {
            return Err(GoneReason::Unverifiable);
        }
        if self.inner.holds.is_suspended(access.scope.workspace_id()) {
            return Err(GoneReason::WorkspaceGone);
        }
        let now = match &access.by {
            By::Signed(known) => self.access(Arc::clone(known))?,
            By::Opaque(hash) => match self.look_up_again(TokenKind::Observer, *hash).await {
                Ok(Some(Credential::Observer(now))) => self.present_access(now)?,
                Ok(_) => return Err(GoneReason::Revoked),
                Err(()) => return Ok(None),
            },
            By::Key(hash) => match self.look_up_again(TokenKind::Workspace, *hash).await {
                Ok(Some(_)) | Err(()) => return Ok(None),
                Ok(None) => return Err(GoneReason::WorkspaceGone),
            },
        };
        if now.view.has(ObserverScope::Stream) {
            let same = now.view == access.view && now.expires_at == access.expires_at && now.version == access.version;
            Ok((!same).then_some(now))
        } else {
            Err(GoneReason::Revoked)
        }
    }

    /// Changes whenever some observer's access may have: a good moment for [`Engine::observer_still`].
    #[must_use]
    pub fn observers_changed(&self) -> watch::Receiver<u64> {
        self.inner.observers.refresher.changes()
    }

    /// Who holds an observer token.
    pub(crate) async fn authenticate_observer(&self, token: &str) -> EngineResult<ObserverAccess> {
        let unknown = EngineError::UnknownToken { kind: TokenKind::Observer };
        let hash = TokenHash::of(token);
        let access = match signed::form(token) {
            Form::Neither => return Err(unknown),
            Form::Opaque => match self.known_or_looked_up(TokenKind::Observer, hash).await? {
                Credential::Observer(access) => self.present_access(access),
                _ => return Err(unknown),
            },
            Form::Signed { kid } => {
                let known = match self.inner.observers.verified.get(&hash) {
                    Some(known) => known,
                    None => {
                        let known = self.verify(token, kid).await?.ok_or(unknown)?;
                        self.inner.observers.verified.insert(hash, Arc::clone(&known));
                        known
                    }
                };
                if !self.inner.observers.refresher.is_fresh() {
                    // It may have been revoked meanwhile without this gateway having heard of it.
                    return Err(StoreError::still_away("checking an observer token").into());
                }
                self.access(known)
            }
        };
        let access = access.map_err(|_| EngineError::UnknownToken { kind: TokenKind::Observer })?;
        if let Some(token) = access.token_id {
            self.inner.observers.used.note(access.scope, token, self.now());
        }
        Ok(access)
    }

    /// Verifies a signed token. Under the name of an unknown key, looks for that key first.
    async fn verify(&self, token: &str, kid: String) -> EngineResult<Option<Arc<Known>>> {
        let mut ring = self.inner.observers.ring();
        if ring.verifying(&kid).is_none() {
            self.inner.observers.refresher.after(Instant::now()).await?;
            ring = self.inner.observers.ring();
        }
        Ok(signed::verify(&ring, token, kid).map(Arc::new))
    }

    fn access(&self, known: Arc<Known>) -> Result<ObserverAccess, GoneReason> {
        let present = self.inner.observers.present(&known, self.now())?;
        Ok(ObserverAccess {
            scope: known.scope,
            token_id: Some(known.token_id),
            version: known.version,
            view: present.view,
            expires_at: present.expires_at,
            by: By::Signed(known),
        })
    }

    /// An access by an opaque token as it is now.
    fn present_access(&self, access: ObserverAccess) -> Result<ObserverAccess, GoneReason> {
        let Some(token_id) = access.token_id else { return Ok(access) };
        let known = Known {
            scope: access.scope,
            token_id,
            version: access.version,
            view: Arc::clone(&access.view),
            expires_at: access.expires_at,
            kid: None,
        };
        let present = self.inner.observers.present(&known, self.now())?;
        Ok(ObserverAccess { view: present.view, expires_at: present.expires_at, ..access })
    }

    /// Looks a token up by its hash. `Ok(None)`: it is dead. `Err`: storage does not tell.
    async fn look_up_again(&self, kind: TokenKind, hash: TokenHash) -> Result<Option<Credential>, ()> {
        match self.known_or_looked_up(kind, hash).await {
            Ok(credential) => Ok(Some(credential)),
            Err(EngineError::UnknownToken { .. }) => Ok(None),
            Err(_) => Err(()),
        }
    }
}

impl ObserverAccess {
    /// The access that the row of an opaque token gives. `None` when this version does not understand it.
    pub(crate) fn of_row(
        hash: TokenHash,
        scope: WorkspaceScope,
        token_id: ObserverTokenId,
        version: i64,
        (scopes, filters): (&[String], &serde_json::Value),
        expires_at: Option<DateTime<Utc>>,
    ) -> Option<Self> {
        let view = overrides::read_view_of(scopes, filters)?;
        Some(Self { scope, token_id: Some(token_id), version, view, expires_at, by: By::Opaque(hash) })
    }
}

/// What someone who is no observer sees: everything.
pub(crate) fn everything() -> &'static ObserverView {
    &EVERYTHING
}
