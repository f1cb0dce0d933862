//! Authentication per route class: each class is an extractor that refuses the other tokens with the exact errors that
//! clients depend on.
//!
//! Handlers name the class they accept, such as [`Agent`] or [`Reader`]. Authentication also charges the request to
//! the rate limits of its caller.

use axum::{
    extract::FromRequestParts,
    http::{
        HeaderMap,
        header::{AUTHORIZATION, SEC_WEBSOCKET_PROTOCOL},
        request::Parts,
    },
};
use relay_domain::{
    WorkspaceScope,
    access::token::TokenKind,
    observers::{ObserverScope, ScopeSet},
};
use relay_engine::{
    EngineError,
    access::{
        callers::{AgentCaller, Credential, NodeCaller},
        limits::RateLimitSubject,
    },
    error::{BadCredential, Denial},
    messages::webhooks::WebhookCaller,
};

use crate::{connections::ClientAddress, error::ApiError, extract::Path, rate_limits, state::AppState};

/// Returns the token of the `Authorization` header, or the 401 for a missing one. The scheme is case-insensitive.
fn bearer(parts: &Parts) -> Result<&str, ApiError> {
    find_bearer(&parts.headers).ok_or_else(ApiError::missing_token)
}

/// Returns the token of the `Authorization` header, on routes that also accept it elsewhere.
pub(crate) fn find_bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// WebSocket subprotocol that the gateway selects. Clients that put a token into another one must offer it too:
/// browsers fail a connection for which the server selects none of the offered ones.
pub(crate) const SOCKET_PROTOCOL: &str = "relay.v1";
/// Prefix of the subprotocol that carries a token, for clients that can set no header. It is never selected, so that
/// the token is not echoed.
const TOKEN_PROTOCOL: &str = "relay.token.";

/// Returns the token of a socket's upgrade: that of the query, else of the `Authorization` header, else of a
/// subprotocol.
pub(crate) fn find_socket_token(query: Option<String>, headers: &HeaderMap) -> Option<String> {
    query
        .filter(|token| !token.is_empty())
        .or_else(|| find_bearer(headers).map(ToOwned::to_owned))
        .or_else(|| find_protocol_token(headers).map(ToOwned::to_owned))
}

fn find_protocol_token(headers: &HeaderMap) -> Option<&str> {
    let offers = headers.get_all(SEC_WEBSOCKET_PROTOCOL).iter().filter_map(|value| value.to_str().ok());
    let token = offers.flat_map(|offer| offer.split(',')).find_map(|one| one.trim().strip_prefix(TOKEN_PROTOCOL));
    token.filter(|token| !token.is_empty())
}

/// Authenticates a token of an allowed kind; other kinds are refused without a lookup. Charges the request to its
/// caller.
async fn authenticate(
    parts: &Parts,
    state: &AppState,
    allowed: &[TokenKind],
    required: &'static str,
) -> Result<Credential, ApiError> {
    let token = bearer(parts)?;
    let kind = TokenKind::from_prefix(token).ok_or(EngineError::Unauthenticated(BadCredential::TokenFormat))?;
    if !allowed.contains(&kind) {
        return Err(match kind {
            TokenKind::Node => ApiError::node_token_forbidden(),
            TokenKind::Observer => ApiError::observer_token_forbidden(),
            TokenKind::Workspace | TokenKind::Agent | TokenKind::Webhook => ApiError::unauthorized(required),
        });
    }
    let access = state.engine.access();
    let address = ClientAddress::of_parts(parts).limited_ip();
    let credential = access.limit_unknown(token, address, access.authenticate(token)).await?;
    rate_limits::charge_request(parts, state, credential.scope(), credential.rate_limit_subject()).await?;
    Ok(credential)
}

const WORKSPACE_KEY_REQUIRED: &str = "Workspace key required for this endpoint";
const AGENT_TOKEN_REQUIRED: &str = "Agent token required for this endpoint";
const ANY_TOKEN_REQUIRED: &str = "Workspace key or agent token required for this endpoint";
const READER_TOKEN_REQUIRED: &str = "Workspace key or observer token required for this endpoint";

