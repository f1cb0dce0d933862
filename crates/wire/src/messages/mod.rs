//! Bodies of the message routes. Main types: [`PostBody`], the body of a post, [`Message`] and [`ConversationMessage`],
//! and in [`payload`] the message inside a `deliver` frame.

pub mod batch;
pub mod payload;
pub mod reactions;
pub mod reading;
pub mod webhook;

use relay_domain::{
    JsonText,
    mailboxes::delivery::Mode,
    messages::{self as domain, ListedMessage, client_metadata, from_address},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::{
    agents::AgentType,
    field::{Timestamp, present},
};

/// Query of every list of messages.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct PageQuery {
    // Text: a number that exceeds every integer type is clamped to the maximum like any other that is too large.
    /// Page size: 50 by default, at most 100.
    #[serde(default)]
    #[param(value_type = Option<i64>, minimum = 1)]
    pub limit: Option<String>,
    /// Only messages older than this message id.
    #[serde(default)]
    pub before: Option<String>,
    /// Only messages newer than this message id.
    #[serde(default)]
    pub after: Option<String>,
}

/// Response of `GET /v1/messages/:id/replies`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Thread {
    /// The requested message.
    pub parent: Message,
    /// Replies, oldest first.
    pub replies: Vec<Message>,
}

/// Response of `POST /v1/messages/:id/read`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Read {
    /// Id of the message.
    pub message_id: String,
    /// Id of the reader.
    pub agent_id: String,
    /// Time of the first read.
    pub read_at: Timestamp,
}

/// Body of a post to a channel, a thread or a conversation.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(example = json!({ "text": "the build is green, @bob", "mode": "wait" }))]
pub struct PostBody {
    /// Text of the message.
    pub text: String,
    /// Rich blocks, passed through: an array of objects with a `type`.
    #[serde(default)]
    #[schema(value_type = Option<Value>)]
    pub blocks: Option<JsonText>,
    /// Free-form metadata of the message.
    #[serde(default, alias = "metadata")]
    #[schema(value_type = Option<Value>)]
    pub data: Option<JsonText>,
    /// Ids of complete files, each once.
    #[serde(default)]
    pub attachments: Option<Vec<String>>,
    /// Requested injection mode, `wait` or `steer`.
    #[serde(default)]
    pub mode: Option<PostMode>,
    /// Free-form content type of the client.
    #[serde(default)]
    pub content_type: Option<String>,
    /// TTL of the deliveries in milliseconds; the workspace's default when absent. Deliveries that are not settled by
    /// then become dead letters, and the sender is notified.
    #[serde(default)]
    #[schema(minimum = 1000, maximum = 518_400_000)]
    pub ttl_ms: Option<i64>,
    /// Name of the agent that a node posts for; refused from agents.
    #[serde(default)]
    pub from: Option<String>,
    /// Name of the recipient of a direct message.
    #[serde(default)]
    pub to: Option<String>,
    /// Recipient of a direct message with its location, `name@machine`.
    #[serde(default)]
    pub address: Option<String>,
}

/// Requested injection mode of a message.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PostMode {
    /// Inject when the recipient is ready.
    Wait,
    /// Inject at once.
    Steer,
}

/// Body of `PATCH /v1/messages/:id`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct UpdateMessageBody {
    /// New text of the message.
    #[serde(default)]
    pub text: Option<String>,
    /// Rich blocks; null removes them.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<Vec<Value>>)]
    pub blocks: Option<Option<JsonText>>,
    /// Replaces the metadata; null empties it.
    #[serde(default, alias = "metadata", deserialize_with = "present")]
    #[schema(value_type = Option<Object>)]
    pub data: Option<Option<JsonText>>,
}

