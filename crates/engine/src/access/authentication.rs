//! Authentication: maps tokens to callers, with a cache of seconds.
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
    AgentId, NodeId, WorkspaceScope,
    access::token::{TOKEN_BYTES, TokenHash, TokenKind},
    agents::AgentKind,
    observers::ObserverView,
};
use relay_store::{StoreError, TokenOwner};
use tokio::{sync::Mutex, time::Instant};

use crate::{
    Engine, EngineError, EngineResult,
    error::{BadCredential, Fault},
    observers::access::{ObserverAccess, full_view},
};

/// Longest time for which a revocation stays unnoticed when its hint was lost.
const CACHED_FOR: Duration = Duration::from_secs(2);
/// Number of lookup groups. Tokens of one group are looked up one at a time.
const LOOKUP_GROUPS: usize = 64;
/// While this recent, an outage seen by one lookup answers those that waited for it. Long enough for the waiting
/// requests to take their turns, short enough that no request is refused after Postgres is back.
const OUTAGE_BACKOFF: Duration = Duration::from_millis(50);
/// Bound of the cache; further tokens evict the least used.
const CACHED_TOKENS: u64 = 100_000;

/// An authenticated caller.
#[derive(Debug, Clone)]
pub enum Credential {
    /// The holder of a workspace's key.
    Workspace {
        scope: WorkspaceScope,
    },
    Agent(AgentCaller),
    Node(NodeCaller),
    /// Observer token: reads within [`Credential::view`].
    Observer(ObserverAccess),
}

impl Credential {
    #[must_use]
    pub const fn scope(&self) -> WorkspaceScope {
        match self {
            Self::Workspace { scope } => *scope,
            Self::Agent(agent) => agent.scope,
            Self::Node(node) => node.scope,
            Self::Observer(observer) => observer.scope,
        }
    }

    /// Returns the part of the workspace that the caller may see. Callers other than observers see everything, except
    /// conversations without them.
    #[must_use]
    pub fn view(&self) -> &ObserverView {
        match self {
            Self::Observer(observer) => &observer.view,
            Self::Workspace { .. } | Self::Agent(_) | Self::Node(_) => full_view(),
        }
    }

    #[must_use]
    pub const fn agent_id(&self) -> Option<AgentId> {
        match self {
            Self::Agent(agent) => Some(agent.agent_id),
            Self::Workspace { .. } | Self::Node(_) | Self::Observer(_) => None,
        }
    }
}

/// An agent that calls with its own token.
#[derive(Debug, Clone)]
pub struct AgentCaller {
    pub scope: WorkspaceScope,
    pub agent_id: AgentId,
    pub name: Arc<str>,
    pub kind: AgentKind,
    /// Number of rotations of the token at authentication. The commit of a send checks it.
    pub token_generation: i64,
}

/// A node that calls with its own token.
#[derive(Debug, Clone)]
pub struct NodeCaller {
    pub scope: WorkspaceScope,
    pub node_id: NodeId,
}

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
            credentials: Cache::builder().max_capacity(CACHED_TOKENS).time_to_live(CACHED_FOR).build(),
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

impl Engine {
    /// Authenticates a token.
    ///
    /// # Errors
    /// When the token is malformed, unknown, revoked or of an ended workspace.
    pub async fn authenticate(&self, token: &str) -> EngineResult<Credential> {
        let kind = TokenKind::from_prefix(token).ok_or(EngineError::Unauthenticated(BadCredential::TokenFormat))?;
        if kind == TokenKind::Observer {
            let access = self.authenticate_observer(token).await?;
            self.refuse_suspended(access.scope)?;
            return Ok(Credential::Observer(access));
        }
        let credential = self.cached_credential(kind, TokenHash::from_token(token)).await?;
        self.refuse_suspended(credential.scope())?;
        if let Credential::Agent(agent) = &credential {
            self.inner.seen.note(agent.scope, agent.agent_id, self.now());
        }
        Ok(credential)
    }

    /// Invalidates a cached token: it is revoked, or its owner has changed.
    pub fn forget_token(&self, hash: &TokenHash) {
        self.inner.tokens.revocations.fetch_add(1, Ordering::SeqCst);
        self.inner.tokens.credentials.invalidate(hash);
    }

    /// Invalidates all tokens: a revocation hint may have been missed.
    pub(crate) fn forget_all_tokens(&self) {
        self.inner.tokens.revocations.fetch_add(1, Ordering::SeqCst);
        self.inner.tokens.credentials.invalidate_all();
    }

    /// Invalidates a revoked token here and in the other processes.
    pub(crate) fn revoke_token(&self, hash: TokenHash) {
        self.forget_token(&hash);
        self.inner.core.hints.token_revoked(hash);
    }

    pub(crate) fn fresh_token(&self, kind: TokenKind) -> EngineResult<FreshToken> {
        let mut random = [0; TOKEN_BYTES];
        getrandom::fill(&mut random).map_err(|_| EngineError::Internal(Fault::NoRandomness))?;
        let text = kind.format_token(random);
        let hash = TokenHash::from_token(&text);
        Ok(FreshToken { text, hash })
    }

    /// Returns the owner of a token from the cache (at most 2 s old) or from storage.
    pub(crate) async fn cached_credential(&self, kind: TokenKind, hash: TokenHash) -> EngineResult<Credential> {
        match self.inner.tokens.credentials.get(&hash) {
            Some(known) => Ok(known),
            None => self.look_up_credential(kind, hash).await,
        }
    }

    async fn look_up_credential(&self, kind: TokenKind, hash: TokenHash) -> EngineResult<Credential> {
        let cache = &self.inner.tokens;
        let mut unavailable_since = cache.lookups[usize::from(hash.as_bytes()[0]) % LOOKUP_GROUPS].lock().await;
        if let Some(known) = cache.credentials.get(&hash) {
            return Ok(known);
        }
        if unavailable_since.is_some_and(|at| at.elapsed() < OUTAGE_BACKOFF) {
            return Err(StoreError::unavailable("looking up a token").into());
        }
        let revocations = cache.revocations.load(Ordering::SeqCst);
        let owner = self.store().token_owner(&hash).await;
        *unavailable_since = owner.as_ref().is_err_and(StoreError::is_unavailable).then(Instant::now);
        let credential = match (kind, owner?) {
            (TokenKind::Workspace, Some(TokenOwner::Workspace { workspace })) => {
                Credential::Workspace { scope: WorkspaceScope::from_verified_token(workspace) }
            }
            (TokenKind::Agent, Some(TokenOwner::Agent { workspace, agent_id, name, kind, token_generation })) => {
                Credential::Agent(AgentCaller {
                    scope: WorkspaceScope::from_verified_token(workspace),
                    agent_id,
                    name: name.into(),
                    kind,
                    token_generation,
                })
            }
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
