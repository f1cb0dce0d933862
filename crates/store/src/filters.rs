//! An observer's filters as parameters of queries, so that lists are full although something is hidden.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, ChannelId, observer::ObserverFilters, snowflake};

/// The ids of the only channels to be shown, if they are limited.
pub(crate) fn channel_ids(filters: &ObserverFilters) -> Option<Vec<i64>> {
    filters.channel_ids.as_ref().map(|ids| ids.iter().map(|id| ChannelId::get(*id)).collect())
}

/// The ids of the only authors to be shown, if they are limited.
pub(crate) fn agent_ids(filters: &ObserverFilters) -> Option<Vec<i64>> {
    filters.agent_ids.as_ref().map(|ids| ids.iter().map(|id| AgentId::get(*id)).collect())
}

/// Before the first instant to be shown, and a message id that everything to be shown is above.
///
/// A message's id may be a little older than its row says.
pub(crate) fn not_before(filters: &ObserverFilters) -> (DateTime<Utc>, i64) {
    const SLACK_MS: i64 = 60_000;
    match filters.created_after {
        None => (DateTime::UNIX_EPOCH, -1),
        Some(at) => (at, snowflake::first_at_ms(at.timestamp_millis() - SLACK_MS) - 1),
    }
}
