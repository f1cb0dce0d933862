//! Positions of mailboxes ([`Mailbox`]); the bodies of deliveries, dead letters, inbox and traces are in the
//! submodules.

pub mod dead_letter;
pub mod delivery;
pub mod inbox;
pub mod insight;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Query of `GET /v1/observe/mailboxes`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct MailboxesQuery {
    /// Cursor: the id of the last agent of the previous page.
    #[serde(default)]
    pub after: Option<String>,
    /// Maximum number of entries.
    #[serde(default)]
    pub limit: Option<String>,
}

/// Position of one agent's mailbox.
#[derive(Debug, Serialize, ToSchema)]
pub struct Mailbox {
    /// Id of the agent.
    pub agent_id: String,
    /// Name of the agent.
    pub agent_name: String,
    /// Seq of the newest delivery; 0 without any.
    pub last_seq: i64,
    /// Ack floor: everything up to this seq was acknowledged over a socket.
    pub ack_floor: i64,
    /// Settled floor: everything up to this seq is settled by any means.
    pub settled_floor: i64,
    /// Distance of the settled floor from the newest delivery.
    pub lag: i64,
}
