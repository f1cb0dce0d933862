//! Bodies of the routes that show readers and read positions.

use serde::Serialize;
use utoipa::ToSchema;

use crate::field::Timestamp;

/// Reader of a message.
#[derive(Debug, Serialize, ToSchema)]
pub struct Reader {
    /// Id of the agent.
    pub agent_id: String,
    /// Name of the agent.
    pub agent_name: String,
    /// Time of the first read.
    pub read_at: Timestamp,
}

/// Read position of a channel member.
#[derive(Debug, Serialize, ToSchema)]
pub struct ReadPosition {
    /// Name of the member.
    pub agent_name: String,
    /// Id of the newest message that it has read.
    pub last_read_id: Option<String>,
    /// Time of that read.
    pub last_read_at: Option<Timestamp>,
}
