//! Request and response bodies of the dead letter routes.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::field::Timestamp;

/// Query of `GET /v1/dead-letters` and `GET /v1/dead-letters/summary`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct DeadLettersQuery {
    /// Only this recipient, by name or id.
    #[serde(default)]
    pub agent: Option<String>,
    /// Only recipients on this node, by name or id.
    #[serde(default)]
    pub node: Option<String>,
    /// Reason filter: ttl_expired, agent_deleted, session_gone, attempts_exhausted, rejected or lost_in_restore.
    #[serde(default)]
    pub reason: Option<String>,
    /// Only dead letters created at this time or later.
    #[serde(default)]
    #[param(value_type = Option<String>, format = DateTime)]
    pub since: Option<DateTime<Utc>>,
    /// Only dead letters created before this time.
    #[serde(default)]
    #[param(value_type = Option<String>, format = DateTime)]
    pub until: Option<DateTime<Utc>>,
    /// Cursor: the id of the last dead letter of the previous page.
    #[serde(default)]
    pub before: Option<String>,
    /// Page size: 100 by default, at most 200.
    #[serde(default)]
    #[param(value_type = Option<i64>, minimum = 1)]
    pub limit: Option<String>,
}

/// Dead letter: a delivery that was given up.
#[derive(Debug, Serialize, ToSchema)]
pub struct DeadLetter {
    /// Id of the delivery.
    #[schema(example = "del_243812100000000001_243812050000000001")]
    pub delivery_id: String,
    /// Id of the message.
    pub message_id: String,
    /// Id of the recipient.
    pub agent_id: String,
    /// Name of the recipient.
    pub agent_name: Option<String>,
    /// Name of the sender.
    pub sender_name: Option<String>,
    /// Id of the message's channel.
    pub channel_id: Option<String>,
    /// Id of the recipient's node.
    pub node_id: String,
    /// Position in the mailbox.
    pub seq: i64,
    /// Reason: ttl_expired, agent_deleted, session_gone, attempts_exhausted, rejected or lost_in_restore.
    pub reason: String,
    /// Error text, if there is one.
    pub error: Option<String>,
    /// Number of earlier redrives of the message to this recipient.
    pub redrive_count: i16,
    /// Id of the delivery created by its redrive.
    pub redriven_as: Option<String>,
    /// Time of the redrive.
    pub redriven_at: Option<Timestamp>,
    /// Time at which the delivery was created.
    pub created_at: Timestamp,
    /// Time at which the delivery expired or would have expired.
    pub expires_at: Timestamp,
    /// Time at which it became a dead letter.
    pub dead_lettered_at: Timestamp,
}

/// Numbers of dead letters.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LetterSummary)]
pub struct DeadLetterSummary {
    /// Number of all dead letters.
    pub total: i64,
    /// Numbers by reason; reasons without dead letters are omitted.
    pub by_reason: BTreeMap<String, i64>,
}

/// Filter of dead letters. An empty filter selects all.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(as = LetterFilter)]
pub struct DeadLetterFilter {
    /// Only this recipient, by name or id.
    #[serde(default)]
    pub agent: Option<String>,
    /// Only recipients on this node, by name or id.
    #[serde(default)]
    pub node: Option<String>,
    /// Only dead letters with this reason.
    #[serde(default)]
    pub reason: Option<String>,
    /// Only dead letters created at this time or later.
    #[serde(default)]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub since: Option<DateTime<Utc>>,
    /// Only dead letters created before this time.
    #[serde(default)]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub until: Option<DateTime<Utc>>,
    /// Only dead letters that are at least this many seconds old.
    #[serde(default)]
    #[schema(minimum = 0)]
    pub older_than_seconds: Option<u32>,
}

/// Body of `POST /v1/dead-letters/redrive`: exactly one of `delivery_id` and `filter`.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({ "filter": { "agent": "bob", "reason": "ttl_expired" }, "rate": 100 }))]
pub struct RedriveBody {
    /// Id of the dead letter to redrive.
    #[serde(default)]
    pub delivery_id: Option<String>,
    /// Filter of the dead letters to redrive in the background.
    #[serde(default)]
    pub filter: Option<DeadLetterFilter>,
    /// `true` only reports the dead letters that would be redriven.
    #[serde(default)]
    pub dry_run: bool,
    /// Rate in dead letters per second; 100 by default.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 2000)]
    pub rate: Option<i32>,
}

/// Response of `POST /v1/dead-letters/redrive` and `GET /v1/dead-letters/redrives/:id`.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum RedriveAnswer {
    /// One dead letter was redriven.
    One(Redriven),
    /// A redrive by filter was started.
    Many(Redrive),
    /// Result of a dry run.
    Dry(DryRun),
}

/// Redriven dead letter.
#[derive(Debug, Serialize, ToSchema)]
pub struct Redriven {
    /// The dead letter.
    #[schema(example = "del_243812100000000001_243812050000000001")]
    pub delivery_id: String,
    /// Id of the new delivery; its message id on the wire is distinct too (`…_r1`).
    #[schema(example = "del_243812100000000001_243812050000000001_r1")]
    pub redriven_as: String,
    /// Position in the mailbox.
    pub seq: i64,
}

/// Redrive by filter.
#[derive(Debug, Serialize, ToSchema)]
pub struct Redrive {
    /// Id of the redrive.
    #[schema(example = "243812700000000001")]
    pub redrive_id: String,
    /// running or finished.
    #[schema(example = "running")]
    pub status: &'static str,
    /// Rate in dead letters per second.
    pub rate: i32,
    /// Number of dead letters that matched when it began.
    pub matched: i64,
    /// Number of redriven dead letters.
    pub redriven: i64,
    /// Number of dead letters that cannot be redriven: redriven three times already, a mailbox that stays full, or a
    /// deleted agent or message.
    pub refused: i64,
    /// Time at which it began.
    pub created_at: Timestamp,
    /// Time at which it finished.
    pub finished_at: Option<Timestamp>,
}

/// Result of a redrive's dry run.
#[derive(Debug, Serialize, ToSchema)]
pub struct DryRun {
    /// Always true.
    pub dry_run: bool,
    /// Number of matching dead letters.
    pub matched: i64,
    /// Numbers of matching dead letters by reason.
    pub by_reason: BTreeMap<String, i64>,
}

/// Body of `POST /v1/dead-letters/purge`.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({ "filter": { "older_than_seconds": 86400 } }))]
pub struct PurgeBody {
    /// Filter of the dead letters to purge.
    pub filter: DeadLetterFilter,
    /// `true` only reports the number.
    #[serde(default)]
    pub dry_run: bool,
}

/// Response of `POST /v1/dead-letters/purge`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Purged {
    /// Number of dead letters that were, or would be, purged.
    pub purged: u64,
}
