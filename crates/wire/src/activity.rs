//! Bodies of search, of the activity of a workspace, and of its numbers.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::{field::Timestamp, words};

/// `GET /v1/search`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct SearchQuery {
    /// Words, phrases in quotes, `or`, and `-` for what must be absent.
    #[serde(default)]
    pub q: Option<String>,
    /// Only this channel.
    #[serde(default, alias = "in")]
    pub channel: Option<String>,
    /// Only this author, by name.
    #[serde(default)]
    pub from: Option<String>,
    /// How many at most: 20 unless given, never more than 100.
    #[serde(default)]
    pub limit: Option<String>,
    /// Only older messages than this one.
    #[serde(default)]
    pub before: Option<String>,
    /// Only newer messages than this one.
    #[serde(default)]
    pub after: Option<String>,
}

/// A message that was found.
#[derive(Debug, Serialize, ToSchema)]
pub struct Found {
    /// The message.
    pub id: String,
    /// Its channel.
    pub channel_id: String,
    /// The channel's name.
    pub channel_name: String,
    /// Its conversation; null in a channel.
    pub conversation_id: Option<String>,
    /// Who wrote it.
    pub agent_id: String,
    /// Its author's name.
    pub agent_name: String,
    /// The root of its thread.
    pub thread_id: Option<String>,
    /// Its text.
    pub text: String,
    /// When it was accepted.
    pub created_at: Timestamp,
    /// How well it matches: more is better.
    pub relevance_score: f64,
}

/// `GET /v1/activity`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ActivityQuery {
    /// How many at most: 20 unless given, never more than 100.
    #[serde(default)]
    pub limit: Option<String>,
}

/// A message of `GET /v1/activity`.
#[derive(Debug, Serialize, ToSchema)]
pub struct ActivityItem {
    /// `message` or `dm`.
    #[serde(rename = "type")]
    #[schema(value_type = words::ActivityType)]
    pub kind: &'static str,
    /// The message.
    pub id: String,
    /// Its channel; absent in a conversation, as is the name.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub channel_id: Option<String>,
    /// The channel's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub channel_name: Option<String>,
    /// Its conversation; absent in a channel.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub conversation_id: Option<String>,
    /// Who wrote it.
    pub agent_id: String,
    /// Its author's name.
    pub agent_name: String,
    /// Its text.
    pub text: String,
    /// When it was accepted.
    pub created_at: Timestamp,
}

/// `GET /v1/console/messages`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ConsoleQuery {
    /// How many at most: 50 unless given, never more than 100.
    #[serde(default)]
    pub limit: Option<String>,
    /// Only older messages than this one.
    #[serde(default)]
    pub before: Option<String>,
    /// Only of this author.
    #[serde(default)]
    pub agent_id: Option<String>,
    /// Only in this channel.
    #[serde(default)]
    pub channel_id: Option<String>,
    /// Only in this conversation.
    #[serde(default)]
    pub conversation_id: Option<String>,
    /// `channel` or `dm`.
    #[serde(default)]
    pub delivery_kind: Option<DeliveryKind>,
}

/// Where a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum DeliveryKind {
    /// In a channel.
    Channel,
    /// In a conversation.
    Dm,
}

/// A message of `GET /v1/console/messages`.
#[derive(Debug, Serialize, ToSchema)]
pub struct ConsoleMessage {
    /// The message.
    pub id: String,
    /// The same.
    pub message_id: String,
    /// Its channel.
    pub channel_id: String,
    /// The channel's name.
    pub channel_name: String,
    /// Who wrote it.
    pub agent_id: String,
    /// Its author's name.
    pub agent_name: String,
    /// Its conversation; null in a channel.
    pub conversation_id: Option<String>,
    /// Where it is.
    pub delivery_kind: DeliveryKind,
    /// The root of its thread.
    pub thread_id: Option<String>,
    /// Its text.
    pub text: String,
    /// Free text of the client's.
    pub content_type: Option<String>,
    /// What the author put there.
    #[schema(value_type = Object)]
    pub metadata: Value,
    /// How many files.
    pub attachment_count: i32,
    /// How many names.
    pub mention_count: i32,
    /// The number that the author put there as `latency_ms`, rounded.
    pub latency_ms: Option<i64>,
    /// When it was accepted.
    pub created_at: Timestamp,
}

