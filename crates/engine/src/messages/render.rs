//! Instants as clients see them.

use chrono::{DateTime, SecondsFormat, Utc};

/// Formats an instant for clients: UTC, milliseconds, `Z`.
#[must_use]
pub fn timestamp(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Millis, true)
}
