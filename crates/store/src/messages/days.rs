//! UTC days, the partition keys of messages and deliveries. A statement that binds the day reads one partition instead
//! of all.

use chrono::{DateTime, NaiveDate, Utc};
use relay_domain::snowflake;

/// Returns the day of an instant.
pub(crate) fn day_of(at: DateTime<Utc>) -> NaiveDate {
    at.date_naive()
}

/// Returns the day on which a snowflake id was generated, which is the day of the message or invocation.
pub(crate) fn day_of_id(id: i64) -> NaiveDate {
    // Every id of 63 bits lies within the range of dates.
    DateTime::from_timestamp_millis(snowflake::created_at_ms(id)).unwrap_or_default().date_naive()
}
