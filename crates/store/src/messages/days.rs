//! UTC days, the partition keys of messages and deliveries. A statement that binds the day reads one partition instead
//! of all.

use chrono::{DateTime, NaiveDate, Utc};
use relay_domain::snowflake;

/// SQL that joins, as `m`, the messages of workspace `$1` whose keys are `k (message_id, created_on)`. `OFFSET 0`
/// leaves the planner no other way than the whole key: while a day's partition has no statistics, it would rather read
/// every message of the workspace.
pub(crate) const MESSAGES_BY_KEY: &str = "CROSS JOIN LATERAL (
    SELECT * FROM messages
     WHERE workspace_id = $1 AND message_id = k.message_id AND created_on = k.created_on
    OFFSET 0) AS m";

/// SQL: the last day that may have rows. Partitions are created in advance; a statement with this bound leaves out the
/// empty ones before it begins. The day of slack is for the clocks of other processes.
pub(crate) const LAST_DAY: &str = "((relay_now() AT TIME ZONE 'UTC')::date + 1)";

/// Returns the day of an instant.
pub(crate) fn day_of(at: DateTime<Utc>) -> NaiveDate {
    at.date_naive()
}

/// Returns the day on which a snowflake id was generated, which is the day of the message or invocation.
pub(crate) fn day_of_id(id: i64) -> NaiveDate {
    // Every id of 63 bits lies within the range of dates.
    DateTime::from_timestamp_millis(snowflake::created_at_ms(id)).unwrap_or_default().date_naive()
}
