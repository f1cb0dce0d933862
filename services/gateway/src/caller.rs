//! Who calls, per class of route: each class is an extractor that refuses the others with the exact
//! answers that clients key on.

use axum::{
    extract::FromRequestParts,
    http::{header::AUTHORIZATION, request::Parts},
};
use relay_domain::{WorkspaceScope, token::TokenKind};
use relay_engine::{
    EngineError,
    auth::{AgentCaller, Credential, NodeCaller},
};

use crate::{error::ApiError, state::AppState};

/// The token of the `Authorization` header. The scheme may be in any case.
fn bearer(parts: &Parts) -> Result<&str, ApiError> {
    let missing = || ApiError::unauthorized("unauthorized", "Missing or invalid Authorization header");
    let header = parts.headers.get(AUTHORIZATION).ok_or_else(missing)?;
    let (scheme, token) = header.to_str().ok().and_then(|text| text.split_once(' ')).ok_or_else(missing)?;
    let token = token.trim();
    if scheme.eq_ignore_ascii_case("bearer") && !token.is_empty() { Ok(token) } else { Err(missing()) }
}

/// Authenticates a token if its kind is among those allowed; other kinds are refused unseen.
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
            TokenKind::Node => ApiError::unauthorized("node_token_forbidden", "Node tokens are not allowed here"),
            TokenKind::Observer => {
                ApiError::unauthorized("observer_token_forbidden", "Observer tokens are not allowed here")
            }
            TokenKind::Workspace | TokenKind::Agent | TokenKind::Webhook => {
                ApiError::unauthorized("unauthorized", wanted)
            }
        });
    }
    Ok(state.engine.authenticate(token).await?)
}

const WORKSPACE_WANTED: &str = "Workspace key required for this endpoint";
const AGENT_WANTED: &str = "Agent token required for this endpoint";
const ANY_WANTED: &str = "Workspace key or agent token required for this endpoint";

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

/// A workspace key where none is needed; a header that is there must be right.
#[derive(Debug)]
pub struct MaybeWorkspaceKey(pub Option<WorkspaceKey>);

impl FromRequestParts<AppState> for MaybeWorkspaceKey {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        if !parts.headers.contains_key(AUTHORIZATION) {
            return Ok(Self(None));
        }
        WorkspaceKey::from_request_parts(parts, state).await.map(|key| Self(Some(key)))
    }
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

/// Class `any`, and class `read` with agents: a workspace key or an agent token.
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
        match CallerOrNode::from_request_parts(parts, state).await?.0 {
            Credential::Agent(agent) => Ok(Self::Agent(agent)),
            Credential::Node(node) => Ok(Self::Node(node)),
            Credential::Workspace { .. } => Err(EngineError::AgentTokenRequired.into()),
        }
    }
}

/// Class `read` with agents and nodes: a workspace key, an agent token or a node token.
#[derive(Debug)]
pub struct CallerOrNode(pub Credential);

impl FromRequestParts<AppState> for CallerOrNode {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let allowed = [TokenKind::Workspace, TokenKind::Agent, TokenKind::Node];
        authenticate(parts, state, &allowed, ANY_WANTED).await.map(Self)
    }
}
