//! Batches of posts: the body of `POST /v1/messages/batch` and of the frame `message.send`, and their outcomes.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::PostBody;
use crate::field::Timestamp;

/// Posts in one batch.
pub const MAX_BATCH_POSTS: usize = 100;
/// Keys of a post in a batch that its own route has elsewhere: in the path, or in the header of the idempotency key.
pub const BATCH_ONLY_KEYS: [&str; 4] = ["channel", "conversation_id", "reply_to", "idempotency_key"];

/// Body of `POST /v1/messages/batch` and fields of the frame `message.send`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({ "messages": [
    { "channel": "general", "text": "the build is green", "idempotency_key": "build-7" },
    { "to": "bob", "text": "please review" },
] }))]
pub struct BatchBody {
    /// 1 to 100 posts, in their order.
    #[schema(value_type = Vec<BatchPost>, min_items = 1, max_items = 100)]
    pub messages: Vec<RawPost>,
}

/// Post of a batch as its client wrote it: an invalid one is refused alone.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RawPost(Box<RawValue>);

impl RawPost {
    /// Returns the text of the post.
    #[must_use]
    pub fn get(&self) -> &str {
        self.0.get()
    }
}

impl PartialEq for RawPost {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

/// Target of a post in a batch: exactly one of `channel`, `conversation_id`, `reply_to`, `to` and `address`.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct BatchTarget {
    /// Name of a channel.
    #[serde(default)]
    pub channel: Option<String>,
    /// Id of a conversation of the author.
    #[serde(default)]
    pub conversation_id: Option<String>,
    /// Id of the message whose thread gets the reply.
    #[serde(default)]
    pub reply_to: Option<String>,
    /// Name of the recipient of a direct message.
    #[serde(default)]
    pub to: Option<String>,
    /// Recipient of a direct message with its location, `name@machine`.
    #[serde(default)]
    pub address: Option<String>,
    /// Idempotency key of this post: 1 to 255 visible ASCII characters.
    #[serde(default)]
    #[schema(min_length = 1, max_length = 255, pattern = "^[!-~]+$")]
    pub idempotency_key: Option<String>,
}

/// Post of a batch: the body of its own route, with a target.
#[derive(Debug, Deserialize, ToSchema)]
pub struct BatchPost {
    // Only the schema has this shape: the gateway reads target and content one after the other from the same text.
    /// Target of the post.
    #[serde(flatten)]
    _target: BatchTarget,
    /// Content of the post.
    #[serde(flatten)]
    _content: PostBody,
}

/// Outcomes of a batch.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({ "outcomes": [
    { "status": 201, "message": { "id": "243812100000000001", "created_at": "2026-03-01T12:00:00.000Z", "replayed": false } },
    { "status": 404, "error": { "code": "channel_not_found", "message": "Channel not found" } },
] }))]
pub struct BatchOutcomes {
    /// One for each post, in the order of the posts.
    pub outcomes: Vec<PostOutcome>,
}

/// Outcome of a post in a batch: an accepted message, or an error.
#[derive(Debug, Serialize, ToSchema)]
pub struct PostOutcome {
    /// Status that the post's own route would have: 201 if the message was accepted. Absent while it is not known whether
    /// it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = 201)]
    pub status: Option<u16>,
    /// The accepted message.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub message: Option<AcceptedMessage>,
    /// Refusal of the post.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub error: Option<PostError>,
}

/// Accepted message of a batch.
#[derive(Debug, Serialize, ToSchema)]
pub struct AcceptedMessage {
    /// Id of the message.
    pub id: String,
    /// Id of the conversation, for direct messages.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub conversation_id: Option<String>,
    /// Time of acceptance.
    pub created_at: Timestamp,
    /// `true` if an earlier request with the same idempotency key posted it.
    pub replayed: bool,
}

/// Refusal of a post in a batch.
#[derive(Debug, Serialize, ToSchema)]
pub struct PostError {
    /// Stable code for programs.
    #[schema(example = "channel_not_found")]
    pub code: String,
    /// Text for people; it may change.
    pub message: String,
    /// Seconds until an attempt may succeed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = 1)]
    pub retry_after: Option<u16>,
}
