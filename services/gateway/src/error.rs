//! HTTP errors: the only place that assigns statuses and codes.
//!
//! [`ApiError`] is the error of every handler and extractor; engine errors convert into it.

mod texts;

use std::{borrow::Cow, error::Error, fmt};

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header::RETRY_AFTER},
    response::{IntoResponse, Response},
};
use relay_domain::access::token::TokenKind;
use relay_engine::{
    EngineError,
    error::{BadCredential, Dependency, Limit, TooLarge},
};
use relay_wire::{
    envelope::Failure,
    messages::batch::{PostError, PostOutcome},
};

use self::texts::{conflict_text, denial_text, invalid_text, missing_text};
use crate::connections::Limit as Limited;

/// Value of `Retry-After` while storage is unavailable, in seconds.
const RETRY_AFTER_SECONDS: u16 = 1;

/// Error as the client sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    status: StatusCode,
    code: &'static str,
    message: Cow<'static, str>,
    retry_after: Option<u16>,
    drops_connection: bool,
}

/// Marks a response that must not be sent: `main` closes the connection instead.
#[derive(Debug, Clone, Copy)]
pub struct DropConnection;

impl fmt::Display for DropConnection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("the outcome of the request is unknown")
    }
}

impl Error for DropConnection {}

impl ApiError {
    /// Creates an error with a stable code and a text for people. Private: codes are assigned in this file only.
    fn new(status: StatusCode, code: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self { status, code, message: message.into(), retry_after: None, drops_connection: false }
    }

    /// Returns code and text, for an `error` frame.
    pub fn code_and_message(&self) -> (&str, &str) {
        (self.code, &self.message)
    }

    /// Returns the outcome of a post in a batch. Without a status it is unknown whether the message was accepted.
    pub fn into_outcome(self) -> PostOutcome {
        let (status, code, message) = if self.drops_connection {
            (None, "outcome_unknown", "It is not known whether the message was accepted".into())
        } else {
            (Some(self.status.as_u16()), self.code, self.message)
        };
        let error = PostError { code: code.to_owned(), message: message.into_owned(), retry_after: self.retry_after };
        PostOutcome { status, message: None, error: Some(error) }
    }

    /// Returns whether the server failed, as opposed to a refusal of the request.
    pub fn is_fault(&self) -> bool {
        self.drops_connection || self.status.is_server_error()
    }

    /// 400 `invalid_request`.
    pub fn invalid_request(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request", message)
    }

