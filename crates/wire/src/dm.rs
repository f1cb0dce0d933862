//! Bodies of the routes for direct-message conversations.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::field::Timestamp;

/// `POST /v1/dm/group`.
#[derive(Debug, Deserialize)]
pub struct CreateGroupBody {
    /// Names of those who are to take part beside the caller.
    pub participants: Vec<String>,
    /// The group's own name.
    #[serde(default)]
    pub name: Option<String>,
    /// The first message, if not empty.
    #[serde(default)]
    pub text: Option<String>,
}

/// `POST /v1/dm/:id/participants`.
#[derive(Debug, Deserialize)]
pub struct AddParticipantBody {
    /// Whom.
    #[serde(alias = "agent")]
    pub agent_name: String,
}

/// Answer to `POST /v1/dm/:id/participants`.
#[derive(Debug, Serialize)]
pub struct AddedParticipant {
    /// The conversation.
    pub conversation_id: String,
    /// The agent's name.
    pub agent: String,
    /// Whether nothing changed.
    pub already_member: bool,
}

/// A conversation of `GET /v1/dm/conversations`.
#[derive(Debug, Serialize)]
pub struct Conversation {
    /// The conversation.
    pub id: String,
    /// Its channel.
    pub channel_id: String,
    /// `1:1` or `group`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// A group's own name.
    pub name: Option<String>,
    /// Who takes part: objects, or names alone for clients that know no objects.
    pub participants: Vec<Value>,
    /// The newest message: an object, or its text alone.
    pub last_message: Option<Value>,
    /// Messages of others that the caller has not read.
    pub unread_count: i64,
    /// When it began.
    pub created_at: Timestamp,
}
