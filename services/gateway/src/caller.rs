//! Who calls, per class of route: each class is an extractor that refuses the others with the exact
//! answers that clients key on.

use axum::{
    extract::FromRequestParts,
    http::{HeaderMap, header::AUTHORIZATION, request::Parts},
};
use relay_domain::{
    WorkspaceScope,
    observer::{ObserverScope, ScopeSet},
    token::TokenKind,
};
use relay_engine::{
    EngineError,
    auth::{AgentCaller, Credential, NodeCaller},
    limits::Holder,
    webhooks::HookCaller,
};

use crate::{error::ApiError, extract::Path, limits, state::AppState};

/// The token of the `Authorization` header. The scheme may be in any case.
fn bearer(parts: &Parts) -> Result<&str, ApiError> {
    let missing = || ApiError::unauthorized("unauthorized", "Missing or invalid Authorization header");
    bearer_of(&parts.headers).ok_or_else(missing)
}

/// The token of the `Authorization` header, where it may be elsewhere too.
pub(crate) fn bearer_of(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// Authenticates a token if its kind is among those allowed; other kinds are refused unseen. Charges the
/// request to its caller.
async fn authenticate(
    parts: &Parts,
    state: &AppState,
    allowed: &[TokenKind],
    wanted: &'static str,
) -> Result<Credential, ApiError> {
    let token = bearer(parts)?;
    let kind = TokenKind::of(token).ok_or(EngineError::InvalidTokenFormat)?;
    if !allowed.contains(&kind) {
        return Err(match kind {
            TokenKind::Node => ApiError::node_token_forbidden(),
            TokenKind::Observer => {
                ApiError::unauthorized("observer_token_forbidden", "Observer tokens are not allowed here")
            }
            TokenKind::Workspace | TokenKind::Agent | TokenKind::Webhook => {
                ApiError::unauthorized("unauthorized", wanted)
            }
        });
    }
    let credential = state.engine.authenticate(token).await?;
    limits::charge(parts, state, credential.scope(), credential.holder()).await?;
    Ok(credential)
}

const WORKSPACE_WANTED: &str = "Workspace key required for this endpoint";
const AGENT_WANTED: &str = "Agent token required for this endpoint";
const ANY_WANTED: &str = "Workspace key or agent token required for this endpoint";
const READER_WANTED: &str = "Workspace key or observer token required for this endpoint";

/// Scopes that a reading route asks for, as parameters of [`Reader`] and its siblings.
pub mod reads {
    use super::{ObserverScope as S, ScopeSet};

    /// `activity:read`.
    pub const ACTIVITY: u16 = ScopeSet::of(&[S::Activity]).bits();
    /// `agents:read`.
    pub const AGENTS: u16 = ScopeSet::of(&[S::Agents]).bits();
    /// Whatever the token may read.
    pub const ANYTHING: u16 = ScopeSet::all().bits();
    /// `channels:read`.
    pub const CHANNELS: u16 = ScopeSet::of(&[S::Channels]).bits();
    /// `messages:read` or `activity:read`.
    pub const CONSOLE: u16 = ScopeSet::of(&[S::Messages, S::Activity]).bits();
    /// `deliveries:read`.
    pub const DELIVERIES: u16 = ScopeSet::of(&[S::Deliveries]).bits();
    /// `dms:read`.
    pub const DMS: u16 = ScopeSet::of(&[S::Dms]).bits();
    /// `files:read`.
    pub const FILES: u16 = ScopeSet::of(&[S::Files]).bits();
    /// `messages:read` or `dms:read`: one message, of a channel or of a conversation.
    pub const MESSAGE: u16 = ScopeSet::of(&[S::Messages, S::Dms]).bits();
    /// `messages:read`.
    pub const MESSAGES: u16 = ScopeSet::of(&[S::Messages]).bits();
    /// `nodes:read`.
    pub const NODES: u16 = ScopeSet::of(&[S::Nodes]).bits();
    /// `reactions:read`.
    pub const REACTIONS: u16 = ScopeSet::of(&[S::Reactions]).bits();
    /// `search:read`.
    pub const SEARCH: u16 = ScopeSet::of(&[S::Search]).bits();
    /// `threads:read` or `messages:read`.
    pub const THREADS: u16 = ScopeSet::of(&[S::Threads, S::Messages]).bits();
}

/// Authenticates for reading: an observer needs one of the scopes.
async fn reading(
    parts: &Parts,
    state: &AppState,
    allowed: &[TokenKind],
    scopes: ScopeSet,
) -> Result<Credential, ApiError> {
    let caller = authenticate(parts, state, allowed, READER_WANTED).await?;
    if let Credential::Observer(observer) = &caller
        && !observer.view.scopes.meets(scopes)
    {
        let wanted: Vec<_> = scopes.iter().map(ObserverScope::as_str).collect();
        return Err(EngineError::InsufficientScope(wanted.join(" or ")).into());
    }
    Ok(caller)
}

/// Class `read(S)`: a workspace key, or an observer token with one of the scopes, which are a parameter:
/// `Reader(caller): Reader<{ reads::ACTIVITY }>`. [`ReaderOrAgent`] is `read(S)+a`, also for routes of
/// class `any` that observers may use; [`ReaderOrAgentOrNode`] is `read(S)+a+n`.
///
/// What an observer may see of the data is `caller.view()`. It shows everything for any other caller, so
/// that handlers and use cases apply it without asking who calls: pass the [`Credential`] down, put
/// `view().filters` into queries of lists (`agent_ids`, `created_after`, channels), and check single things
/// with `view().sees_message(…)`, `sees_channel(…)`, `sees_conversation(…)` or `sees_author(…)`. What is
/// hidden is the 404 of that thing. For agents, who takes part in a conversation is checked as ever.
#[derive(Debug)]
pub struct Reader<const SCOPES: u16>(pub Credential);

impl<const SCOPES: u16> FromRequestParts<AppState> for Reader<SCOPES> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let allowed = [TokenKind::Workspace, TokenKind::Observer];
        reading(parts, state, &allowed, ScopeSet::from_bits(SCOPES)).await.map(Self)
    }
}

