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