    /// 400 for a body that does not parse.
    pub fn invalid_json() -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_json", "Invalid JSON body")
    }

    /// 401 for a missing token, one without the form of a token, or one of a class that the route does not accept.
    pub fn unauthorized(message: &'static str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", message)
    }

    /// 401 for a request without the token of a caller.
    pub fn missing_token() -> Self {
        Self::unauthorized("Missing or invalid Authorization header")
    }

    /// 401 for a node token on a route that does not accept it.
    pub fn node_token_forbidden() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "node_token_forbidden", "Node tokens are not allowed here")
    }

    /// 401 for the token of a node without sockets, at their route.
    pub fn node_without_socket() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "node_token_forbidden", "A node of this kind has no socket")
    }

    /// 401 for an observer token on a route that does not accept it.
    pub fn observer_token_forbidden() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "observer_token_forbidden", "Observer tokens are not allowed here")
    }

    /// 401 for an observer token that may not stream. Clients of the socket handle only this refusal.
    pub fn stream_forbidden() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "observer_token_forbidden", "The token lacks the scope stream:read")
    }

    /// 404 for an unknown path.
    pub fn route_not_found() -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", "Route not found")
    }

    /// 405.
    pub fn method_not_allowed() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "Method not allowed")
    }

    /// 413.
    pub fn payload_too_large() -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "payload_too_large", "Request body is larger than 1 MiB")
    }

    /// 415.
    pub fn unsupported_media_type() -> Self {
        let message = "Content-Type must be application/json";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)
    }

    /// 500 without details.
    pub fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", "Internal error")
    }

    /// 503: nothing was done, and the client may retry.
    fn unavailable(code: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self { retry_after: Some(RETRY_AFTER_SECONDS), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, code, message) }
    }

    /// 503: Postgres is unavailable. Nothing was done.
    pub fn storage_unavailable() -> Self {
        Self::unavailable("database_overloaded", "Storage is unavailable, try again")
    }

    /// 503: this gateway accepts no new work, for this reason.
    pub fn not_ready(reason: &str) -> Self {
        Self::unavailable("not_ready", format!("Not ready: {reason}"))
    }

    /// 503: this gateway closes its sockets and opens none.
    pub fn draining() -> Self {
        Self::unavailable("workspace_busy", "This gateway is draining, try again")
    }

    /// 503 for a read that took too long.
    pub fn request_timeout() -> Self {
        Self::unavailable("request_timeout", "The request took too long")
    }

    /// 503 instead of 423, for the socket of a node in a suspended workspace: clients retry a 503 with the same token
    /// and increasing delays, and some treat any other status as final.
    pub fn socket_suspended() -> Self {
        Self::unavailable("workspace_suspended", "The workspace is suspended")
    }

    /// 503: an operator has drained the node.
    pub fn node_drained() -> Self {
        Self::unavailable("node_drained", "The node is drained")
    }

    /// 503: a limit of connections is reached. Nothing was done.
    pub fn too_many_connections(limit: Limited) -> Self {
        let message = match limit {
            Limited::Process => "Too many connections at this gateway, try again later",
            Limited::Address => "Too many connections from this address: close some, or try again later",
            Limited::Workspace => "Too many connections of this workspace: close some, or try again later",
            Limited::Token => "Too many connections with this token: close some, or try again later",
        };
        Self::unavailable("too_many_connections", message)
    }

    /// 503: request bodies of this workspace or of this gateway take too much memory. Nothing was done.
    pub fn too_many_bodies() -> Self {
        Self::unavailable("workspace_busy", "Too many large requests are in progress, try again")
    }

    /// 429: a rate limit is exceeded. `retry_after` is in seconds.
    pub fn rate_limited(retry_after: u16) -> Self {
        let error =
            Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", "Rate limit exceeded, try again later");
        Self { retry_after: Some(retry_after), ..error }
    }

    /// Closes the connection instead of sending a status. For a change that may have been committed: clients repeat a
    /// request after a 5xx.
    pub fn drop_connection() -> Self {
        Self { drops_connection: true, ..Self::internal() }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = Json(Failure::new(self.code, &self.message));
        let mut response = (self.status, body).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.drops_connection {
            response.extensions_mut().insert(DropConnection);
        }
        response
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Unavailable(_) => {
                tracing::warn!(error = &error as &dyn Error, "request refused");
                Self::storage_unavailable()
            }
            EngineError::CommitUnavailable => Self::storage_unavailable(),
            EngineError::Overloaded => Self::unavailable("workspace_busy", "Too many requests are waiting, try again"),
            EngineError::OutcomeUnknown => {
                tracing::error!(error = &error as &dyn Error, "connection closed without a status");
                Self::drop_connection()
            }
            EngineError::Internal(_) => {
                tracing::error!(error = &error as &dyn Error, "request failed");
                Self::internal()
            }
            EngineError::DependencyUnavailable(dependency) => dependency.into(),
            EngineError::Unauthenticated(credential) => credential.into(),
            EngineError::TooManyUnknownTokens { retry_after } => Self {
                message: "Too many unknown tokens from this address, try again later".into(),
                ..Self::rate_limited(retry_after)
            },
            EngineError::WorkspaceSuspended => {
                Self::new(StatusCode::LOCKED, "workspace_suspended", "The workspace is suspended")
            }
            EngineError::Forbidden(denial) => {
                let (code, message) = denial_text(denial);
                Self::new(StatusCode::FORBIDDEN, code, message)
            }
            EngineError::Invalid(input) => {
                let (code, message) = invalid_text(input);
                Self::new(StatusCode::BAD_REQUEST, code, message)
            }
            EngineError::NotFound(object) => {
                let (code, message) = missing_text(object);
                Self::new(StatusCode::NOT_FOUND, code, message)
            }
            EngineError::Conflict(conflict) => {
                let (code, message) = conflict_text(conflict);
                Self::new(StatusCode::CONFLICT, code, message)
            }
            EngineError::LimitExceeded(limit) => limit.into(),
            EngineError::TooLarge(content) => {
                let message = match content {
                    TooLarge::Message => "The message is too large to be delivered".into(),
                    TooLarge::File { max_bytes } => Cow::from(format!("A file has at most {max_bytes} bytes")),
                };
                Self::new(StatusCode::PAYLOAD_TOO_LARGE, "payload_too_large", message)
            }
        }
    }
}