/// Class `read(S)+a`: as [`Reader`], or an agent token.
#[derive(Debug)]
pub struct ReaderOrAgent<const SCOPES: u16>(pub Credential);

impl<const SCOPES: u16> FromRequestParts<AppState> for ReaderOrAgent<SCOPES> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let allowed = [TokenKind::Workspace, TokenKind::Observer, TokenKind::Agent];
        reading(parts, state, &allowed, ScopeSet::from_bits(SCOPES)).await.map(Self)
    }
}

/// Class `read(S)+a+n`: as [`Reader`], or an agent or node token.
#[derive(Debug)]
pub struct ReaderOrAgentOrNode<const SCOPES: u16>(pub Credential);

impl<const SCOPES: u16> FromRequestParts<AppState> for ReaderOrAgentOrNode<SCOPES> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let allowed = [TokenKind::Workspace, TokenKind::Observer, TokenKind::Agent, TokenKind::Node];
        reading(parts, state, &allowed, ScopeSet::from_bits(SCOPES)).await.map(Self)
    }
}

/// Class `ws`: a workspace key.
#[derive(Debug)]
pub struct WorkspaceKey {
    /// Its workspace.
    pub scope: WorkspaceScope,
    /// The key as presented.
    pub token: String,
}

impl FromRequestParts<AppState> for WorkspaceKey {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let caller = authenticate(parts, state, &[TokenKind::Workspace], WORKSPACE_WANTED).await?;
        Ok(Self { scope: caller.scope(), token: bearer(parts)?.to_owned() })
    }
}

/// Who may create a workspace: the owner of another one, an operator, or, unless the installation is
/// hosted, anybody. A header that is there must be right.
#[derive(Debug)]
pub struct Creator(pub Option<WorkspaceKey>);

