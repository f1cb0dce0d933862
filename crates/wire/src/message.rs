//! Bodies of the routes that read messages.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::field::Timestamp;

/// The query of every list of messages.
#[derive(Debug, Default, Deserialize)]
pub struct PageQuery {
    /// How many at most: 50 unless given, never more than 100.
    #[serde(default)]
    pub limit: Option<String>,
    /// Only older messages than this one.
    #[serde(default)]
    pub before: Option<String>,
    /// Only newer messages than this one.
    #[serde(default)]
    pub after: Option<String>,
}

/// Answer to `GET /v1/messages/:id/replies`.
#[derive(Debug, Serialize)]
pub struct Thread {
    /// The message that was asked for.
    pub parent: Value,
    /// Its replies, oldest first.
    pub replies: Vec<Value>,
}

/// Answer to `POST /v1/messages/:id/read`.
#[derive(Debug, Serialize)]
pub struct Read {
    /// The message.
    pub message_id: String,
    /// Who read it.
    pub agent_id: String,
    /// When it first did.
    pub read_at: Timestamp,
}

/// Body of a post: to a channel, a thread or a conversation.
#[derive(Debug, Default, Deserialize)]
pub struct PostBody {
    /// The text.
    pub text: String,
    /// Rich blocks.
    #[serde(default)]
    pub blocks: Option<Value>,
    /// Becomes the message's metadata.
    #[serde(default, alias = "metadata")]
    pub data: Option<Value>,
    /// File ids.
    #[serde(default)]
    pub attachments: Option<Vec<String>>,
    /// `wait` or `steer`.
    #[serde(default)]
    pub mode: Option<PostMode>,
    /// Free text of the client's.
    #[serde(default)]
    pub content_type: Option<String>,
    /// Whom a node posts for; refused from agents.
    #[serde(default)]
    pub from: Option<String>,
    /// Whom a direct message is for: an agent's name.
    #[serde(default)]
    pub to: Option<String>,
}

/// How a message asks to be injected.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PostMode {
    /// When the recipient is ready.
    Wait,
    /// At once.
    Steer,
}
