//! Codes and messages of the errors that share a status, by their subject.

use std::borrow::Cow;

use relay_domain::access::rights::Refusal;
use relay_engine::error::{Conflict, Denial, InvalidInput, Missing};

/// Code and message of a 403.
pub(super) fn denial_text(denial: Denial) -> (&'static str, Cow<'static, str>) {
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
pub(super) fn invalid_text(input: InvalidInput) -> (&'static str, Cow<'static, str>) {
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
pub(super) fn missing_text(object: Missing) -> (&'static str, Cow<'static, str>) {
    match object {
        Missing::Workspace => ("workspace_not_found", "Workspace not found".into()),
        Missing::Agent(name) => ("agent_not_found", format!("Agent \"{name}\" not found").into()),
        Missing::Node(name) => ("node_not_found", format!("Node \"{name}\" not found").into()),
        Missing::NodeAgentBinding { agent, node } => {
            ("node_agent_binding_not_found", format!("Agent \"{agent}\" is not bound to node \"{node}\"").into())
        }
        Missing::Address => ("address_not_found", "No agent has that address".into()),
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
pub(super) fn conflict_text(conflict: Conflict) -> (&'static str, Cow<'static, str>) {
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
