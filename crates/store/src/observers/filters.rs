//! Filters of an observer as query parameters, so that a page is full although rows are hidden.

use chrono::{DateTime, Utc};
use relay_domain::{AgentId, ChannelId, observers::ObserverFilters, snowflake};

/// Returns the ids of the visible channels; `None` without a restriction.
pub(crate) fn channel_ids(filters: &ObserverFilters) -> Option<&[ChannelId]> {
    filters.channel_ids.as_deref()
}

/// Returns the ids of the visible authors; `None` without a restriction.
pub(crate) fn agent_ids(filters: &ObserverFilters) -> Option<&[AgentId]> {
    filters.agent_ids.as_deref()
}

/// Returns the first visible instant, and an exclusive lower bound for the ids of visible messages.
pub(crate) fn not_before(filters: &ObserverFilters) -> (DateTime<Utc>, i64) {
    // A message id is taken before `created_at`; the bound only limits the index range, the instant decides.
    const SLACK_MS: i64 = 60_000;
    match filters.created_after {
        None => (DateTime::UNIX_EPOCH, -1),
        Some(at) => (at, snowflake::first_id_at(at.timestamp_millis() - SLACK_MS) - 1),
    }
}
