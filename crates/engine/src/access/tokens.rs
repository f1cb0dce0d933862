//! Tokens: made, looked up with a cache of seconds, revoked.
//!
//! The only module that turns a token into a [`WorkspaceScope`].

use std::{sync::Arc, time::Duration};

use moka::sync::Cache;
use relay_domain::{
    WorkspaceId, WorkspaceScope,
    access::token::{TOKEN_BYTES, TokenHash, TokenKind},
    metric_names as name,
};
use relay_store::{TokenLookup, TokenOwner};

use super::{
    callers::{AgentCaller, Credential, NodeCaller},
    credential_cache::CredentialCache,
    lookups::{Familiarity, TokenReader},
};
use crate::{
    EngineError, EngineResult,
    core::Core,
    error::{BadCredential, Fault},
    observers::access::ObserverAccess,
};

/// Time for which a credential is served, from the begin of its lookup on: a revocation whose hint was lost is noticed
/// within a second.
const CACHED_FOR: Duration = Duration::from_millis(900);
/// Time for which a token that was valid is no stranger.
const REMEMBERED_FOR: Duration = Duration::from_secs(600);
/// Unknown tokens that are kept, so that a client that repeats one costs nothing.
const CACHED_UNKNOWN: u64 = 10_000;
/// Tokens that are remembered; further ones evict the least used.
const REMEMBERED_TOKENS: u64 = 100_000;

/// Cached outcomes of lookups.
#[derive(Debug)]
pub(crate) struct TokenCache {
    credentials: CredentialCache,
    /// Tokens that were refused within the last second.
    refused: Cache<TokenHash, TokenRefusal>,
    /// Tokens that were valid within the last minutes. They prove nothing.
    recent: Cache<TokenHash, ()>,
}

impl Default for TokenCache {
    fn default() -> Self {
        Self {
            credentials: CredentialCache::new(CACHED_FOR),
            refused: Cache::builder().max_capacity(CACHED_UNKNOWN).time_to_live(CACHED_FOR).build(),
            recent: Cache::builder().max_capacity(REMEMBERED_TOKENS).time_to_idle(REMEMBERED_FOR).build(),
        }
    }
}

fn count_lookup(outcome: &'static str) {
    metrics::counter!(name::TOKEN_LOOKUPS, "outcome" => outcome).increment(1);
}

/// Reason for which storage refuses a token.
#[derive(Debug, Clone, Copy)]
enum TokenRefusal {
    Unknown,
    WorkspaceExpired,
}

impl TokenRefusal {
    const fn into_error(self, kind: TokenKind) -> EngineError {
        EngineError::Unauthenticated(match self {
            Self::Unknown => BadCredential::UnknownToken { kind },
            Self::WorkspaceExpired => BadCredential::WorkspaceExpired,
        })
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
    reader: Arc<TokenReader>,
}

impl Tokens {
    pub(crate) fn new(core: Core, reader: TokenReader) -> Self {
        Self { core, cache: Arc::default(), reader: Arc::new(reader) }
    }

    /// Invalidates a cached token: it is revoked, or its owner has changed.
    pub(crate) fn forget(&self, hash: &TokenHash) {
        self.cache.credentials.forget(hash);
        // It counts as a stranger again: its repetitions are charged to the address.
        self.cache.recent.invalidate(hash);
    }

    /// Returns whether a token was valid within the last minutes.
    pub(crate) fn is_familiar(&self, hash: &TokenHash) -> bool {
        self.cache.recent.contains_key(hash)
    }

    /// Remembers that a token was valid.
    pub(crate) fn remember(&self, hash: TokenHash) {
        self.cache.recent.insert(hash, ());
    }

    /// Invalidates the tokens of a workspace: it was deleted, or rights have changed.
    pub(crate) fn forget_workspace(&self, workspace: WorkspaceId) {
        self.cache.credentials.forget_workspace(workspace);
    }

    /// Invalidates all tokens: a revocation hint may have been missed.
    pub(crate) fn forget_all(&self) {
        self.cache.credentials.forget_all();
    }

    /// Invalidates a revoked token here and in the other processes.
    pub(crate) fn revoke(&self, hash: TokenHash) {
        // Here at once: the caller may be answered before `handle_hints` of this process has seen the hint.
        self.forget(&hash);
        self.core.hints.token_revoked(hash);
    }