/// Message, in lists and alone.
#[derive(Debug, Serialize, ToSchema)]
pub struct Message {
    /// Id of the message. Ids sort by creation.
    pub id: String,
    /// Id of the channel.
    pub channel_id: String,
    /// Name of the channel.
    pub channel_name: String,
    /// Id of the author.
    pub agent_id: String,
    /// Name of the author.
    pub agent_name: String,
    /// Type of the author.
    pub agent_type: AgentType,
    /// Text of the message.
    pub text: String,
    /// Rich blocks as posted.
    #[schema(value_type = Option<Value>)]
    pub blocks: Option<JsonText>,
    /// Metadata as posted in `data`, without the engine's own keys.
    #[schema(value_type = Object)]
    pub metadata: JsonText,
    /// `true` if the message has files.
    pub has_attachments: bool,
    /// Id of the thread's root message, for replies.
    pub thread_id: Option<String>,
    /// Time of acceptance.
    pub created_at: Timestamp,
    /// Names mentioned in the text with `@`.
    pub mentions: Vec<String>,
    /// Files attached to it.
    #[schema(value_type = Vec<Attachment>)]
    pub attachments: Value,
    /// Injection mode that the author requested.
    pub injection_mode: InjectionMode,
    /// Number of replies.
    pub reply_count: i64,
    /// Reactions to it, by emoji.
    pub reactions: Vec<ReactionGroup>,
    /// Number of agents that have read it.
    pub read_by_count: i64,
    /// Content type as posted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = "text/markdown")]
    pub content_type: Option<String>,
    /// Id of the conversation, for direct messages.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub conversation_id: Option<String>,
}

/// Message of a conversation.
#[derive(Debug, Serialize, ToSchema)]
pub struct ConversationMessage {
    /// Id of the message.
    pub id: String,
    /// Id of the author.
    pub agent_id: String,
    /// Name of the author.
    pub agent_name: String,
    /// Address that reached the author when it wrote the message.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = "ada@box")]
    pub from_address: Option<String>,
    /// Type of the author.
    pub agent_type: AgentType,
    /// Text of the message.
    pub text: String,
    /// Injection mode that the author requested.
    pub injection_mode: InjectionMode,
    /// Files attached to it.
    #[schema(value_type = Vec<Attachment>)]
    pub attachments: Value,
    /// Metadata as posted in `data`, without the engine's own keys.
    #[schema(value_type = Object)]
    pub metadata: JsonText,
    /// Time of acceptance.
    pub created_at: Timestamp,
}

impl From<ListedMessage> for Message {
    fn from(listed: ListedMessage) -> Self {
        let message = listed.message;
        Self {
            id: message.id.to_string(),
            channel_id: message.client_channel_id(),
            has_attachments: message.has_attachments(),
            metadata: client_metadata(&message.metadata),
            channel_name: message.channel_name,
            agent_id: message.agent_id.to_string(),
            agent_name: message.agent_name,
            agent_type: message.agent_kind.into(),
            text: message.text,
            blocks: message.blocks,
            thread_id: message.thread_id.map(|id| id.to_string()),
            created_at: message.created_at.into(),
            mentions: message.mentions,
            attachments: message.attachments,
            injection_mode: message.mode.into(),
            reply_count: listed.reply_count,
            reactions: listed.reactions.into_iter().map(Into::into).collect(),
            read_by_count: listed.read_by_count,
            content_type: message.content_type,
            conversation_id: message.conversation_id.map(|id| id.to_string()),
        }
    }
}

impl From<domain::Message> for ConversationMessage {
    fn from(message: domain::Message) -> Self {
        Self {
            id: message.id.to_string(),
            metadata: client_metadata(&message.metadata),
            agent_id: message.agent_id.to_string(),
            from_address: from_address(&message.metadata),
            agent_name: message.agent_name,
            agent_type: message.agent_kind.into(),
            text: message.text,
            injection_mode: message.mode.into(),
            attachments: message.attachments,
            created_at: message.created_at.into(),
        }
    }
}

/// Requested injection mode of a message.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum InjectionMode {
    /// Inject when the recipient is ready.
    Wait,
    /// Inject at once.
    Steer,
}

impl From<Mode> for InjectionMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Wait => Self::Wait,
            Mode::Steer => Self::Steer,
        }
    }
}

/// File attached to a message.
#[derive(Debug, Serialize, ToSchema)]
pub struct Attachment {
    /// Id of the file.
    pub file_id: String,
    /// Name of the file.
    pub filename: String,
    /// Media type of the file.
    pub content_type: String,
    /// Size in bytes.
    pub size_bytes: i64,
}

/// Reactions to a message with one emoji.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReactionGroup {
    /// The emoji or shortcode.
    pub emoji: String,
    /// Number of agents that reacted with it.
    pub count: i64,
    /// Names of these agents.
    pub agents: Vec<String>,
}

impl From<domain::ReactionCount> for ReactionGroup {
    fn from(reaction: domain::ReactionCount) -> Self {
        Self { emoji: reaction.emoji, count: reaction.count, agents: reaction.agents }
    }
}