/// Scopes that a reading route requires, as parameters of [`Reader`] and its siblings.
pub mod reads {
    use super::{ObserverScope as S, ScopeSet};

    pub const ACTIVITY: u16 = ScopeSet::from_scopes(&[S::Activity]).bits();
    pub const AGENTS: u16 = ScopeSet::from_scopes(&[S::Agents]).bits();
    /// Any scope.
    pub const ANYTHING: u16 = ScopeSet::all().bits();
    pub const CHANNELS: u16 = ScopeSet::from_scopes(&[S::Channels]).bits();
    pub const CONSOLE: u16 = ScopeSet::from_scopes(&[S::Messages, S::Activity]).bits();
    pub const DELIVERIES: u16 = ScopeSet::from_scopes(&[S::Deliveries]).bits();
    pub const DMS: u16 = ScopeSet::from_scopes(&[S::Dms]).bits();
    pub const FILES: u16 = ScopeSet::from_scopes(&[S::Files]).bits();
    /// One message, of a channel or of a conversation.
    pub const MESSAGE: u16 = ScopeSet::from_scopes(&[S::Messages, S::Dms]).bits();
    pub const MESSAGES: u16 = ScopeSet::from_scopes(&[S::Messages]).bits();
    pub const NODES: u16 = ScopeSet::from_scopes(&[S::Nodes]).bits();
    pub const REACTIONS: u16 = ScopeSet::from_scopes(&[S::Reactions]).bits();
    pub const SEARCH: u16 = ScopeSet::from_scopes(&[S::Search]).bits();
    pub const THREADS: u16 = ScopeSet::from_scopes(&[S::Threads, S::Messages]).bits();
}

/// Authenticates a reader. An observer needs one of the scopes.
async fn authenticate_reader(
    parts: &Parts,
    state: &AppState,
    allowed: &[TokenKind],
    scopes: ScopeSet,
) -> Result<Credential, ApiError> {
    let caller = authenticate(parts, state, allowed, READER_TOKEN_REQUIRED).await?;
    if let Credential::Observer(observer) = &caller
        && !observer.view.scopes.intersects(scopes)
    {
        let required: Vec<_> = scopes.iter().map(ObserverScope::as_str).collect();
        return Err(EngineError::Forbidden(Denial::InsufficientScope(required.join(" or "))).into());
    }
    Ok(caller)
}

/// Class `read(S)`: a workspace key, or an observer token with one of the scopes, which are a parameter:
/// `Reader(caller): Reader<{ reads::ACTIVITY }>`. [`ReaderOrAgent`] is `read(S)+a`, also for routes of
/// class `any` that observers may use; [`ReaderOrAgentOrNode`] is `read(S)+a+n`.
///
/// `caller.view()` restricts what an observer sees and allows everything for any other caller, so handlers and use
/// cases apply it without checking the kind of caller: pass the [`Credential`] down, put `view().filters` into queries
/// of lists (`agent_ids`, `created_after`, channels), and check single items with `view().sees_message(…)`,
/// `sees_channel(…)`, `sees_conversation(…)` or `sees_author(…)`. A hidden item is answered with its 404. For agents,
/// membership of a conversation is checked as usual.
#[derive(Debug)]
pub struct Reader<const SCOPES: u16>(pub Credential);

impl<const SCOPES: u16> FromRequestParts<AppState> for Reader<SCOPES> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let allowed = [TokenKind::Workspace, TokenKind::Observer];
        authenticate_reader(parts, state, &allowed, ScopeSet::from_bits(SCOPES)).await.map(Self)
    }
}

/// Class `read(S)+a`: as [`Reader`], or an agent token.
#[derive(Debug)]
pub struct ReaderOrAgent<const SCOPES: u16>(pub Credential);

impl<const SCOPES: u16> FromRequestParts<AppState> for ReaderOrAgent<SCOPES> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let allowed = [TokenKind::Workspace, TokenKind::Observer, TokenKind::Agent];
        authenticate_reader(parts, state, &allowed, ScopeSet::from_bits(SCOPES)).await.map(Self)
    }
}

