//! Request and response bodies of the usage route.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::field::Timestamp;

/// Query of `GET /v1/workspace/usage`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct UsageQuery {
    /// Start, rounded down to the granularity. Default: an hour before `until` by minute, a day by hour, 30 days by
    /// day.
    #[serde(default)]
    #[param(value_type = Option<String>, format = DateTime)]
    pub since: Option<DateTime<Utc>>,
    /// End, exclusive; now by default.
    #[serde(default)]
    #[param(value_type = Option<String>, format = DateTime)]
    pub until: Option<DateTime<Utc>>,
    /// Length of the buckets; minute by default.
    #[serde(default)]
    #[param(inline)]
    pub granularity: Option<Granularity>,
}

/// Length of the buckets. Hours and days are UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Granularity {
    /// One minute.
    Minute,
    /// One hour, starting on the hour.
    Hour,
    /// One day, starting at midnight.
    Day,
}

/// Usage of a workspace. Numbers appear within about a minute after their minute.
#[derive(Debug, Serialize, ToSchema)]
pub struct WorkspaceUsage {
    /// Length of the buckets.
    pub granularity: Granularity,
    /// Start of the range, inclusive.
    pub since: Timestamp,
    /// End of the range, exclusive.
    pub until: Timestamp,
    /// Time before which numbers are final; null while none are.
    pub final_until: Option<Timestamp>,
    /// Non-empty buckets, oldest first.
    pub usage: Vec<UsageBucket>,
}

/// Usage in one minute, hour or day.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = UsageOfWhile)]
pub struct UsageBucket {
    /// Start of the bucket.
    pub at: Timestamp,
    /// Number of accepted messages.
    pub messages: i64,
    /// Number of deliveries, one per recipient. Redeliveries are not counted.
    pub deliveries: i64,
    /// Number of deliveries acknowledged over a socket or by http_push.
    pub acked: i64,
    /// Number of deliveries settled by any means, each counted when no older one in its mailbox is unsettled.
    pub settled: i64,
    /// Number of dead letters.
    pub dead_letters: i64,
    /// Number of invoked actions.
    pub invocations: i64,
    /// Number of http_push attempts.
    pub push_attempts: i64,
}
