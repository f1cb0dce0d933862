//! Usage of a workspace over time ([`UsageBucket`]) and its counters ([`WorkspaceMetrics`]). Read by the store, shown
//! by the routes of usage and metrics and by relayctl.

use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;

/// Length of a usage bucket; hours and days are those of UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granularity {
    Minute,
    Hour,
    Day,
}

impl Granularity {
    /// Returns the name in requests, responses and `date_trunc`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Minute => "minute",
            Self::Hour => "hour",
            Self::Day => "day",
        }
    }

    /// Returns the length of one bucket.
    #[must_use]
    pub const fn length(self) -> TimeDelta {
        match self {
            Self::Minute => TimeDelta::minutes(1),
            Self::Hour => TimeDelta::hours(1),
            Self::Day => TimeDelta::days(1),
        }
    }
}

/// Usage of one workspace in one time bucket. Empty buckets have no row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct UsageBucket {
    /// Start of the bucket.
    pub at: DateTime<Utc>,
    pub messages: i64,
    /// Deliveries of the messages, one per recipient.
    pub deliveries: i64,
    /// Deliveries below the ack floor: acknowledged over a socket or by push.
    pub acked: i64,
    /// Deliveries below the settled floor: settled by any means, and all older ones too.
    pub settled: i64,
    pub dead_letters: i64,
    pub invocations: i64,
    /// Attempts over http_push.
    pub push_attempts: i64,
}

/// Metrics of a workspace. Mailbox figures include deleted agents, so that these counters never fall.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "sqlx", derive(sqlx::FromRow))]
pub struct WorkspaceMetrics {
    /// Messages accepted and indexed, including removed ones; lags by some hundred milliseconds.
    pub accepted: i64,
    /// Deliveries written.
    pub written: i64,
    /// Deliveries recorded as written to a socket.
    pub sent: i64,
    /// Deliveries acknowledged over a socket.
    pub acked: i64,
    /// Deliveries settled by any means.
    pub settled: i64,
    /// Dead letters within retention.
    pub dead_letters: i64,
    /// Largest number of unsettled deliveries of one agent that is not deleted.
    pub largest_lag: i64,
    /// Agents that are not deleted.
    pub agents: i64,
    /// Nodes with a connected provider.
    pub nodes_connected: i64,
}