/// Class `read(S)+a+n`: as [`Reader`], or an agent or node token.
#[derive(Debug)]
pub struct ReaderOrAgentOrNode<const SCOPES: u16>(pub Credential);

impl<const SCOPES: u16> FromRequestParts<AppState> for ReaderOrAgentOrNode<SCOPES> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let allowed = [TokenKind::Workspace, TokenKind::Observer, TokenKind::Agent, TokenKind::Node];
        authenticate_reader(parts, state, &allowed, ScopeSet::from_bits(SCOPES)).await.map(Self)
    }
}

/// Class `ws`: a workspace key.
#[derive(Debug)]
pub struct WorkspaceKey {
    pub scope: WorkspaceScope,
    /// The key as presented.
    pub token: String,
}

impl FromRequestParts<AppState> for WorkspaceKey {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let caller = authenticate(parts, state, &[TokenKind::Workspace], WORKSPACE_KEY_REQUIRED).await?;
        Ok(Self { scope: caller.scope(), token: bearer(parts)?.to_owned() })
    }
}

/// Caller that creates a workspace: the owner of another one, an operator, or, unless the installation is hosted, an
/// anonymous client. A header that is present must be valid.
#[derive(Debug)]
pub struct Creator(pub Option<WorkspaceKey>);

impl FromRequestParts<AppState> for Creator {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        if !parts.headers.contains_key(AUTHORIZATION) {
            let shown = presents_bootstrap_secret(parts, state).await?;
            if state.operators.is_hosted() && !shown {
                return Err(EngineError::Unauthenticated(BadCredential::HostedInstallation).into());
            }
            if !shown {
                rate_limits::charge_creation(parts, state)?;
            }
            return Ok(Self(None));
        }
        // Neither the secret nor a JWT has the prefix of a token, so the text decides which credential it is.
        if TokenKind::from_prefix(bearer(parts)?).is_none() && state.operators.are_configured() {
            Operator::from_request_parts(parts, state).await?;
            return Ok(Self(None));
        }
        WorkspaceKey::from_request_parts(parts, state).await.map(|key| Self(Some(key)))
    }
}

/// Class `operator`: the bootstrap secret or a JWT of the configured issuer as a bearer token; the secret also as
/// `X-Workspace-Bootstrap-Secret`.
#[derive(Debug)]
pub struct Operator;

impl FromRequestParts<AppState> for Operator {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let secret = bootstrap_secret(&parts.headers);
        let presented = secret.map_or_else(|| bearer(parts), Ok)?;
        let authentication = async {
            match secret {
                Some(secret) if state.operators.is_bootstrap_secret(secret) => Ok(()),
                Some(_) => Err(EngineError::Unauthenticated(BadCredential::NotAnOperator)),
                None => state.operators.authenticate(presented).await,
            }
        };
        let address = ClientAddress::of_parts(parts).limited_ip();
        state.engine.access().limit_unknown(presented, address, authentication).await?;
        Ok(Self)
    }
}

