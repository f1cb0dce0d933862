//! HTTP errors: the only place that assigns statuses and codes.
//!
//! [`ApiError`] is the error of every handler and extractor; engine errors convert into it.

use std::{borrow::Cow, error::Error, fmt};

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header::RETRY_AFTER},
    response::{IntoResponse, Response},
};
use relay_domain::access::{rights::Refusal, token::TokenKind};
use relay_engine::{
    EngineError,
    error::{BadCredential, Conflict, Denial, Dependency, InvalidInput, Limit, Missing, TooLarge},
};
use relay_wire::{
    envelope::Failure,
    messages::batch::{PostError, PostOutcome},
};

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
    /// Creates an error with a stable code and a text for people.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
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

    /// 401 with a code.
    pub fn unauthorized(code: &'static str, message: &'static str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, code, message)
    }

    /// 401 for a node token on a route that does not accept it.
    pub fn node_token_forbidden() -> Self {
        Self::unauthorized("node_token_forbidden", "Node tokens are not allowed here")
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

    /// 500 without details.
    pub fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", "Internal error")
    }

    /// 503: nothing was done, and the client may retry.
    pub fn unavailable(code: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self { retry_after: Some(RETRY_AFTER_SECONDS), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, code, message) }
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
                Self::unavailable("database_overloaded", "Storage is unavailable, try again")
            }
            EngineError::CommitUnavailable => {
                Self::unavailable("database_overloaded", "Storage is unavailable, try again")
            }
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
                Self::unavailable("identity_provider_unavailable", "The identity provider does not answer, try again")
            }
            Dependency::FileStorage(error) => {
                tracing::warn!(error = &error as &dyn Error, "request refused");
                Self::unavailable("workspace_storage_unavailable", "The storage of files is unavailable, try again")
            }
            Dependency::AgentHost(name) => {
                Self::unavailable("agent_host_unavailable", format!("The node of agent \"{name}\" cannot be reached"))
            }
            Dependency::Handler(reason) => {
                Self::unavailable("handler_unavailable", format!("Nobody can do this now ({reason})"))
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
        Self::unauthorized(code, message)
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

/// Code and message of a 403.
fn denial_text(denial: Denial) -> (&'static str, Cow<'static, str>) {
    match denial {
        Denial::AgentTokenRequired => ("agent_token_required", "Agent token required".into()),
        Denial::InsufficientScope(scope) => ("insufficient_scope", format!("The token lacks the scope {scope}").into()),
        Denial::AgentRecovery => ("agent_recovery_not_authorized", "Agent recovery is not authorized".into()),
        Denial::NotAMember(name) => ("not_a_member", format!("Not a member of channel \"{name}\"").into()),
        Denial::NodeIdMismatch => ("node_id_mismatch", "node_id is not the node of this token".into()),
        Denial::FileComplete => ("forbidden", "The file is complete and does not change any more".into()),
        Denial::NotFileOwner => ("forbidden", "Only the agent that uploaded a file may do this".into()),
        Denial::FileToken => ("forbidden", "The file address is invalid or has expired".into()),
        Denial::NotOwnSession => ("forbidden", "An agent reports events of its own session only".into()),
        Denial::NotAuthor => ("forbidden", "Only its author may change a message".into()),
        Denial::OnlyRecipient => {
            ("forbidden", "A subscription channel belongs to one agent, and no other is its member".into())
        }
        Denial::NotAParticipant => ("forbidden", "Not a participant of this conversation".into()),
        Denial::Refused(refusal) => (refusal.code(), refusal_text(refusal).into()),
        Denial::ActionDenied(name) => ("action_denied", format!("You may not invoke \"{name}\"").into()),
        Denial::NodeOwnedInvocation => {
            ("node_owned_invocation", "A node handles this invocation and ends it over its socket".into())
        }
    }
}

/// Message of a 403 that follows from rights.
const fn refusal_text(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::Send => "This agent may not send messages",
        Refusal::Join => "This agent may not join or create channels",
        Refusal::Spawn => "This agent may not spawn agents",
        Refusal::Subscribe => "This agent may not subscribe to events",
        Refusal::SubscriptionNotOwn => "Only the agent that created a subscription, or the workspace key, may do this",
        Refusal::CreateTrigger => "This agent may not create triggers",
        Refusal::TriggerNotOwn => "Only the agent that created a trigger, or the workspace key, may do this",
        Refusal::DefineAction => "This agent may not define actions",
        Refusal::NotHandler => "Only the agent that handles it may do this",
        Refusal::Release => "This agent may not release agents",
        Refusal::NotSpawnedByCaller => {
            "An agent ends itself and the agents that it spawned; use the workspace key for others"
        }
        Refusal::InvocationNotOwn => "Only caller and handler of an invocation, or the workspace key, may read it",
        Refusal::PostThroughNode => "This node may not post for that agent",
    }
}

