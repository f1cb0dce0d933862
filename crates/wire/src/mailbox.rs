//! Where mailboxes stand.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// `GET /v1/observe/mailboxes`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct MailboxesQuery {
    /// Only agents with a larger id: the last one of the page before.
    #[serde(default)]
    pub after: Option<String>,
    /// How many at most.
    #[serde(default)]
    pub limit: Option<String>,
}

/// Where one agent's mailbox stands.
#[derive(Debug, Serialize, ToSchema)]
pub struct Mailbox {
    /// The agent.
    pub agent_id: String,
    /// Its name.
    pub agent_name: String,
    /// The number of its newest delivery; 0 without any.
    pub last_seq: i64,
    /// Acknowledged over a socket up to here.
    pub ack_floor: i64,
    /// Settled by whatever means up to here.
    pub settled_floor: i64,
    /// How many numbers the settled floor is behind.
    pub lag: i64,
}