impl FromRequestParts<AppState> for Creator {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        if !parts.headers.contains_key(AUTHORIZATION) {
            let shown = secret_of(&parts.headers).is_some_and(|secret| state.operators.is_secret(secret));
            if state.operators.is_hosted() && !shown {
                return Err(EngineError::HostedInstallation.into());
            }
            return Ok(Self(None));
        }
        if TokenKind::of(bearer(parts)?).is_none() && state.operators.are_known() {
            Operator::from_request_parts(parts, state).await?;
            return Ok(Self(None));
        }
        WorkspaceKey::from_request_parts(parts, state).await.map(|key| Self(Some(key)))
    }
}

/// Class `operator`: the bootstrap secret or a JWT of the configured issuer, as a bearer; the secret also as
/// `X-Workspace-Bootstrap-Secret`.
#[derive(Debug)]
pub struct Operator;

impl FromRequestParts<AppState> for Operator {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        match secret_of(&parts.headers) {
            Some(secret) if state.operators.is_secret(secret) => Ok(Self),
            Some(_) => Err(EngineError::NotAnOperator.into()),
            None => {
                state.operators.admit(bearer(parts)?).await?;
                Ok(Self)
            }
        }
    }
}

fn secret_of(headers: &HeaderMap) -> Option<&str> {
    headers.get("x-workspace-bootstrap-secret").map(|value| value.to_str().unwrap_or_default())
}

/// Class `agent`: an agent token.
#[derive(Debug)]
pub struct Agent(pub AgentCaller);

impl FromRequestParts<AppState> for Agent {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        match authenticate(parts, state, &[TokenKind::Agent], AGENT_WANTED).await? {
            Credential::Agent(agent) => Ok(Self(agent)),
            _ => Err(ApiError::unauthorized("unauthorized", AGENT_WANTED)),
        }
    }
}

/// A route that acts as an agent: a workspace key is understood and refused with 403
/// `agent_token_required`.
#[derive(Debug)]
pub struct ActingAgent(pub AgentCaller);

impl FromRequestParts<AppState> for ActingAgent {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        match authenticate(parts, state, &[TokenKind::Workspace, TokenKind::Agent], AGENT_WANTED).await? {
            Credential::Agent(agent) => Ok(Self(agent)),
            _ => Err(EngineError::AgentTokenRequired.into()),
        }
    }
}

/// Class `any`: a workspace key or an agent token.
#[derive(Debug)]
pub struct Caller(pub Credential);

impl FromRequestParts<AppState> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        authenticate(parts, state, &[TokenKind::Workspace, TokenKind::Agent], ANY_WANTED).await.map(Self)
    }
}

/// Class `sender`: an agent, or a node that says for which agent it speaks. A workspace key is understood
/// and refused with 403 `agent_token_required`.
#[derive(Debug)]
pub enum Sender {
    /// The agent itself.
    Agent(AgentCaller),
    /// The node that hosts it.
    Node(NodeCaller),
}

impl FromRequestParts<AppState> for Sender {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let allowed = [TokenKind::Workspace, TokenKind::Agent, TokenKind::Node];
        match authenticate(parts, state, &allowed, ANY_WANTED).await? {
            Credential::Agent(agent) => Ok(Self::Agent(agent)),
            Credential::Node(node) => Ok(Self::Node(node)),
            Credential::Workspace { .. } | Credential::Observer(_) => Err(EngineError::AgentTokenRequired.into()),
        }
    }
}

/// Class `hook`: the token of the inbound webhook that the path names.
#[derive(Debug)]
pub struct Hook(pub HookCaller);

impl FromRequestParts<AppState> for Hook {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let token = bearer(parts).map_err(|_| EngineError::WebhookTokenRequired)?.to_owned();
        if TokenKind::of(&token) != Some(TokenKind::Webhook) {
            return Err(EngineError::WebhookTokenRequired.into());
        }
        let Path(webhook) = Path::<String>::from_request_parts(parts, state).await?;
        let caller = state.engine.authenticate_hook(&token, &webhook).await?;
        limits::charge(parts, state, caller.scope, Holder::Webhook(caller.webhook.webhook_id)).await?;
        Ok(Self(caller))
    }
}