impl From<Dependency> for ApiError {
    fn from(dependency: Dependency) -> Self {
        match dependency {
            Dependency::Issuer => {
                Self::unavailable("identity_provider_unavailable", "The identity provider is unavailable, try again")
            }
            Dependency::FileStorage(error) => {
                tracing::warn!(error = &error as &dyn Error, "request refused");
                Self::unavailable("workspace_storage_unavailable", "The storage of files is unavailable, try again")
            }
            Dependency::AgentHost(name) => {
                Self::unavailable("agent_host_unavailable", format!("The node of agent \"{name}\" cannot be reached"))
            }
            Dependency::Handler(reason) => {
                Self::unavailable("handler_unavailable", format!("No handler is available now ({reason})"))
            }
        }
    }
}

impl From<BadCredential> for ApiError {
    fn from(credential: BadCredential) -> Self {
        let (code, message) = match credential {
            BadCredential::TokenFormat => ("unauthorized", "Invalid token format"),
            BadCredential::UnknownToken { kind } => match kind {
                TokenKind::Workspace => ("unauthorized", "Invalid API key"),
                TokenKind::Agent => ("agent_token_invalid", "Invalid agent token"),
                TokenKind::Node => ("node_token_invalid", "Invalid node token"),
                TokenKind::Observer => ("observer_token_invalid", "Invalid observer token"),
                TokenKind::Webhook => ("webhook_token_invalid", "Invalid webhook token"),
            },
            BadCredential::WorkspaceExpired => ("workspace_expired", "The workspace has expired: create a new one"),
            BadCredential::NotForObserving { kind: TokenKind::Node } => return Self::node_token_forbidden(),
            BadCredential::NotForObserving { .. } => {
                ("unauthorized", "Workspace key or observer token required for this endpoint")
            }
            BadCredential::NotAnOperator => ("unauthorized", "Operator credentials required"),
            BadCredential::HostedInstallation => (
                "workspace_create_bootstrap_secret_invalid",
                "Workspaces are created by the operator of this installation",
            ),
            BadCredential::WebhookTokenRequired => ("webhook_token_required", "Webhook token required"),
        };
        Self::new(StatusCode::UNAUTHORIZED, code, message)
    }
}

impl From<Limit> for ApiError {
    fn from(limit: Limit) -> Self {
        let too_many = |code, message: Cow<'static, str>| Self::new(StatusCode::TOO_MANY_REQUESTS, code, message);
        match limit {
            Limit::Quota(quota) => too_many(
                "plan_limit_exceeded",
                format!("The plan of this workspace allows no more {}", quota.as_str()).into(),
            ),
            Limit::Actions => too_many("too_many_actions", "The workspace has too many actions".into()),
            Limit::ObserverTokensPerDay => too_many(
                "too_many_observer_tokens",
                "The workspace has created too many observer tokens within a day: change or rotate those it has".into(),
            ),
            Limit::Invocations(of) => Self {
                retry_after: Some(RETRY_AFTER_SECONDS),
                ..too_many("too_many_invocations", format!("Too many invocations of {of} are open").into())
            },
        }
    }
}

#[cfg(test)]
impl ApiError {
    pub fn status_and_code(&self) -> (u16, &'static str) {
        (self.status.as_u16(), self.code)
    }
}

#[cfg(test)]
mod tests;
