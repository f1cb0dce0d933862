//! Bodies of the agent routes.

use relay_domain::{AgentId, ChannelId, WorkspaceId};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::{IntoParams, ToSchema};

use crate::{
    field::{Id, Timestamp, present},
    words,
};

/// `POST /v1/agents`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct RegisterAgentBody {
    /// The name.
    pub name: String,
    /// What it is; `agent` when absent.
    #[serde(default, rename = "type")]
    pub kind: Option<AgentType>,
    /// Who it is.
    #[serde(default)]
    pub persona: Option<String>,
    /// What clients keep there.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
    /// What it can do.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub capabilities: Option<Map<String, Value>>,
    /// What it is good at.
    #[serde(default)]
    pub skills: Option<Vec<Skill>>,
    /// Whether it joins `general`; yes when absent.
    #[serde(default)]
    pub auto_join_general: Option<bool>,
}

/// What an agent is.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the words are the documentation")]
pub enum AgentType {
    Agent,
    Human,
    System,
}

/// Something that an agent is good at.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Skill {
    /// Its id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Its name.
    pub name: String,
    /// What it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Words to find it by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tags: Option<Vec<String>>,
    /// What clients keep there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Value>,
}

/// Answer to `POST /v1/agents`.
#[derive(Debug, Serialize, ToSchema)]
pub struct RegisteredAgent {
    /// The agent.
    #[schema(value_type = Id)]
    pub id: AgentId,
    /// Its workspace.
    #[schema(value_type = Id)]
    pub workspace_id: WorkspaceId,
    /// Its name.
    pub name: String,
    /// `@name`.
    pub handle: String,
    /// Its token, shown this once.
    pub token: String,
    /// `online`.
    #[schema(value_type = words::Availability)]
    pub status: &'static str,
    /// What it can do.
    #[schema(value_type = Option<Object>)]
    pub capabilities: Option<Value>,
    /// When it was registered.
    pub created_at: Timestamp,
}

/// An agent, as lists, `GET` and `PATCH` answer with it.
#[derive(Debug, Serialize, ToSchema)]
pub struct Agent {
    /// The agent.
    #[schema(value_type = Id)]
    pub id: AgentId,
    /// Its workspace.
    #[schema(value_type = Id)]
    pub workspace_id: WorkspaceId,
    /// Its name.
    pub name: String,
    /// `@name`.
    pub handle: String,
    /// agent, human or system.
    #[serde(rename = "type")]
    #[schema(value_type = AgentType)]
    pub kind: &'static str,
    /// `online` or `offline`: the words that every published client knows.
    #[schema(value_type = words::Availability)]
    pub status: &'static str,
    /// active, idle, blocked, waiting or offline.
    #[schema(value_type = words::Activity)]
    pub activity_status: &'static str,
    /// Who it is.
    pub persona: Option<String>,
    /// What it can do.
    #[schema(value_type = Option<Object>)]
    pub capabilities: Option<Value>,
    /// What clients keep there.
    #[schema(value_type = Object)]
    pub metadata: Value,
    /// When it was registered.
    pub created_at: Timestamp,
    /// When it was last heard of.
    pub last_seen: Timestamp,
    /// Always empty: some clients insist on the field.
    pub token_hash: &'static str,
}

/// Answer to `GET /v1/agent` and `GET /v1/agents/:name`.
#[derive(Debug, Serialize, ToSchema)]
pub struct AgentDetails {
    /// The agent.
    #[serde(flatten)]
    pub agent: Agent,
    /// Its channels.
    pub channels: Vec<AgentChannel>,
    /// The names of the actions that it handles. Both lists together have 1000 names at most, these first.
    #[schema(example = json!(["build"]))]
    pub actions_provided: Vec<String>,
    /// The names of the actions that it may invoke. Another agent sees those of both lists that it may invoke or
    /// handles itself.
    #[schema(example = json!(["build", "test"]))]
    pub actions_available_to: Vec<String>,
    /// Its oldest unsettled deliveries.
    pub pending_deliveries: Vec<PendingDelivery>,
}

/// A channel that an agent is a member of.
#[derive(Debug, Serialize, ToSchema)]
pub struct AgentChannel {
    /// The channel.
    #[schema(value_type = Id)]
    pub id: ChannelId,
    /// Its name.
    pub name: String,
    /// owner or member.
    #[schema(value_type = words::Role)]
    pub role: String,
    /// Since when.
    pub joined_at: Timestamp,
}

/// A delivery that an agent has not settled yet.
#[derive(Debug, Serialize, ToSchema)]
pub struct PendingDelivery {
    /// The delivery.
    pub id: String,
    /// Its message.
    pub message_id: String,
    /// immediate or next-tool-call.
    #[schema(value_type = words::DeliveryMode)]
    pub mode: &'static str,
    /// Why it is delivered, or why it was deferred.
    pub reason: Option<String>,
    /// What is known of it.
    #[schema(value_type = words::DeliveryStatus)]
    pub status: &'static str,
    /// When it was accepted.
    pub created_at: Timestamp,
}

/// `PATCH /v1/agents/:name`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct UpdateAgentBody {
    /// What it is doing: active, idle, blocked, waiting or offline; online and away are understood.
    #[serde(default)]
    #[schema(example = "idle")]
    pub status: Option<String>,
    /// Who it is; null clears it.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>)]
    pub persona: Option<Option<String>>,
    /// Merged key by key.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
    /// What it can do; null clears it.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<Object>)]
    pub capabilities: Option<Option<Map<String, Value>>>,
    /// What it is good at.
    #[serde(default)]
    pub skills: Option<Vec<Skill>>,
}

/// Answer to `POST /v1/agents/:name/rotate-token`.
#[derive(Debug, Serialize, ToSchema)]
pub struct RotatedToken {
    /// The agent.
    pub name: String,
    /// Its new token, shown this once.
    pub token: String,
}

/// One agent of `GET /v1/agents/presence`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Presence {
    /// The agent.
    #[schema(value_type = Id)]
    pub agent_id: AgentId,
    /// Its name.
    pub agent_name: String,
    /// online or offline.
    #[schema(value_type = words::Availability)]
    pub status: &'static str,
}

/// `GET /v1/agents`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct AgentsQuery {
    /// Absent or `all`: everything. Else a status word.
    #[serde(default)]
    pub status: Option<String>,
}