/// `GET /v1/console/stats`, `/agents` and `/costs`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct WindowQuery {
    /// Days, today (UTC) included: 1 to 30, 7 unless given.
    #[serde(default)]
    pub days: Option<String>,
    /// How many agents at most: 20 unless given, never more than 100.
    #[serde(default)]
    pub limit: Option<String>,
}

/// Answer to `GET /v1/console/stats`: what two generations of clients expect.
#[derive(Debug, Serialize, ToSchema)]
pub struct Stats {
    /// Days, today included.
    pub window_days: u32,
    /// When they began.
    pub since: Timestamp,
    /// Messages in them.
    pub total_messages: i64,
    /// Those in channels.
    pub channel_messages: i64,
    /// Those in conversations.
    pub dm_messages: i64,
    /// Who wrote them, counted.
    pub unique_agents: i64,
    /// The mean of what authors stated as `latency_ms`; 0 if nobody did.
    pub avg_latency_ms: f64,
    /// The most of it; 0 likewise.
    pub max_latency_ms: f64,
    /// Files in them.
    pub attachment_count: i64,
    /// Names in them.
    pub mention_count: i64,
    /// Agents now.
    pub agents: AgentTotals,
    /// Messages ever, and of today.
    pub messages: MessageTotals,
    /// Channels now.
    pub channels: Totals,
}

/// Agents now.
#[derive(Debug, Serialize, ToSchema)]
pub struct AgentTotals {
    /// All of them.
    pub total: i64,
    /// Those that are online.
    pub online: i64,
}

/// Messages.
#[derive(Debug, Serialize, ToSchema)]
pub struct MessageTotals {
    /// Ever.
    pub total: i64,
    /// Of today (UTC).
    pub today: i64,
}

/// A number of things.
#[derive(Debug, Serialize, ToSchema)]
pub struct Totals {
    /// All of them.
    pub total: i64,
}

/// An author of `GET /v1/console/agents`.
#[derive(Debug, Serialize, ToSchema)]
pub struct AuthorStats {
    /// Who.
    pub agent_id: String,
    /// Its name.
    pub agent_name: String,
    /// Its messages.
    pub message_count: i64,
    /// Those in channels.
    pub channel_count: i64,
    /// Those in conversations.
    pub dm_count: i64,
    /// The mean of what it stated as `latency_ms`; 0 if it did not.
    pub avg_latency_ms: f64,
    /// Its newest message.
    pub last_message_at: Option<Timestamp>,
}

/// Answer to `GET /v1/console/costs`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Costs {
    /// Days, today included.
    pub window_days: u32,
    /// All of it.
    pub totals: CostTotals,
    /// Per author, the busiest first; at most 1000.
    pub agents: Vec<AuthorCosts>,
}

/// What authors stated in their messages' metadata.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct CostTotals {
    /// `cost_usd`.
    pub total_cost_usd: f64,
    /// `prompt_tokens`.
    pub prompt_tokens: i64,
    /// `completion_tokens`.
    pub completion_tokens: i64,
    /// `total_tokens`, or the sum of the two.
    pub total_tokens: i64,
}

/// What one author stated.
#[derive(Debug, Serialize, ToSchema)]
pub struct AuthorCosts {
    /// Who.
    pub agent_id: String,
    /// Its name.
    pub agent_name: String,
    /// Its messages.
    pub message_count: i64,
    /// What it stated.
    #[serde(flatten)]
    pub totals: CostTotals,
}

/// Answer to `GET` and `PUT /v1/workspace/system-prompt`.
#[derive(Debug, Serialize, ToSchema)]
pub struct SystemPrompt {
    /// The text.
    pub prompt: String,
    /// Whether the workspace has none of its own.
    pub is_default: bool,
}

/// `PUT /v1/workspace/system-prompt`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct SystemPromptBody {
    /// The text; null goes back to the default.
    #[serde(default, deserialize_with = "crate::field::present")]
    #[schema(value_type = Option<String>)]
    pub prompt: Option<Option<String>>,
    /// Goes back to the default.
    #[serde(default)]
    pub reset: bool,
}
