//! Request and response bodies of the agent routes. Main types: [`RegisterAgentBody`], [`Agent`], [`AgentDetails`].

pub mod session_event;
pub mod spawn;

use relay_domain::access::rights::{RightChanges, RightSettings};
use relay_domain::agents::AgentKind;
use relay_domain::{AgentId, ChannelId, WorkspaceId};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::{IntoParams, ToSchema};

use crate::{
    field::{Id, Timestamp, present},
    rights::Rights,
    words,
};

/// Body of `POST /v1/agents`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct RegisterAgentBody {
    /// Name of the agent.
    pub name: String,
    /// Type of the agent; `agent` by default.
    #[serde(default, rename = "type")]
    pub kind: Option<AgentType>,
    /// Persona: a description of the agent.
    #[serde(default)]
    pub persona: Option<String>,
    /// Free-form data of clients.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
    /// Free-form capabilities of the agent.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub capabilities: Option<Map<String, Value>>,
    /// Skills of the agent.
    #[serde(default)]
    pub skills: Option<Vec<Skill>>,
    /// `true` (default): the agent joins `general`.
    #[serde(default)]
    pub auto_join_general: Option<bool>,
    /// Prefix of the machine in the agent's address while it is on its own node.
    #[serde(default)]
    pub direct_machine_prefix: Option<String>,
}

/// Type of an agent.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the words are the documentation")]
pub enum AgentType {
    Agent,
    Human,
    System,
}

impl From<AgentKind> for AgentType {
    fn from(kind: AgentKind) -> Self {
        match kind {
            AgentKind::Agent => Self::Agent,
            AgentKind::Human => Self::Human,
            AgentKind::System => Self::System,
        }
    }
}

/// Skill of an agent.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Skill {
    /// Id of the skill.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Name of the skill.
    pub name: String,
    /// Description of the skill.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Search terms for the skill.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tags: Option<Vec<String>>,
    /// Free-form data of clients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Value>,
}

/// Response of `POST /v1/agents`.
#[derive(Debug, Serialize, ToSchema)]
pub struct RegisteredAgent {
    /// Id of the agent.
    #[schema(value_type = Id)]
    pub id: AgentId,
    /// Id of the workspace.
    #[schema(value_type = Id)]
    pub workspace_id: WorkspaceId,
    /// Name of the agent.
    pub name: String,
    /// The name as a mention, `@name`.
    pub handle: String,
    /// Address, `name@machine`.
    #[schema(example = "ada@direct")]
    pub address: String,
    /// Bearer token, shown only in this response.
    pub token: String,
    /// Always `online`.
    #[schema(value_type = words::Availability)]
    pub status: &'static str,
    /// Free-form capabilities of the agent.
    #[schema(value_type = Option<Object>)]
    pub capabilities: Option<Value>,
    /// Time of creation.
    pub created_at: Timestamp,
}

/// Agent, as returned by lists, `GET` and `PATCH`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Agent {
    /// Id of the agent.
    #[schema(value_type = Id)]
    pub id: AgentId,
    /// Id of the workspace.
    #[schema(value_type = Id)]
    pub workspace_id: WorkspaceId,
    /// Name of the agent.
    pub name: String,
    /// `@name`.
    pub handle: String,
    /// Address, `name@machine`: the name of its node, or the machine of its own one.
    #[schema(example = "ada@build-box")]
    pub address: String,
    /// agent, human or system.
    #[serde(rename = "type")]
    #[schema(value_type = AgentType)]
    pub kind: &'static str,
    /// `online` or `offline`, the values that every published client accepts.
    #[schema(value_type = words::Availability)]
    pub status: &'static str,
    /// active, idle, blocked, waiting or offline.
    #[schema(value_type = words::Activity)]
    pub activity_status: &'static str,
    /// Persona: a description of the agent.
    pub persona: Option<String>,
    /// Free-form capabilities of the agent.
    #[schema(value_type = Option<Object>)]
    pub capabilities: Option<Value>,
    /// Free-form data of clients.
    #[schema(value_type = Object)]
    pub metadata: Value,
    /// Time of creation.
    pub created_at: Timestamp,
    /// Time of the last sign of life.
    pub last_seen: Timestamp,
    /// Always empty; strict clients require the field.
    pub token_hash: &'static str,
    /// Id of the agent that spawned it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Id>, nullable = false)]
    pub spawned_by: Option<AgentId>,
    /// Rights that deviate from the workspace's policy.
    #[serde(skip_serializing_if = "RightSettings::is_empty")]
    #[schema(value_type = Option<Rights>, nullable = false)]
    pub rights: RightSettings,
}

