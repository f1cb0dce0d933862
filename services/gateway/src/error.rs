//! HTTP errors: the only place that assigns statuses and codes.
//!
//! [`ApiError`] is the error of every handler and extractor; engine errors convert into it.

use std::{borrow::Cow, error::Error};

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header::RETRY_AFTER},
    response::{IntoResponse, Response},
};
use relay_domain::access::token::TokenKind;
use relay_engine::EngineError;
use relay_wire::envelope::Failure;

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

/// Marks a response that must not be sent: the connection is closed instead (see `middleware`).
#[derive(Debug, Clone, Copy)]
pub struct DropConnection;

impl ApiError {
    /// Creates an error with a stable code and a text for people.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self { status, code, message: message.into(), retry_after: None, drops_connection: false }
    }

    /// Returns code and text, for an `error` frame.
    pub fn code_and_message(&self) -> (&str, &str) {
        (self.code, &self.message)
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
        use EngineError as E;
        let bad = |code, message: &'static str| Self::new(StatusCode::BAD_REQUEST, code, message);
        let forbidden = |code, message: &'static str| Self::new(StatusCode::FORBIDDEN, code, message);
        let missing = |code, message: String| Self::new(StatusCode::NOT_FOUND, code, message);
        let conflict = |code, message: &'static str| Self::new(StatusCode::CONFLICT, code, message);
        match error {
            E::Unavailable(_) => {
                tracing::warn!(error = &error as &dyn Error, "request refused");
                Self::unavailable("database_overloaded", "Storage is unavailable, try again")
            }
            E::CommitUnavailable => Self::unavailable("database_overloaded", "Storage is unavailable, try again"),
            E::Overloaded => Self::unavailable("workspace_busy", "Too many requests are waiting, try again"),
            E::FileBytesMissing
            | E::SealedWithUnknownKey { .. }
            | E::Store(_)
            | E::CommitRefused
            | E::Stream(_)
            | E::NoRandomness
            | E::NoWorkerNumber => {
                tracing::error!(error = &error as &dyn Error, "request failed");
                Self::internal()
            }
            E::OutcomeUnknown => {
                tracing::error!(error = &error as &dyn Error, "connection closed without a status");
                Self::drop_connection()
            }

            E::InvalidTokenFormat => Self::unauthorized("unauthorized", "Invalid token format"),
            E::UnknownToken { kind } => match kind {
                TokenKind::Workspace => Self::unauthorized("unauthorized", "Invalid API key"),
                TokenKind::Agent => Self::unauthorized("agent_token_invalid", "Invalid agent token"),
                TokenKind::Node => Self::unauthorized("node_token_invalid", "Invalid node token"),
                TokenKind::Observer => Self::unauthorized("observer_token_invalid", "Invalid observer token"),
                TokenKind::Webhook => Self::unauthorized("webhook_token_invalid", "Invalid webhook token"),
            },
            E::WorkspaceSuspended => Self::new(StatusCode::LOCKED, "workspace_suspended", "The workspace is suspended"),
            E::NotForObserving { kind: TokenKind::Node } => Self::node_token_forbidden(),
            E::NotForObserving { .. } => {
                Self::unauthorized("unauthorized", "Workspace key or observer token required for this endpoint")
            }
            E::ObserverTokenNotFound => missing("observer_token_not_found", "Observer token not found".to_owned()),
            E::ObserverTokenNameConflict(name) => Self::new(
                StatusCode::CONFLICT,
                "observer_token_name_conflict",
                format!("An active observer token is called \"{name}\""),
            ),
            E::NotAnOperator => Self::unauthorized("unauthorized", "Operator credentials required"),
            E::HostedInstallation => Self::unauthorized(
                "workspace_create_bootstrap_secret_invalid",
                "Workspaces are created by the operator of this installation",
            ),
            E::IssuerUnavailable => {
                Self::unavailable("identity_provider_unavailable", "The identity provider does not answer, try again")
            }
            E::SigningKeyNotFound => missing("signing_key_not_found", "Signing key not found".to_owned()),
            E::SigningKeyInUse => {
                conflict("signing_key_in_use", "The newest signing key cannot be retired: rotate first")
            }
            E::TooManySigningKeys => conflict("too_many_signing_keys", "Retire a signing key first"),
            E::AgentTokenRequired => forbidden("agent_token_required", "Agent token required"),

            E::InsufficientScope(scope) => {
                Self::new(StatusCode::FORBIDDEN, "insufficient_scope", format!("The token lacks the scope {scope}"))
            }
            E::PlanLimitExceeded(ceiling) => Self::new(
                StatusCode::TOO_MANY_REQUESTS,
                "plan_limit_exceeded",
                format!("The plan of this workspace allows no more {}", ceiling.as_str()),
            ),

            E::InvalidText(invalid) => Self::invalid_request(invalid.to_string()),
            E::InvalidRequest(message) => Self::invalid_request(message),

            E::InvalidIdempotencyKey => {
                bad("invalid_idempotency_key", "Idempotency-Key must be 1 to 255 visible ASCII characters")
            }
            E::IdempotencyKeyReused => {
                conflict("idempotency_key_reused", "Idempotency-Key was used with a different request")
            }
            E::IdempotencyInProgress => {
                conflict("idempotency_in_progress", "A request with this Idempotency-Key is in progress")
            }
            E::CreationKeyTooWeak => bad(
                "workspace_create_idempotency_key_too_weak",
                "An anonymous Idempotency-Key must have at least 32 characters",
            ),
            E::CreationKeyConflict => conflict(
                "workspace_create_idempotency_conflict",
                "Idempotency-Key was used to create a workspace with a different request",
            ),
            E::CreationKeyTerminalized => conflict(
                "workspace_create_idempotency_terminalized",
                "The workspace created with this Idempotency-Key no longer exists",
            ),

            E::WorkspaceNotFound => missing("workspace_not_found", "Workspace not found".to_owned()),
            E::AgentNotFound(name) => missing("agent_not_found", format!("Agent \"{name}\" not found")),
            E::AgentAlreadyExists(name) => {
                Self::new(StatusCode::CONFLICT, "agent_already_exists", format!("Agent \"{name}\" already exists"))
            }
            E::AgentRecoveryNotAuthorized => {
                forbidden("agent_recovery_not_authorized", "Agent recovery is not authorized")
            }

            E::ChannelNotFound(name) => missing("channel_not_found", format!("Channel \"{name}\" not found")),
            E::ChannelAlreadyExists(name) => {
                Self::new(StatusCode::CONFLICT, "channel_already_exists", format!("Channel \"{name}\" already exists"))
            }
            E::InvalidChannelName => bad(
                "invalid_channel_name",
                "A channel name has 1 to 80 lower-case letters, digits and hyphens, and starts with no hyphen",
            ),
            E::ChannelArchived(name) => {
                Self::new(StatusCode::BAD_REQUEST, "channel_archived", format!("Channel \"{name}\" is archived"))
            }
            E::CannotArchiveGeneral => bad("cannot_archive_general", "The general channel cannot be archived"),
            E::NotAMember(name) => {
                Self::new(StatusCode::FORBIDDEN, "not_a_member", format!("Not a member of channel \"{name}\""))
            }

            E::NodeIdMismatch => forbidden("node_id_mismatch", "node_id is not the node of this token"),
            E::FromRequired => bad("from_required", "from is required: the agent that the node posts for"),
            E::FromNotAllowed => bad("from_not_allowed", "from is for node tokens only"),
            E::InvalidAttachments => bad("invalid_attachments", "Attachments must be complete files, each named once"),
            E::FileNotFound => missing("file_not_found", "File not found".to_owned()),
            E::UploadIncomplete => conflict("upload_incomplete", "The bytes of the file have not been uploaded"),
            E::FileComplete => forbidden("forbidden", "The file is complete and does not change any more"),
            E::NotFileOwner => forbidden("forbidden", "Only the agent that uploaded a file may do this"),
            E::FileTooLarge { max_bytes } => Self::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                "payload_too_large",
                format!("A file has at most {max_bytes} bytes"),
            ),
            E::InvalidFileToken => forbidden("forbidden", "The file address is invalid or has expired"),
            E::FileStorage(_) => {
                tracing::warn!(error = &error as &dyn Error, "request refused");
                Self::unavailable("workspace_storage_unavailable", "The storage of files is unavailable, try again")
            }
            E::WebhookTokenRequired => Self::unauthorized("webhook_token_required", "Webhook token required"),
            E::PlacementSelfRequiresAgent => {
                bad("placement_self_requires_agent", "Only an agent can be placed beside itself")
            }
            E::PlacementSelfUnavailable => {
                conflict("placement_self_unavailable", "The caller runs on no node that brings agents up")
            }
            E::ReleaseGenerationConflict => {
                conflict("agent_release_generation_conflict", "The agent has another token by now")
            }
            E::AgentHostUnavailable(name) => Self {
                retry_after: Some(RETRY_AFTER_SECONDS),
                ..Self::new(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "agent_host_unavailable",
                    format!("The node of agent \"{name}\" cannot be reached"),
                )
            },
            E::TriggerNotFound => missing("trigger_not_found", "Trigger not found".to_owned()),
            E::TooManyTriggers => conflict("too_many_triggers", "The workspace has as many triggers as it may"),
            E::WebhookNotFound => missing("webhook_not_found", "Webhook not found".to_owned()),
            E::SubscriptionNotFound => missing("subscription_not_found", "Subscription not found".to_owned()),
            E::InvalidEventType => bad("invalid_event_type", "type must be two words with a dot between: word.word"),
            E::NotOwnSession => forbidden("forbidden", "An agent reports events of its own session only"),
            E::PayloadTooLarge => Self::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                "payload_too_large",
                "The message is too large to be delivered",
            ),
            E::MessageNotFound => missing("message_not_found", "Message not found".to_owned()),
            E::ConversationNotFound => missing("dm_conversation_not_found", "Conversation not found".to_owned()),
            E::NotTheAuthor => forbidden("forbidden", "Only its author may change a message"),
            E::InvalidAddress => bad("invalid_address", "An address is name@machine"),
            E::AmbiguousAddress => bad("ambiguous_address", "The address names one node, and the machine of others"),
            E::AddressNotFound => missing("address_not_found", "Nobody is at that address".to_owned()),
            E::NotAParticipant => forbidden("forbidden", "Not a participant of this conversation"),
            E::DeliveryNotFound => missing("delivery_not_found", "Delivery not found".to_owned()),

            E::NotRedrivable(why) => Self::new(
                StatusCode::CONFLICT,
                "delivery_not_redrivable",
                format!("The dead letter cannot be redriven: {why}"),
            ),
            E::RedriveNotFound => missing("redrive_not_found", "Redrive not found".to_owned()),

            E::ActionNotFound => missing("action_not_found", "Action not found".to_owned()),
            E::ActionNameConflict(name) => Self::new(
                StatusCode::CONFLICT,
                "action_name_conflict",
                format!("The action name \"{name}\" is taken or reserved"),
            ),
            E::InvalidActionHandler => {
                bad("invalid_action_handler", "An action has one handler: handler_agent or handler_node")
            }
            E::CapabilityMismatch { node, capability } => Self::new(
                StatusCode::CONFLICT,
                "capability_mismatch",
                format!("Node \"{node}\" lacks the capability \"{capability}\""),
            ),
            E::NotTheHandler => forbidden("forbidden", "Only the agent that handles it may do this"),
            E::TooManyActions => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "too_many_actions", "The workspace has too many actions")
            }
            E::ActionDenied(name) => {
                Self::new(StatusCode::FORBIDDEN, "action_denied", format!("You may not invoke \"{name}\""))
            }
            E::InvalidActionInput { path, message } => {
                Self::new(StatusCode::BAD_REQUEST, "invalid_action_input", format!("input{path}: {message}"))
            }
            E::HandlerUnavailable(why) => Self {
                retry_after: Some(RETRY_AFTER_SECONDS),
                ..Self::new(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "handler_unavailable",
                    format!("Nobody can do this now ({why})"),
                )
            },
            E::TooManyInvocations(what) => Self {
                retry_after: Some(RETRY_AFTER_SECONDS),
                ..Self::new(
                    StatusCode::TOO_MANY_REQUESTS,
                    "too_many_invocations",
                    format!("Too many invocations of {what} are open"),
                )
            },
            E::InvocationNotFound => missing("invocation_not_found", "Invocation not found".to_owned()),
            E::NodeOwnedInvocation => {
                forbidden("node_owned_invocation", "A node handles this invocation and ends it over its socket")
            }

            E::NodeNotFound(name) => missing("node_not_found", format!("Node \"{name}\" not found")),
            E::NodeNameConflict(name) => {
                Self::new(StatusCode::CONFLICT, "node_name_conflict", format!("Another node is called \"{name}\""))
            }
            E::InvalidNodeName => bad(
                "invalid_node_name",
                "A node name has 1 to 128 bytes on one line and is not that of an agent's own node",
            ),
            E::NotPolled => conflict(
                "agent_location_conflict",
                "Deliveries are claimed by agents on nodes of kind poll; those of others are brought to them",
            ),
            E::NodeKindIsFixed { node, kind } => Self::new(
                StatusCode::BAD_REQUEST,
                "invalid_node_delivery",
                format!("Node \"{node}\" is of kind {}, and stays so", kind.as_str()),
            ),
            E::UnsafeNodeDeliveryUrl(why) => {
                Self::new(StatusCode::BAD_REQUEST, "unsafe_node_delivery_url", format!("delivery.url: {why}"))
            }
            E::InvalidNodeDelivery(why) => Self::new(StatusCode::BAD_REQUEST, "invalid_node_delivery", why),
            E::DirectNodeCapacity => {
                bad("direct_node_capacity_exceeded", "A direct node has exactly one agent: max_agents must be 1")
            }
            E::NodeCapacityExceeded { node, max_agents } => Self::new(
                StatusCode::CONFLICT,
                "node_capacity_exceeded",
                format!("Node \"{node}\" takes no more than {max_agents} agents"),
            ),
            E::NodeAgentBindingNotFound { agent, node } => {
                missing("node_agent_binding_not_found", format!("Agent \"{agent}\" is not bound to node \"{node}\""))
            }
            E::ProviderInstanceConflict => {
                conflict("provider_instance_conflict", "Another instance serves this provider")
            }
            E::Superseded => conflict("node_control_failed", "This connection has been superseded"),
            E::AgentIdentityMismatch(name) => Self::new(
                StatusCode::CONFLICT,
                "agent_identity_mismatch",
                format!("Agent \"{name}\" does not have that id"),
            ),
            E::AgentLocationConflict(name) => Self::new(
                StatusCode::CONFLICT,
                "agent_location_conflict",
                format!("Agent \"{name}\" is hosted by another node"),
            ),
            E::AgentProviderConflict(name) => Self::new(
                StatusCode::CONFLICT,
                "agent_provider_conflict",
                format!("Agent \"{name}\" is hosted by another provider of this node"),
            ),
            E::AgentIdentityConflict => conflict("agent_identity_conflict", "The agent's identity is another one"),
            E::AgentBoundToNode(node) => {
                Self::new(StatusCode::CONFLICT, "agent_bound_to_node", format!("Agent is bound to node \"{node}\""))
            }
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
mod tests {
    use super::*;

