//! What a workspace used.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::field::Timestamp;

/// The query of `GET /v1/workspace/usage`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct UsageQuery {
    /// From the minute, hour or day that this is in. Unless given: an hour before `until` by minutes, a day by hours, 30 days by days.
    #[serde(default)]
    #[param(value_type = Option<String>, format = DateTime)]
    pub since: Option<DateTime<Utc>>,
    /// Before this; now unless given.
    #[serde(default)]
    #[param(value_type = Option<String>, format = DateTime)]
    pub until: Option<DateTime<Utc>>,
    /// Into what minutes are added up: minute unless given.
    #[serde(default)]
    #[param(inline)]
    pub granularity: Option<Granularity>,
}

/// Into what minutes are added up. Hours and days are UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Granularity {
    /// Each by itself.
    Minute,
    /// By hours.
    Hour,
    /// By days.
    Day,
}

/// What a workspace used. Numbers come within about a minute after the minute that they are of.
#[derive(Debug, Serialize, ToSchema)]
pub struct WorkspaceUsage {
    /// Into what minutes were added up.
    pub granularity: Granularity,
    /// The first minute is of this time or later.
    pub since: Timestamp,
    /// The last one is before this time.
    pub until: Timestamp,
    /// What is of minutes before this does not change any more; null while nothing is final.
    pub final_until: Option<Timestamp>,
    /// Whiles in which something was used, oldest first.
    pub usage: Vec<UsageOfWhile>,
}

/// What was used in a minute, hour or day.
#[derive(Debug, Serialize, ToSchema)]
pub struct UsageOfWhile {
    /// When it began.
    pub at: Timestamp,
    /// Messages accepted.
    pub messages: i64,
    /// Deliveries of them, one for each recipient. Redeliveries are not counted.
    pub deliveries: i64,
    /// Deliveries acknowledged over a socket or by push.
    pub acked: i64,
    /// Deliveries settled by any means, each when no older one of its mailbox waits any more.
    pub settled: i64,
    /// Deliveries that were given up.
    pub dead_letters: i64,
    /// Actions invoked.
    pub invocations: i64,
    /// Tries to push deliveries over HTTP.
    pub push_attempts: i64,
}