/// Response of `GET /v1/agent` and `GET /v1/agents/:name`.
#[derive(Debug, Serialize, ToSchema)]
pub struct AgentDetails {
    /// The agent itself.
    #[serde(flatten)]
    pub agent: Agent,
    /// Channels that the agent is a member of.
    pub channels: Vec<AgentChannel>,
    /// Names of the actions that the agent handles. Both lists together have at most 1000 names, these first.
    #[schema(example = json!(["build"]))]
    pub actions_provided: Vec<String>,
    /// Names of the actions that the agent may invoke. Another agent sees only those of both lists that it may invoke
    /// or handles itself.
    #[schema(example = json!(["build", "test"]))]
    pub actions_available_to: Vec<String>,
    /// Oldest unsettled deliveries of the agent.
    pub pending_deliveries: Vec<PendingDelivery>,
}

/// Channel of an agent.
#[derive(Debug, Serialize, ToSchema)]
pub struct AgentChannel {
    /// Id of the channel.
    #[schema(value_type = Id)]
    pub id: ChannelId,
    /// Name of the channel.
    pub name: String,
    /// owner or member.
    #[schema(value_type = words::Role)]
    pub role: &'static str,
    /// Time of joining.
    pub joined_at: Timestamp,
}

/// Unsettled delivery of an agent.
#[derive(Debug, Serialize, ToSchema)]
pub struct PendingDelivery {
    /// Id of the delivery.
    pub id: String,
    /// Id of the message.
    pub message_id: String,
    /// immediate or next-tool-call.
    #[schema(value_type = words::DeliveryMode)]
    pub mode: &'static str,
    /// Reason of the delivery, or the reason for which it was deferred.
    pub reason: Option<String>,
    /// State of the delivery.
    #[schema(value_type = words::DeliveryStatus)]
    pub status: &'static str,
    /// Time of acceptance.
    pub created_at: Timestamp,
}

/// Body of `POST /v1/agents/disconnect`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct DisconnectBody {
    /// Whether the agent also leaves the node that it is bound to, which frees its place there.
    #[serde(default)]
    pub deregister: Option<bool>,
}

/// Body of `PATCH /v1/agents/:name`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct UpdateAgentBody {
    /// Activity: active, idle, blocked, waiting or offline; online and away are accepted.
    #[serde(default)]
    #[schema(example = "idle")]
    pub status: Option<String>,
    /// Persona: a description of the agent; null clears it.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>)]
    pub persona: Option<Option<String>>,
    /// Merged into the stored metadata key by key.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
    /// Free-form capabilities of the agent; null clears them.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<Object>)]
    pub capabilities: Option<Option<Map<String, Value>>>,
    /// Skills of the agent.
    #[serde(default)]
    pub skills: Option<Vec<Skill>>,
    /// Rights that deviate from the workspace's policy, merged key by key; null of a right removes its deviation, null
    /// removes all of them.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<Rights>)]
    pub rights: Option<Option<RightChanges>>,
}

/// Response of `POST /v1/agents/:name/rotate-token`.
#[derive(Debug, Serialize, ToSchema)]
pub struct RotatedToken {
    /// Name of the agent.
    pub name: String,
    /// New bearer token, shown only in this response.
    pub token: String,
}

/// Entry of `GET /v1/agents/presence`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Presence {
    /// Id of the agent.
    #[schema(value_type = Id)]
    pub agent_id: AgentId,
    /// Name of the agent.
    pub agent_name: String,
    /// online or offline.
    #[schema(value_type = words::Availability)]
    pub status: &'static str,
}

/// Query of `GET /v1/agents`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct AgentsQuery {
    /// Status filter; absent or `all` lists every agent.
    #[serde(default)]
    pub status: Option<String>,
}
