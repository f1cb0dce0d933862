//! Tokens: made, looked up with a cache of seconds, revoked.
//!
//! The only module that turns a token into a [`WorkspaceScope`].

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use moka::sync::Cache;
use relay_domain::{
    WorkspaceScope,
    access::token::{TOKEN_BYTES, TokenHash, TokenKind},
};
use relay_store::{StoreError, TokenLookup, TokenOwner};
use tokio::{sync::Mutex, time::Instant};

use super::authentication::{AgentCaller, Credential, NodeCaller};
use crate::{
    EngineError, EngineResult,
    core::Core,
    error::{BadCredential, Fault},
    observers::access::ObserverAccess,
};

/// Longest time for which a revocation stays unnoticed when its hint was lost.
const CACHED_FOR: Duration = Duration::from_secs(1);
/// Number of lookup groups. Tokens of one group are looked up one at a time.
const LOOKUP_GROUPS: usize = 64;
/// While this recent, an outage seen by one lookup answers those that waited for it. Long enough for the waiting
/// requests to take their turns, short enough that no request is refused after Postgres is back.
const OUTAGE_BACKOFF: Duration = Duration::from_millis(50);
/// Bound of the cache; further tokens evict the least used.
const CACHED_TOKENS: u64 = 100_000;

/// Cache of authenticated tokens.
#[derive(Debug)]
pub(crate) struct TokenCache {
    credentials: Cache<TokenHash, Credential>,
    /// One lookup at a time per group, so that a busy token that was just invalidated is read once instead of by each
    /// of its requests. Holds the time when storage was last found unavailable, so that waiting requests need not find
    /// out one after the other.
    lookups: Vec<Mutex<Option<Instant>>>,
    /// Revocation counter: a row read before a revocation is not cached after it.
    revocations: AtomicU64,
}

impl Default for TokenCache {
    fn default() -> Self {
        Self {
            credentials: Cache::builder()
                .max_capacity(CACHED_TOKENS)
                .time_to_live(CACHED_FOR)
                .support_invalidation_closures()
                .build(),
            lookups: (0..LOOKUP_GROUPS).map(|_| Mutex::new(None)).collect(),
            revocations: AtomicU64::new(0),
        }
    }
}

/// New token and its hash.
pub(crate) struct FreshToken {
    pub(crate) text: String,
    pub(crate) hash: TokenHash,
}

/// Handle of tokens. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Tokens {
    core: Core,
    cache: Arc<TokenCache>,
}

impl Tokens {
    pub(crate) fn new(core: Core) -> Self {
        Self { core, cache: Arc::default() }
    }

    /// Invalidates a cached token: it is revoked, or its owner has changed.
    pub(crate) fn forget(&self, hash: &TokenHash) {
        self.cache.revocations.fetch_add(1, Ordering::SeqCst);
        self.cache.credentials.invalidate(hash);
    }

    /// Invalidates all tokens of a deleted workspace.
    pub(crate) fn forget_workspace(&self, scope: WorkspaceScope) {
        self.cache.revocations.fetch_add(1, Ordering::SeqCst);
        // Fails only for a cache that was built without support for it.
        let _ = self.cache.credentials.invalidate_entries_if(move |_, credential| credential.scope() == scope);
    }

    /// Invalidates all tokens: a revocation hint may have been missed.
    pub(crate) fn forget_all(&self) {
        self.cache.revocations.fetch_add(1, Ordering::SeqCst);
        self.cache.credentials.invalidate_all();
    }

    /// Invalidates a revoked token here and in the other processes.
    pub(crate) fn revoke(&self, hash: TokenHash) {
        self.forget(&hash);
        self.core.hints.token_revoked(hash);
    }

    /// Invalidates the tokens of a deleted workspace here and in the other processes.
    pub(crate) fn revoke_workspace(&self, scope: WorkspaceScope) {
        self.forget_workspace(scope);
        self.core.hints.workspace_deleted(scope);
    }

    pub(crate) fn fresh(&self, kind: TokenKind) -> EngineResult<FreshToken> {
        let mut random = [0; TOKEN_BYTES];
        getrandom::fill(&mut random).map_err(|_| EngineError::Internal(Fault::NoRandomness))?;
        let text = kind.format_token(random);
        let hash = TokenHash::from_token(&text);
        Ok(FreshToken { text, hash })
    }

    /// Returns the owner of a token from the cache (at most 1 s old) or from storage.
    pub(crate) async fn cached_credential(&self, kind: TokenKind, hash: TokenHash) -> EngineResult<Credential> {
        match self.cache.credentials.get(&hash) {
            Some(known) => Ok(known),
            None => self.look_up(kind, hash).await,
        }
    }

    async fn look_up(&self, kind: TokenKind, hash: TokenHash) -> EngineResult<Credential> {
        let cache = &self.cache;
        let mut unavailable_since = cache.lookups[usize::from(hash.as_bytes()[0]) % LOOKUP_GROUPS].lock().await;
        if let Some(known) = cache.credentials.get(&hash) {
            return Ok(known);
        }
        if unavailable_since.is_some_and(|at| at.elapsed() < OUTAGE_BACKOFF) {
            return Err(StoreError::unavailable("looking up a token").into());
        }
        let revocations = cache.revocations.load(Ordering::SeqCst);
        let found = self.core.store.look_up_token(&hash).await;
        *unavailable_since = found.as_ref().is_err_and(StoreError::is_unavailable).then(Instant::now);
        let owner = match found? {
            TokenLookup::Valid(owner) => Some(owner),
            TokenLookup::WorkspaceExpired => {
                return Err(EngineError::Unauthenticated(BadCredential::WorkspaceExpired));
            }
            TokenLookup::Unknown => None,
        };
        let credential = match (kind, owner) {
            (TokenKind::Workspace, Some(TokenOwner::Workspace { workspace })) => {
                Credential::Workspace { scope: WorkspaceScope::from_verified_token(workspace) }
            }
            (
                TokenKind::Agent,
                Some(TokenOwner::Agent { workspace, agent_id, name, kind, token_generation, is_former }),
            ) => Credential::Agent(AgentCaller {
                scope: WorkspaceScope::from_verified_token(workspace),
                agent_id,
                name: name.into(),
                kind,
                token_generation,
                is_former_token: is_former,
            }),
            (TokenKind::Node, Some(TokenOwner::Node { workspace, node_id })) => {
                Credential::Node(NodeCaller { scope: WorkspaceScope::from_verified_token(workspace), node_id })
            }
            (
                TokenKind::Observer,
                Some(TokenOwner::Observer { workspace, token_id, version, scopes, filters, expires_at }),
            ) => {
                let scope = WorkspaceScope::from_verified_token(workspace);
                ObserverAccess::from_row(hash, scope, token_id, version, (&scopes, &filters), expires_at)
                    .map(Credential::Observer)
                    .ok_or(EngineError::Unauthenticated(BadCredential::UnknownToken { kind }))?
            }
            (kind, _) => return Err(EngineError::Unauthenticated(BadCredential::UnknownToken { kind })),
        };
        cache.credentials.insert(hash, credential.clone());
        if cache.revocations.load(Ordering::SeqCst) != revocations {
            // A token was revoked during the read: it may have been this one.
            cache.credentials.invalidate(&hash);
        }
        Ok(credential)
    }
}