    /// Invalidates the tokens of a deleted workspace here and in the other processes.
    pub(crate) fn revoke_workspace(&self, scope: WorkspaceScope) {
        self.forget_workspace(scope.workspace_id());
        self.core.hints.workspace_deleted(scope);
    }

    /// Invalidates the rights of a workspace's agents here and in the other processes.
    pub(crate) fn rights_changed(&self, scope: WorkspaceScope) {
        self.forget_workspace(scope.workspace_id());
        // Receivers of this hint forget the tokens of the workspace as well.
        self.core.hints.quotas_changed(scope);
    }

    pub(crate) fn fresh(&self, kind: TokenKind) -> EngineResult<FreshToken> {
        let mut random = [0; TOKEN_BYTES];
        getrandom::fill(&mut random).map_err(|_| EngineError::Internal(Fault::NoRandomness))?;
        let text = kind.format_token(random);
        let hash = TokenHash::from_token(&text);
        Ok(FreshToken { text, hash })
    }

    /// Returns the owner of a token from the cache (at most 0.9 s old) or from storage.
    pub(crate) async fn cached_credential(&self, kind: TokenKind, hash: TokenHash) -> EngineResult<Credential> {
        match self.cache.credentials.get(&hash) {
            Some(known) => Ok(known),
            None => self.look_up(kind, hash).await,
        }
    }

    async fn look_up(&self, kind: TokenKind, hash: TokenHash) -> EngineResult<Credential> {
        let cache = &self.cache;
        // Tokens are drawn at random, so one that was unknown does not become valid within the second.
        if let Some(refusal) = cache.refused.get(&hash) {
            count_lookup("repeated");
            return Err(refusal.into_error(kind));
        }
        // `get` counts as a use and `contains_key` does not: a token in use stays familiar.
        let familiarity = match cache.recent.get(&hash) {
            Some(()) => Familiarity::Known,
            None => Familiarity::Stranger,
        };
        // Before the lookup, so that a revocation during it outdates the outcome.
        let read_at = cache.credentials.begin_read();
        let found = self.reader.look_up(hash, familiarity).await.map_err(|_| {
            count_lookup("refused");
            EngineError::Overloaded
        })?;
        let credential = match found? {
            TokenLookup::Valid { owner, answerable } => {
                let known = to_credential(kind, hash, owner).ok_or(TokenRefusal::Unknown);
                known.inspect(|known| _ = self.core.families.remember(known.scope().workspace_id(), answerable))
            }
            TokenLookup::WorkspaceExpired => Err(TokenRefusal::WorkspaceExpired),
            TokenLookup::Unknown => Err(TokenRefusal::Unknown),
        };
        let credential = credential.map_err(|refusal| {
            count_lookup("unknown");
            cache.refused.insert(hash, refusal);
            refusal.into_error(kind)
        })?;
        count_lookup("found");
        cache.recent.insert(hash, ());
        cache.credentials.insert(hash, credential.clone(), read_at);
        Ok(credential)
    }
}

/// Converts the owner of a token of this kind. `None` if the token is of another kind, or an observer's row cannot be
/// read.
fn to_credential(kind: TokenKind, hash: TokenHash, owner: TokenOwner) -> Option<Credential> {
    let scope = WorkspaceScope::from_verified_token;
    match (kind, owner) {
        (TokenKind::Workspace, TokenOwner::Workspace { workspace }) => {
            Some(Credential::Workspace { scope: scope(workspace) })
        }
        (
            TokenKind::Agent,
            TokenOwner::Agent { workspace, agent_id, name, kind, token_generation, is_former, rights },
        ) => Some(Credential::Agent(AgentCaller {
            scope: scope(workspace),
            agent_id,
            name: name.into(),
            kind,
            token_generation,
            is_former_token: is_former,
            rights,
        })),
        (TokenKind::Node, TokenOwner::Node { workspace, node_id, role, kind }) => {
            Some(Credential::Node(NodeCaller { scope: scope(workspace), node_id, role, kind }))
        }
        (TokenKind::Observer, TokenOwner::Observer { workspace, token_id, version, scopes, filters, expires_at }) => {
            let view = (scopes.as_slice(), &filters);
            ObserverAccess::from_row(hash, scope(workspace), token_id, version, view, expires_at)
                .map(Credential::Observer)
        }
        _ => None,
    }
}
