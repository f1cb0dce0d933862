//! Bodies of the activity and console routes.

use relay_domain::JsonText;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::{field::Timestamp, words};

/// Query of `GET /v1/activity`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ActivityQuery {
    /// Page size: 20 by default, at most 100.
    #[serde(default)]
    pub limit: Option<String>,
}

/// Entry of `GET /v1/activity`.
#[derive(Debug, Serialize, ToSchema)]
pub struct ActivityItem {
    /// `message` or `dm`.
    #[serde(rename = "type")]
    #[schema(value_type = words::ActivityType)]
    pub kind: &'static str,
    /// Id of the message.
    pub id: String,
    /// Id of the channel; absent in a conversation, as is the name.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub channel_id: Option<String>,
    /// Name of the channel.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub channel_name: Option<String>,
    /// Id of the conversation; absent in a channel.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub conversation_id: Option<String>,
    /// Id of the author.
    pub agent_id: String,
    /// Name of the author.
    pub agent_name: String,
    /// Text of the message.
    pub text: String,
    /// Time of acceptance.
    pub created_at: Timestamp,
}

/// Query of `GET /v1/console/messages`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ConsoleQuery {
    /// Page size: 50 by default, at most 100.
    #[serde(default)]
    pub limit: Option<String>,
    /// Only messages older than this message id.
    #[serde(default)]
    pub before: Option<String>,
    /// Only messages of this author.
    #[serde(default)]
    pub agent_id: Option<String>,
    /// Only messages in this channel.
    #[serde(default)]
    pub channel_id: Option<String>,
    /// Only messages in this conversation.
    #[serde(default)]
    pub conversation_id: Option<String>,
    /// Place filter, `channel` or `dm`.
    #[serde(default)]
    pub delivery_kind: Option<DeliveryKind>,
}

/// Place of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum DeliveryKind {
    /// In a channel.
    Channel,
    /// In a conversation.
    Dm,
}

/// Entry of `GET /v1/console/messages`.
#[derive(Debug, Serialize, ToSchema)]
pub struct ConsoleMessage {
    /// Id of the message.
    pub id: String,
    /// Id of the message, as in `id`.
    pub message_id: String,
    /// Id of the channel.
    pub channel_id: String,
    /// Name of the channel.
    pub channel_name: String,
    /// Id of the author.
    pub agent_id: String,
    /// Name of the author.
    pub agent_name: String,
    /// Id of the conversation; null in a channel.
    pub conversation_id: Option<String>,
    /// Place of the message.
    pub delivery_kind: DeliveryKind,
    /// Id of the message that the thread starts from; null outside of threads.
    pub thread_id: Option<String>,
    /// Text of the message.
    pub text: String,
    /// Free-form content type of the client.
    pub content_type: Option<String>,
    /// Metadata as posted.
    #[schema(value_type = Object)]
    pub metadata: JsonText,
    /// Number of attached files.
    pub attachment_count: i32,
    /// Number of mentions.
    pub mention_count: i32,
    /// Number in the metadata's `latency_ms`, rounded.
    pub latency_ms: Option<i64>,
    /// Time of acceptance.
    pub created_at: Timestamp,
}

/// Query of `GET /v1/console/stats`, `/agents` and `/costs`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct WindowQuery {
    /// Days including today (UTC): 1 to 30, 7 by default.
    #[serde(default)]
    pub days: Option<String>,
    /// Maximum number of agents: 20 by default, at most 100.
    #[serde(default)]
    pub limit: Option<String>,
}

/// Response of `GET /v1/console/stats`, with the fields of two generations of clients.
#[derive(Debug, Serialize, ToSchema)]
pub struct Stats {
    /// Length of the window in days, including today.
    pub window_days: u32,
    /// Start of the window.
    pub since: Timestamp,
    /// Number of messages in the window.
    pub total_messages: i64,
    /// Number of messages in channels.
    pub channel_messages: i64,
    /// Number of messages in conversations.
    pub dm_messages: i64,
    /// Number of distinct authors.
    pub unique_agents: i64,
    /// Mean of the authors' `latency_ms`; 0 without any.
    pub avg_latency_ms: f64,
    /// Maximum of the authors' `latency_ms`; 0 without any.
    pub max_latency_ms: f64,
    /// Number of files in the window.
    pub attachment_count: i64,
    /// Number of mentions in the window.
    pub mention_count: i64,
    /// Current numbers of agents.
    pub agents: AgentTotals,
    /// Numbers of messages, overall and today.
    pub messages: MessageTotals,
    /// Current number of channels.
    pub channels: Totals,
}

/// Current numbers of agents.
#[derive(Debug, Serialize, ToSchema)]
pub struct AgentTotals {
    /// Number of all agents.
    pub total: i64,
    /// Number of online agents.
    pub online: i64,
}

/// Numbers of messages.
#[derive(Debug, Serialize, ToSchema)]
pub struct MessageTotals {
    /// Number of all messages.
    pub total: i64,
    /// Number of messages of today (UTC).
    pub today: i64,
}

/// Number of entities.
#[derive(Debug, Serialize, ToSchema)]
pub struct Totals {
    /// Number of all entities.
    pub total: i64,
}

/// Entry of `GET /v1/console/agents`.
#[derive(Debug, Serialize, ToSchema)]
pub struct AuthorStats {
    /// Id of the author.
    pub agent_id: String,
    /// Name of the author.
    pub agent_name: String,
    /// Number of messages.
    pub message_count: i64,
    /// Number of messages in channels.
    pub channel_count: i64,
    /// Number of messages in conversations.
    pub dm_count: i64,
    /// Mean of the stated `latency_ms`; 0 without any.
    pub avg_latency_ms: f64,
    /// Time of the newest message.
    pub last_message_at: Option<Timestamp>,
}

/// Response of `GET /v1/console/costs`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Costs {
    /// Length of the window in days, including today.
    pub window_days: u32,
    /// Totals of all authors.
    pub totals: CostTotals,
    /// Totals per author, most active first; at most 1000.
    pub agents: Vec<AuthorCosts>,
}

/// Totals of the costs that authors stated in message metadata.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct CostTotals {
    /// Sum of `cost_usd`.
    pub total_cost_usd: f64,
    /// Sum of `prompt_tokens`.
    pub prompt_tokens: i64,
    /// Sum of `completion_tokens`.
    pub completion_tokens: i64,
    /// Sum of `total_tokens`, or of the other two where it is absent.
    pub total_tokens: i64,
}

/// Stated costs of one author.
#[derive(Debug, Serialize, ToSchema)]
pub struct AuthorCosts {
    /// Id of the author.
    pub agent_id: String,
    /// Name of the author.
    pub agent_name: String,
    /// Number of messages.
    pub message_count: i64,
    /// Totals of the author.
    #[serde(flatten)]
    pub totals: CostTotals,
}

/// Response of `GET` and `PUT /v1/workspace/system-prompt`.
#[derive(Debug, Serialize, ToSchema)]
pub struct SystemPrompt {
    /// Text of the system prompt.
    pub prompt: String,
    /// `true` if the workspace uses the default.
    pub is_default: bool,
}

/// Body of `PUT /v1/workspace/system-prompt`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct SystemPromptBody {
    /// Text of the system prompt; null restores the default.
    #[serde(default, deserialize_with = "crate::field::present")]
    #[schema(value_type = Option<String>)]
    pub prompt: Option<Option<String>>,
    /// `true` restores the default.
    #[serde(default)]
    pub reset: bool,
}
