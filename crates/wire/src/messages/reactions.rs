//! Bodies of the reaction routes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::field::Timestamp;

/// Body of `POST /v1/messages/:id/reactions`.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ReactBody {
    /// Emoji or shortcode.
    pub emoji: String,
}

/// Response of `POST /v1/messages/:id/reactions`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Reaction {
    /// Id of the reaction.
    pub id: String,
    /// Id of the message.
    pub message_id: String,
    /// Name of the reacting agent.
    pub agent_name: String,
    /// Emoji or shortcode.
    pub emoji: String,
    /// Time of the reaction.
    pub created_at: Timestamp,
}