/// Code and message of a 400.
fn invalid_text(input: InvalidInput) -> (&'static str, Cow<'static, str>) {
    match input {
        InvalidInput::Text(invalid) => ("invalid_request", invalid.to_string().into()),
        InvalidInput::Request(message) => ("invalid_request", message.into()),
        InvalidInput::IdempotencyKey => {
            ("invalid_idempotency_key", "Idempotency-Key must be 1 to 255 visible ASCII characters".into())
        }
        InvalidInput::CreationKeyTooWeak => (
            "workspace_create_idempotency_key_too_weak",
            "An anonymous Idempotency-Key must have at least 32 characters".into(),
        ),
        InvalidInput::ChannelName => (
            "invalid_channel_name",
            "A channel name has 1 to 80 lower-case letters, digits and hyphens, and starts with no hyphen".into(),
        ),
        InvalidInput::ChannelArchived(name) => ("channel_archived", format!("Channel \"{name}\" is archived").into()),
        InvalidInput::ArchivedGeneral => ("cannot_archive_general", "The general channel cannot be archived".into()),
        InvalidInput::FromRequired => ("from_required", "from is required: the agent that the node posts for".into()),
        InvalidInput::FromNotAllowed => ("from_not_allowed", "from is for node tokens only".into()),
        InvalidInput::Attachments => {
            ("invalid_attachments", "Attachments must be complete files, each named once".into())
        }
        InvalidInput::PlacementSelfRequiresAgent => {
            ("placement_self_requires_agent", "Only an agent can be placed beside itself".into())
        }
        InvalidInput::EventType => {
            ("invalid_event_type", "type must be two words with a dot between: word.word".into())
        }
        InvalidInput::Address => ("invalid_address", "An address is name@machine".into()),
        InvalidInput::AmbiguousAddress => {
            ("ambiguous_address", "The address names one node, and the machine of others".into())
        }
        InvalidInput::ActionHandler => {
            ("invalid_action_handler", "An action has one handler: handler_agent or handler_node".into())
        }
        InvalidInput::SchemaTooComplex(problem) => ("schema_too_complex", problem.into()),
        InvalidInput::ActionInput { path, message } => {
            ("invalid_action_input", format!("input{path}: {message}").into())
        }
        InvalidInput::NodeName => (
            "invalid_node_name",
            "A node name has 1 to 128 bytes on one line, no # but a leading one, and is neither \"direct\" nor that of an agent's own node".into(),
        ),
        InvalidInput::NodeKindIsFixed { node, kind } => {
            ("invalid_node_delivery", format!("Node \"{node}\" is of kind {}, and stays so", kind.as_str()).into())
        }
        InvalidInput::UnsafeDeliveryUrl(reason) => {
            ("unsafe_node_delivery_url", format!("delivery.url: {reason}").into())
        }
        InvalidInput::NodeDelivery(reason) => ("invalid_node_delivery", reason.into()),
        InvalidInput::DirectNodeCapacity => {
            ("direct_node_capacity_exceeded", "A direct node has exactly one agent: max_agents must be 1".into())
        }
    }
}

/// Code and message of a 404.
fn missing_text(object: Missing) -> (&'static str, Cow<'static, str>) {
    match object {
        Missing::Workspace => ("workspace_not_found", "Workspace not found".into()),
        Missing::Agent(name) => ("agent_not_found", format!("Agent \"{name}\" not found").into()),
        Missing::Node(name) => ("node_not_found", format!("Node \"{name}\" not found").into()),
        Missing::NodeAgentBinding { agent, node } => {
            ("node_agent_binding_not_found", format!("Agent \"{agent}\" is not bound to node \"{node}\"").into())
        }
        Missing::Address => ("address_not_found", "Nobody is at that address".into()),
        Missing::Channel(name) => ("channel_not_found", format!("Channel \"{name}\" not found").into()),
        Missing::Conversation => ("dm_conversation_not_found", "Conversation not found".into()),
        Missing::Message => ("message_not_found", "Message not found".into()),
        Missing::Delivery => ("delivery_not_found", "Delivery not found".into()),
        Missing::Redrive => ("redrive_not_found", "Redrive not found".into()),
        Missing::Action => ("action_not_found", "Action not found".into()),
        Missing::Invocation => ("invocation_not_found", "Invocation not found".into()),
        Missing::Trigger => ("trigger_not_found", "Trigger not found".into()),
        Missing::Webhook => ("webhook_not_found", "Webhook not found".into()),
        Missing::Subscription => ("subscription_not_found", "Subscription not found".into()),
        Missing::File => ("file_not_found", "File not found".into()),
        Missing::ObserverToken => ("observer_token_not_found", "Observer token not found".into()),
        Missing::SigningKey => ("signing_key_not_found", "Signing key not found".into()),
    }
}

