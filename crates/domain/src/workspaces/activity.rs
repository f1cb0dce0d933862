//! Messages and totals of a whole workspace, as dashboards show them. Read by the store, shown by the routes of
//! activity.

use chrono::{DateTime, Utc};

use crate::{AgentId, ChannelId, ConversationId, JsonText, MessageId};

/// Message anywhere in a workspace.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct ActivityMessage {
    pub message_id: MessageId,
    pub channel_id: ChannelId,
    pub channel_name: String,
    /// `None` in a channel.
    pub conversation_id: Option<ConversationId>,
    pub agent_id: AgentId,
    /// Name of the author when the message was written.
    pub agent_name: String,
    /// Root message of its thread.
    pub thread_id: Option<MessageId>,
    /// Empty until it is read.
    pub text: String,
    /// Free text set by the author.
    pub content_type: Option<String>,
    /// Object set by the author; empty until it is read.
    #[cfg_attr(feature = "sqlx", sqlx(json))]
    pub metadata: JsonText,
    pub attachment_count: i32,
    pub mention_count: i32,
    /// `latency_ms` of `metadata`, if it is a number.
    pub latency_ms: Option<f64>,
    pub created_at: DateTime<Utc>,
}

/// Conditions on the listed messages.
#[derive(Debug, Clone, Default)]
pub struct ActivityFilter {
    /// Exclusive upper bound.
    pub before: Option<MessageId>,
    pub agent: Option<AgentId>,
    pub channel: Option<ChannelId>,
    pub conversation: Option<ConversationId>,
    /// True for conversations only, false for channels only.
    pub direct: Option<bool>,
}

/// Totals of one author over a range of days.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct AuthorStats {
    pub agent_id: AgentId,
    pub agent_name: String,
    pub channel_messages: i64,
    pub direct_messages: i64,
    /// Mean of `latency_ms` in the metadata of its messages; `None` without any.
    pub avg_latency_ms: Option<f64>,
    pub last_message_at: Option<DateTime<Utc>>,
    /// Sum of `cost_usd` in the metadata of its messages; the token counts are summed likewise.
    pub cost_usd: f64,
    pub prompt_tokens: f64,
    pub completion_tokens: f64,
    pub total_tokens: f64,
}

/// Current row counts of a workspace.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct WorkspaceCounts {
    /// Agents that are not deleted.
    pub agents: i64,
    pub online: i64,
    /// Channels that are not archived.
    pub channels: i64,
    /// Messages indexed since the workspace was created.
    pub messages: i64,
}

/// Totals of a workspace over a range of days.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct WorkspaceStats {
    pub channel_messages: i64,
    pub direct_messages: i64,
    pub unique_agents: i64,
    /// Mean of `latency_ms` in the metadata of messages; `None` without any.
    pub avg_latency_ms: Option<f64>,
    /// Maximum of `latency_ms`.
    pub max_latency_ms: Option<f64>,
    pub attachment_count: i64,
    pub mention_count: i64,
    /// Messages of the current day (UTC).
    pub messages_today: i64,
}
