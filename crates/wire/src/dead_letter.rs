//! Bodies of the routes for dead letters.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::field::Timestamp;

/// The query of `GET /v1/dead-letters` and `GET /v1/dead-letters/summary`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct LettersQuery {
    /// Of this agent: its name or id.
    #[serde(default)]
    pub agent: Option<String>,
    /// Whose agent was on this node: its name or id.
    #[serde(default)]
    pub node: Option<String>,
    /// ttl_expired, agent_deleted, session_gone, attempts_exhausted, rejected or lost_in_restore.
    #[serde(default)]
    pub reason: Option<String>,
    /// Given up at this time or later.
    #[serde(default)]
    #[param(value_type = Option<String>, format = DateTime)]
    pub since: Option<DateTime<Utc>>,
    /// Given up before this time.
    #[serde(default)]
    #[param(value_type = Option<String>, format = DateTime)]
    pub until: Option<DateTime<Utc>>,
    /// Only those behind this one: the id of the last letter of the page before.
    #[serde(default)]
    pub before: Option<String>,
    /// How many at most: 100 unless given, never more than 200.
    #[serde(default)]
    #[param(value_type = Option<i64>, minimum = 1)]
    pub limit: Option<String>,
}

/// A dead letter: a delivery that was given up.
#[derive(Debug, Serialize, ToSchema)]
pub struct DeadLetter {
    /// The delivery.
    #[schema(example = "del_243812100000000001_243812050000000001")]
    pub delivery_id: String,
    /// The message.
    pub message_id: String,
    /// The recipient.
    pub agent_id: String,
    /// The recipient's name.
    pub agent_name: Option<String>,
    /// Who sent it.
    pub sender_name: Option<String>,
    /// The channel of the message.
    pub channel_id: Option<String>,
    /// Where the recipient was.
    pub node_id: String,
    /// Its place in the mailbox.
    pub seq: i64,
    /// Why it was given up: ttl_expired, agent_deleted, session_gone, attempts_exhausted, rejected or lost_in_restore.
    pub reason: String,
    /// What went wrong.
    pub error: Option<String>,
    /// How often the message was redriven to this agent before.
    pub redrive_count: i16,
    /// The delivery that it became when it was redriven.
    pub redriven_as: Option<String>,
    /// When it was redriven.
    pub redriven_at: Option<Timestamp>,
    /// When the delivery was made.
    pub created_at: Timestamp,
    /// When its time was over, or would have been.
    pub expires_at: Timestamp,
    /// When it was given up.
    pub dead_lettered_at: Timestamp,
}

/// How many dead letters there are.
#[derive(Debug, Serialize, ToSchema)]
pub struct LetterSummary {
    /// In all.
    pub total: i64,
    /// By reason; reasons without letters are left out.
    pub by_reason: BTreeMap<String, i64>,
}

/// Which dead letters. An empty filter is all of them.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct LetterFilter {
    /// Of this agent: its name or id.
    #[serde(default)]
    pub agent: Option<String>,
    /// Whose agent was on this node: its name or id.
    #[serde(default)]
    pub node: Option<String>,
    /// Given up for this reason.
    #[serde(default)]
    pub reason: Option<String>,
    /// Given up at this time or later.
    #[serde(default)]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub since: Option<DateTime<Utc>>,
    /// Given up before this time.
    #[serde(default)]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub until: Option<DateTime<Utc>>,
    /// Given up this many seconds ago or more.
    #[serde(default)]
    #[schema(minimum = 0)]
    pub older_than_seconds: Option<u32>,
}

/// `POST /v1/dead-letters/redrive`: exactly one of `delivery_id` and `filter`.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({ "filter": { "agent": "bob", "reason": "ttl_expired" }, "rate": 100 }))]
pub struct RedriveBody {
    /// This one.
    #[serde(default)]
    pub delivery_id: Option<String>,
    /// All of these, in the background.
    #[serde(default)]
    pub filter: Option<LetterFilter>,
    /// Only tells what would be sent again.
    #[serde(default)]
    pub dry_run: bool,
    /// Letters a second: 100 unless given.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 2000)]
    pub rate: Option<i32>,
}

/// Answer to `POST /v1/dead-letters/redrive` and `GET /v1/dead-letters/redrives/:id`.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum RedriveAnswer {
    /// One letter was sent again.
    One(Redriven),
    /// Letters are being sent again.
    Many(Redrive),
    /// What would be.
    Dry(DryRun),
}

/// A letter that was sent again.
#[derive(Debug, Serialize, ToSchema)]
pub struct Redriven {
    /// The dead letter.
    #[schema(example = "del_243812100000000001_243812050000000001")]
    pub delivery_id: String,
    /// What it is now: a new delivery, with a message id of its own on the wire (`…_r1`).
    #[schema(example = "del_243812100000000001_243812050000000001_r1")]
    pub redriven_as: String,
    /// Its place in the mailbox.
    pub seq: i64,
}

/// A redrive by filter.
#[derive(Debug, Serialize, ToSchema)]
pub struct Redrive {
    /// The redrive.
    #[schema(example = "243812700000000001")]
    pub redrive_id: String,
    /// running or finished.
    #[schema(example = "running")]
    pub status: &'static str,
    /// Letters a second.
    pub rate: i32,
    /// Letters that were to be sent again when it began.
    pub matched: i64,
    /// Letters that were sent again.
    pub redriven: i64,
    /// Letters that could not be: three times already, a mailbox that stayed full, or the agent or the message is gone.
    pub refused: i64,
    /// When it began.
    pub created_at: Timestamp,
    /// When it was through.
    pub finished_at: Option<Timestamp>,
}

/// What a redrive would send again.
#[derive(Debug, Serialize, ToSchema)]
pub struct DryRun {
    /// Always true.
    pub dry_run: bool,
    /// How many letters.
    pub matched: i64,
    /// By reason.
    pub by_reason: BTreeMap<String, i64>,
}

/// `POST /v1/dead-letters/purge`.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({ "filter": { "older_than_seconds": 86400 } }))]
pub struct PurgeBody {
    /// Which.
    pub filter: LetterFilter,
    /// Only tells how many.
    #[serde(default)]
    pub dry_run: bool,
}

/// Answer to `POST /v1/dead-letters/purge`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Purged {
    /// How many letters were, or would be, put away.
    pub purged: u64,
}
