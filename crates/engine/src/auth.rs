//! Who calls: tokens to callers, with a cache of seconds.
//!
//! The only place that turns a token into a [`WorkspaceScope`].

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use moka::sync::Cache;
use relay_domain::{
    AgentId, NodeId, WorkspaceScope,
    agent::AgentKind,
    observer::ObserverView,
    token::{TOKEN_BYTES, TokenHash, TokenKind},
};
use relay_store::{StoreError, TokenOwner};
use tokio::sync::Mutex;

use crate::{
    Engine, EngineError, EngineResult,
    observers::{self, ObserverAccess},
};

/// A revocation that this process did not hear of is noticed after this long at the latest.
const CACHED_FOR: Duration = Duration::from_secs(2);
/// Groups of tokens that are looked up one at a time.
const TURNS: usize = 64;
/// A storage that was found away is not asked again by those who waited meanwhile: long enough for them to
/// take their turns, short enough that nobody is turned away once it is back.
const AWAY_FOR: Duration = Duration::from_millis(50);
/// Tokens remembered at once; further ones push out the least used.
const CACHED_TOKENS: u64 = 100_000;

/// An authenticated caller.
#[derive(Debug, Clone)]
pub enum Credential {
    /// The holder of a workspace's key.
    Workspace {
        /// The workspace.
        scope: WorkspaceScope,
    },
    /// An agent.
    Agent(AgentCaller),
    /// A node.
    Node(NodeCaller),
    /// An observer: reads, within [`Credential::view`].
    Observer(ObserverAccess),
}

impl Credential {
    /// The workspace that the caller belongs to.
    #[must_use]
    pub const fn scope(&self) -> WorkspaceScope {
        match self {
            Self::Workspace { scope } => *scope,
            Self::Agent(agent) => agent.scope,
            Self::Node(node) => node.scope,
            Self::Observer(observer) => observer.scope,
        }
    }

    /// What of the workspace the caller may be shown. Anyone but an observer: everything, except that
    /// conversations are for those who take part in them.
    #[must_use]
    pub fn view(&self) -> &ObserverView {
        match self {
            Self::Observer(observer) => &observer.view,
            Self::Workspace { .. } | Self::Agent(_) | Self::Node(_) => observers::everything(),
        }
    }

    /// The agent, when the caller is one.
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
    /// The workspace.
    pub scope: WorkspaceScope,
    /// The agent.
    pub agent_id: AgentId,
    /// Its name.
    pub name: Arc<str>,
    /// What it is.
    pub kind: AgentKind,
    /// How often its token had been rotated when it was authenticated. A send relies on it.
    pub token_generation: i64,
}

/// A node that calls with its own token.
#[derive(Debug, Clone)]
pub struct NodeCaller {
    /// The workspace.
    pub scope: WorkspaceScope,
    /// The node.
    pub node_id: NodeId,
}

/// What authentication remembers.
#[derive(Debug)]
pub(crate) struct TokenCache {
    known: Cache<TokenHash, Credential>,
    /// One lookup at a time for tokens of the same group: a busy token that has just been forgotten is
    /// read once, not by all of its requests. Holds when storage was last found away, so that those who
    /// waited need not find out one after the other.
    turns: Vec<Mutex<Option<Instant>>>,
    /// Counts revocations, so that an answer read before one is not remembered after it.
    revocations: AtomicU64,
}

impl Default for TokenCache {
    fn default() -> Self {
        Self {
            known: Cache::builder().max_capacity(CACHED_TOKENS).time_to_live(CACHED_FOR).build(),
            turns: (0..TURNS).map(|_| Mutex::new(None)).collect(),
            revocations: AtomicU64::new(0),
        }
    }
}

/// A fresh token and its hash.
pub(crate) struct FreshToken {
    pub(crate) text: String,
    pub(crate) hash: TokenHash,
}

impl Engine {
    /// Who holds a token.
    ///
    /// # Errors
    /// When the token has an unknown form, is of a kind that nothing issues yet, is unknown, or its
    /// workspace is gone; or storage is away.
    pub async fn authenticate(&self, token: &str) -> EngineResult<Credential> {
        let kind = TokenKind::of(token).ok_or(EngineError::InvalidTokenFormat)?;
        if kind == TokenKind::Observer {
            let access = self.authenticate_observer(token).await?;
            self.refuse_suspended(access.scope)?;
            return Ok(Credential::Observer(access));
        }
        let credential = self.known_or_looked_up(kind, TokenHash::of(token)).await?;
        self.refuse_suspended(credential.scope())?;
        if let Credential::Agent(agent) = &credential {
            self.inner.seen.note(agent.scope, agent.agent_id, self.now());
        }
        Ok(credential)
    }

    /// Forgets what is remembered of a token: it is dead, or whom it stands for has changed.
    pub fn forget_token(&self, hash: &TokenHash) {
        self.inner.tokens.revocations.fetch_add(1, Ordering::SeqCst);
        self.inner.tokens.known.invalidate(hash);
    }

    /// Forgets every token: some revocation may have been missed.
    pub(crate) fn forget_all_tokens(&self) {
        self.inner.tokens.revocations.fetch_add(1, Ordering::SeqCst);
        self.inner.tokens.known.invalidate_all();
    }

    /// Forgets a dead token here and tells the other processes.
    pub(crate) fn revoke_token(&self, hash: TokenHash) {
        self.forget_token(&hash);
        self.inner.hints.token_revoked(hash);
    }

    /// A fresh random token.
    pub(crate) fn fresh_token(&self, kind: TokenKind) -> EngineResult<FreshToken> {
        let mut random = [0; TOKEN_BYTES];
        getrandom::fill(&mut random).map_err(|_| EngineError::NoRandomness)?;
        let text = kind.token(random);
        let hash = TokenHash::of(&text);
        Ok(FreshToken { text, hash })
    }

    /// Whom a token stands for, as remembered for at most 2 s.
    pub(crate) async fn known_or_looked_up(&self, kind: TokenKind, hash: TokenHash) -> EngineResult<Credential> {
        match self.inner.tokens.known.get(&hash) {
            Some(known) => Ok(known),
            None => self.look_up(kind, hash).await,
        }
    }

    async fn look_up(&self, kind: TokenKind, hash: TokenHash) -> EngineResult<Credential> {
        let cache = &self.inner.tokens;
        let mut away_since = cache.turns[usize::from(hash.as_bytes()[0]) % TURNS].lock().await;
        if let Some(known) = cache.known.get(&hash) {
            return Ok(known);
        }
        if away_since.is_some_and(|at| at.elapsed() < AWAY_FOR) {
            return Err(StoreError::still_away("looking up a token").into());
        }
        let revocations = cache.revocations.load(Ordering::SeqCst);
        let owner = self.store().token_owner(&hash).await;
        *away_since = owner.as_ref().is_err_and(StoreError::is_unavailable).then(Instant::now);
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
                ObserverAccess::of_row(hash, scope, token_id, version, (&scopes, &filters), expires_at)
                    .map(Credential::Observer)
                    .ok_or(EngineError::UnknownToken { kind })?
            }
            (kind, _) => return Err(EngineError::UnknownToken { kind }),
        };
        cache.known.insert(hash, credential.clone());
        if cache.revocations.load(Ordering::SeqCst) != revocations {
            // Some token died while this one was read: it may have been this one.
            cache.known.invalidate(&hash);
        }
        Ok(credential)
    }
}