/// Returns whether a request presents the bootstrap secret. A wrong one is charged to the client's address.
///
/// # Errors
/// 429 `rate_limit_exceeded`: the address has presented too many unknown tokens and wrong secrets.
async fn presents_bootstrap_secret(parts: &Parts, state: &AppState) -> Result<bool, ApiError> {
    let Some(secret) = bootstrap_secret(&parts.headers) else { return Ok(false) };
    // Without a secret nothing can be guessed, and the header means nothing.
    if !state.operators.has_bootstrap_secret() {
        return Ok(false);
    }
    let comparison = async {
        if state.operators.is_bootstrap_secret(secret) {
            Ok(())
        } else {
            Err(EngineError::Unauthenticated(BadCredential::NotAnOperator))
        }
    };
    let address = ClientAddress::of_parts(parts).limited_ip();
    match state.engine.access().limit_unknown(secret, address, comparison).await {
        Ok(()) => Ok(true),
        // Only a hosted installation refuses a request with a wrong secret.
        Err(EngineError::Unauthenticated(_)) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn bootstrap_secret(headers: &HeaderMap) -> Option<&str> {
    // A value that is no text is a wrong secret, not a missing one: no bearer token is tried in its place.
    headers.get("x-workspace-bootstrap-secret").map(|value| value.to_str().unwrap_or_default())
}

/// Class `agent`: an agent token.
#[derive(Debug)]
pub struct Agent(pub AgentCaller);

impl FromRequestParts<AppState> for Agent {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        match authenticate(parts, state, &[TokenKind::Agent], AGENT_TOKEN_REQUIRED).await? {
            Credential::Agent(agent) => Ok(Self(agent)),
            // Refused by its prefix before; an agent token yields an agent.
            Credential::Workspace { .. } | Credential::Node(_) | Credential::Observer(_) => {
                Err(ApiError::unauthorized(AGENT_TOKEN_REQUIRED))
            }
        }
    }
}

/// Route that acts as an agent: a workspace key is refused with 403 `agent_token_required`.
#[derive(Debug)]
pub struct ActingAgent(pub AgentCaller);

impl FromRequestParts<AppState> for ActingAgent {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        match authenticate(parts, state, &[TokenKind::Workspace, TokenKind::Agent], AGENT_TOKEN_REQUIRED).await? {
            Credential::Agent(agent) => Ok(Self(agent)),
            Credential::Workspace { .. } | Credential::Node(_) | Credential::Observer(_) => {
                Err(EngineError::Forbidden(Denial::AgentTokenRequired).into())
            }
        }
    }
}

/// Class `any`: a workspace key or an agent token.
#[derive(Debug)]
pub struct Caller(pub Credential);

impl FromRequestParts<AppState> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        authenticate(parts, state, &[TokenKind::Workspace, TokenKind::Agent], ANY_TOKEN_REQUIRED).await.map(Self)
    }
}

/// Class `sender`: an agent, or a node that names the agent it sends for. A workspace key is refused with 403
/// `agent_token_required`.
#[derive(Debug)]
pub enum Sender {
    Agent(AgentCaller),
    Node(NodeCaller),
}

impl FromRequestParts<AppState> for Sender {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let allowed = [TokenKind::Workspace, TokenKind::Agent, TokenKind::Node];
        match authenticate(parts, state, &allowed, ANY_TOKEN_REQUIRED).await? {
            Credential::Agent(agent) => Ok(Self::Agent(agent)),
            Credential::Node(node) => Ok(Self::Node(node)),
            Credential::Workspace { .. } | Credential::Observer(_) => {
                Err(EngineError::Forbidden(Denial::AgentTokenRequired).into())
            }
        }
    }
}

/// Class `hook`: the token of the inbound webhook named by the path.
#[derive(Debug)]
pub struct WebhookToken(pub WebhookCaller);

impl FromRequestParts<AppState> for WebhookToken {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let token =
            bearer(parts).map_err(|_| EngineError::Unauthenticated(BadCredential::WebhookTokenRequired))?.to_owned();
        if TokenKind::from_prefix(&token) != Some(TokenKind::Webhook) {
            return Err(EngineError::Unauthenticated(BadCredential::WebhookTokenRequired).into());
        }
        let Path(webhook) = Path::<String>::from_request_parts(parts, state).await?;
        let address = ClientAddress::of_parts(parts).limited_ip();
        let authentication = state.engine.messages().authenticate_webhook(&token, &webhook);
        let caller = state.engine.access().limit_unknown(&token, address, authentication).await?;
        rate_limits::charge_request(parts, state, caller.scope, RateLimitSubject::Webhook(caller.webhook.webhook_id))
            .await?;
        Ok(Self(caller))
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn the_token_follows_the_scheme_in_any_case() {
        for (header, expected) in [
            (Some("Bearer at_live_1"), Some("at_live_1")),
            (Some("bearer   at_live_1 "), Some("at_live_1")),
            (Some("Basic at_live_1"), None),
            (Some("Bearer "), None),
            (Some("at_live_1"), None),
            (None, None),
        ] {
            let mut headers = HeaderMap::new();
            if let Some(header) = header {
                headers.insert(AUTHORIZATION, HeaderValue::from_static(header));
            }
            assert_eq!(find_bearer(&headers), expected, "{header:?}");
        }
    }
}