    #[test]
    fn codes_and_messages_that_clients_depend_on() {
        let table = [
            (EngineError::InvalidTokenFormat, 401, "unauthorized", "Invalid token format"),
            (EngineError::UnknownToken { kind: TokenKind::Workspace }, 401, "unauthorized", "Invalid API key"),
            (EngineError::UnknownToken { kind: TokenKind::Agent }, 401, "agent_token_invalid", "Invalid agent token"),
            (EngineError::AgentTokenRequired, 403, "agent_token_required", "Agent token required"),
            (EngineError::AgentAlreadyExists("a".into()), 409, "agent_already_exists", "Agent \"a\" already exists"),
            (EngineError::ChannelNotFound("c".into()), 404, "channel_not_found", "Channel \"c\" not found"),
            (EngineError::CommitUnavailable, 503, "database_overloaded", "Storage is unavailable, try again"),
        ];
        for (error, status, code, message) in table {
            let error = ApiError::from(error);
            assert_eq!((error.status.as_u16(), error.code, &*error.message), (status, code, message));
        }
    }

    #[test]
    fn an_unknown_commit_outcome_gets_no_status() {
        assert!(
            ApiError::from(EngineError::OutcomeUnknown).into_response().extensions().get::<DropConnection>().is_some()
        );
    }

    #[test]
    fn an_outage_sets_retry_after() {
        let response = ApiError::from(EngineError::CommitUnavailable).into_response();
        assert_eq!(response.headers()[RETRY_AFTER], "1");
    }
}