/// Code and message of a 409.
fn conflict_text(conflict: Conflict) -> (&'static str, Cow<'static, str>) {
    match conflict {
        Conflict::IdempotencyKeyReused => {
            ("idempotency_key_reused", "Idempotency-Key was used with a different request".into())
        }
        Conflict::IdempotencyInProgress => {
            ("idempotency_in_progress", "A request with this Idempotency-Key is in progress".into())
        }
        Conflict::CreationKeyReused => (
            "workspace_create_idempotency_conflict",
            "Idempotency-Key was used to create a workspace with a different request".into(),
        ),
        Conflict::CreationKeyTerminalized => (
            "workspace_create_idempotency_terminalized",
            "The workspace created with this Idempotency-Key no longer exists".into(),
        ),
        Conflict::ObserverTokenName(name) => {
            ("observer_token_name_conflict", format!("An active observer token is called \"{name}\"").into())
        }
        Conflict::SigningKeyInUse => {
            ("signing_key_in_use", "The newest signing key cannot be retired: rotate first".into())
        }
        Conflict::TooManySigningKeys => ("too_many_signing_keys", "Retire a signing key first".into()),
        Conflict::AgentExists(name) => ("agent_already_exists", format!("Agent \"{name}\" already exists").into()),
        Conflict::ChannelExists(name) => {
            ("channel_already_exists", format!("Channel \"{name}\" already exists").into())
        }
        Conflict::UploadIncomplete => ("upload_incomplete", "The bytes of the file have not been uploaded".into()),
        Conflict::PlacementSelfUnavailable => {
            ("placement_self_unavailable", "The caller runs on no node that brings agents up".into())
        }
        Conflict::ReleaseGeneration => {
            ("agent_release_generation_conflict", "The agent has another token by now".into())
        }
        Conflict::TooManyTriggers => ("too_many_triggers", "The workspace has as many triggers as it may".into()),
        Conflict::NotRedrivable(reason) => {
            ("delivery_not_redrivable", format!("The dead letter cannot be redriven: {reason}").into())
        }
        Conflict::ActionName(name) => {
            ("action_name_conflict", format!("The action name \"{name}\" is taken or reserved").into())
        }
        Conflict::CapabilityMismatch { node, capability } => {
            ("capability_mismatch", format!("Node \"{node}\" lacks the capability \"{capability}\"").into())
        }
        Conflict::NodeName(name) => ("node_name_conflict", format!("Another node is called \"{name}\"").into()),
        Conflict::NotPolled => (
            "agent_location_conflict",
            "Deliveries are claimed by agents on nodes of kind poll; those of others are brought to them".into(),
        ),
        Conflict::NodeCapacity { node, max_agents } => {
            ("node_capacity_exceeded", format!("Node \"{node}\" takes no more than {max_agents} agents").into())
        }
        Conflict::ProviderInstance => ("provider_instance_conflict", "Another instance serves this provider".into()),
        Conflict::Superseded => ("node_control_failed", "This connection has been superseded".into()),
        Conflict::AgentIdentityMismatch(name) => {
            ("agent_identity_mismatch", format!("Agent \"{name}\" does not have that id").into())
        }
        Conflict::AgentLocation(name) => {
            ("agent_location_conflict", format!("Agent \"{name}\" is hosted by another node").into())
        }
        Conflict::AgentProvider(name) => {
            ("agent_provider_conflict", format!("Agent \"{name}\" is hosted by another provider of this node").into())
        }
        Conflict::AgentBoundToNode(node) => {
            ("agent_bound_to_node", format!("Agent is bound to node \"{node}\"").into())
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
