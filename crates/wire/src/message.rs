//! Bodies of the routes that read messages.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::{agent::AgentType, field::Timestamp};

/// The query of every list of messages.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct PageQuery {
    /// How many at most: 50 unless given, never more than 100.
    #[serde(default)]
    #[param(value_type = Option<i64>, minimum = 1)]
    pub limit: Option<String>,
    /// Only older messages than this one.
    #[serde(default)]
    pub before: Option<String>,
    /// Only newer messages than this one.
    #[serde(default)]
    pub after: Option<String>,
}

/// Answer to `GET /v1/messages/:id/replies`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Thread {
    /// The message that was asked for.
    #[schema(value_type = Message)]
    pub parent: Value,
    /// Its replies, oldest first.
    #[schema(value_type = Vec<Message>)]
    pub replies: Vec<Value>,
}

/// Answer to `POST /v1/messages/:id/read`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Read {
    /// The message.
    pub message_id: String,
    /// Who read it.
    pub agent_id: String,
    /// When it first did.
    pub read_at: Timestamp,
}

/// Body of a post: to a channel, a thread or a conversation.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(example = json!({ "text": "the build is green, @bob", "mode": "wait" }))]
pub struct PostBody {
    /// The text.
    pub text: String,
    /// Rich blocks, passed through: an array of objects with a `type`.
    #[serde(default)]
    pub blocks: Option<Value>,
    /// Becomes the message's metadata.
    #[serde(default, alias = "metadata")]
    pub data: Option<Value>,
    /// Ids of complete files, each once.
    #[serde(default)]
    pub attachments: Option<Vec<String>>,
    /// `wait` or `steer`.
    #[serde(default)]
    pub mode: Option<PostMode>,
    /// Free text of the client's.
    #[serde(default)]
    pub content_type: Option<String>,
    /// How long the deliveries of this message live, in milliseconds, if not as long as the workspace says. What is
    /// not taken by then becomes a dead letter, and the sender is told.
    #[serde(default)]
    #[schema(minimum = 1000, maximum = 518_400_000)]
    pub ttl_ms: Option<i64>,
    /// Whom a node posts for; refused from agents.
    #[serde(default)]
    pub from: Option<String>,
    /// Whom a direct message is for: an agent's name.
    #[serde(default)]
    pub to: Option<String>,
    /// Whom a direct message is for: an agent's name and where it is, `name@machine`.
    #[serde(default)]
    pub address: Option<String>,
}

/// How a message asks to be injected.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PostMode {
    /// When the recipient is ready.
    Wait,
    /// At once.
    Steer,
}

/// A message, in lists and alone. Answers are rendered from storage as JSON; this says what is in them.
#[derive(Debug, Serialize, ToSchema)]
pub struct Message {
    /// The message. Ids sort by creation.
    pub id: String,
    /// Its channel.
    pub channel_id: String,
    /// The channel's name.
    pub channel_name: String,
    /// Its author.
    pub agent_id: String,
    /// The author's name.
    pub agent_name: String,
    /// What the author is.
    pub agent_type: AgentType,
    /// Its text.
    pub text: String,
    /// Rich blocks, as posted.
    pub blocks: Option<Value>,
    /// What was posted as `data`, without keys of the engine's own.
    #[schema(value_type = Object)]
    pub metadata: Value,
    /// Whether there are files.
    pub has_attachments: bool,
    /// The root of its thread, if it is a reply.
    pub thread_id: Option<String>,
    /// When it was accepted.
    pub created_at: Timestamp,
    /// The names that the text mentions with `@`.
    pub mentions: Vec<String>,
    /// Its files.
    pub attachments: Vec<Attachment>,
    /// How it asks to be injected.
    pub injection_mode: InjectionMode,
    /// How many replies it has.
    pub reply_count: i64,
    /// Reactions to it, by emoji.
    pub reactions: Vec<ReactionGroup>,
    /// How many agents have marked it as read.
    pub read_by_count: i64,
    /// As posted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = "text/markdown")]
    pub content_type: Option<String>,
    /// The conversation, if it is a direct message.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub conversation_id: Option<String>,
}

/// A message of a conversation.
#[derive(Debug, Serialize, ToSchema)]
pub struct ConversationMessage {
    /// The message.
    pub id: String,
    /// Its author.
    pub agent_id: String,
    /// The author's name.
    pub agent_name: String,
    /// What the author is.
    pub agent_type: AgentType,
    /// Its text.
    pub text: String,
    /// How it asks to be injected.
    pub injection_mode: InjectionMode,
    /// Its files.
    pub attachments: Vec<Attachment>,
    /// What was posted as `data`, without keys of the engine's own.
    #[schema(value_type = Object)]
    pub metadata: Value,
    /// When it was accepted.
    pub created_at: Timestamp,
}

/// How a message asked to be injected.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum InjectionMode {
    /// When the recipient is ready.
    Wait,
    /// At once.
    Steer,
}

/// A file of a message.
#[derive(Debug, Serialize, ToSchema)]
pub struct Attachment {
    /// The file.
    pub file_id: String,
    /// Its name.
    pub filename: String,
    /// Its media type.
    pub content_type: String,
    /// Its size in bytes.
    pub size_bytes: i64,
}

/// One emoji of a message, and who reacted with it.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReactionGroup {
    /// The emoji.
    pub emoji: String,
    /// How many agents reacted with it.
    pub count: i64,
    /// Their names.
    pub agents: Vec<String>,
}
