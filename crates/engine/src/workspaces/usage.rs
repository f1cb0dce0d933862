//! Usage of a workspace, for its tenant and for operators.

use chrono::{DateTime, DurationRound as _, TimeDelta, Utc};
use relay_domain::{
    WorkspaceScope, snowflake,
    workspaces::usage::{Granularity, UsageBucket},
};
use relay_store::Store;

use super::Workspaces;
use crate::{EngineError, EngineResult, access::callers::Credential, error::Denial};

/// Bound of the buckets in one response: more than a day of minutes, two months of hours.
const MAX_BUCKETS: i32 = 1500;

/// Time range of a usage report.
#[derive(Debug, Clone, Copy, Default)]
pub struct UsageQuery {
    /// Rounded down to its minute, hour or day. Defaults to an hour, a day or 30 days before `until`.
    pub since: Option<DateTime<Utc>>,
    /// Exclusive; defaults to now, and is never later.
    pub until: Option<DateTime<Utc>>,
    /// Size of the buckets.
    pub granularity: Option<Granularity>,
}

#[derive(Debug, serde::Serialize)]
pub struct UsageReport {
    /// Size of the buckets.
    #[serde(serialize_with = "serialize_granularity")]
    pub granularity: Granularity,
    /// Start of the first bucket.
    pub since: DateTime<Utc>,
    /// Exclusive end of the last bucket.
    pub until: DateTime<Utc>,
    /// Buckets before this time are final; `None` while none are.
    pub final_until: Option<DateTime<Utc>>,
    /// Usage by bucket, oldest first; empty buckets have no row.
    pub usage: Vec<UsageBucket>,
}

fn serialize_granularity<S: serde::Serializer>(granularity: &Granularity, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(granularity.as_str())
}

impl Workspaces {
    /// Returns the usage of the caller's workspace, never of single agents.
    ///
    /// # Errors
    /// When the range is too long for its granularity, or the caller is an observer whose token names agents.
    pub async fn usage(&self, caller: &Credential, query: UsageQuery) -> EngineResult<UsageReport> {
        if caller.view().filters.agent_ids.is_some() {
            return Err(EngineError::Forbidden(Denial::InsufficientScope("activity:read of all agents".into())));
        }
        let _permit = self.core.acquire_scan_permit(caller.scope()).await?;
        usage_report(&self.core.store, caller.scope(), query, self.core.now()).await
    }
}

pub async fn usage_report(
    store: &Store,
    scope: WorkspaceScope,
    query: UsageQuery,
    now: DateTime<Utc>,
) -> EngineResult<UsageReport> {
    let (since, until, granularity) = resolve_range(query, now)?;
    let (usage, final_until) = store.usage(scope, since, until, granularity).await?;
    Ok(UsageReport { granularity, since, until, final_until, usage })
}

fn resolve_range(query: UsageQuery, now: DateTime<Utc>) -> EngineResult<(DateTime<Utc>, DateTime<Utc>, Granularity)> {
    let granularity = query.granularity.unwrap_or(Granularity::Minute);
    let usual = match granularity {
        Granularity::Minute => TimeDelta::hours(1),
        Granularity::Hour => TimeDelta::days(1),
        Granularity::Day => TimeDelta::days(30),
    };
    let out_of_range = || EngineError::invalid_request("since or until is out of range");
    let until = query.until.unwrap_or(now).min(now);
    let since = match query.since {
        Some(since) => since,
        None => until.checked_sub_signed(usual).ok_or_else(out_of_range)?,
    };
    let since = since.duration_trunc(granularity.length()).map_err(|_| out_of_range())?;
    // A time that Postgres cannot represent is before the epoch of the ids, too.
    if since.timestamp_millis() < snowflake::EPOCH_MS - usual.num_milliseconds() {
        return Err(out_of_range());
    }
    if until < since {
        return Err(EngineError::invalid_request("until must not be before since, nor since after now"));
    }
    if until - since > granularity.length() * MAX_BUCKETS {
        let name = granularity.as_str();
        return Err(EngineError::invalid_request(format!(
            "that is more than {MAX_BUCKETS} {name}s: ask for less, or by a longer granularity"
        )));
    }
    Ok((since, until, granularity))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> DateTime<Utc> {
        text.parse().unwrap()
    }

    fn resolved(since: Option<&str>, until: Option<&str>, granularity: Granularity) -> Option<(String, String)> {
        let query = UsageQuery { since: since.map(at), until: until.map(at), granularity: Some(granularity) };
        let (since, until, _) = resolve_range(query, at("2026-03-01T12:34:56Z")).ok()?;
        Some((since.to_rfc3339(), until.to_rfc3339()))
    }

    #[test]
    fn ranges_start_at_a_whole_bucket_and_are_bounded() {
        use Granularity::{Day, Hour, Minute};
        let now = "2026-03-01T12:34:56+00:00";
        for (since, until, granularity, expected) in [
            (None, None, Minute, Some(("2026-03-01T11:34:00+00:00", now))),
            (None, None, Hour, Some(("2026-02-28T12:00:00+00:00", now))),
            (None, None, Day, Some(("2026-01-30T00:00:00+00:00", now))),
            (Some("2026-03-01T12:00:30Z"), None, Minute, Some(("2026-03-01T12:00:00+00:00", now))),
            (Some("2026-03-01T12:30:00Z"), Some("2026-03-01T12:00:00Z"), Minute, None),
            (Some("2026-02-27T12:00:00Z"), None, Minute, None),
            (Some("2026-02-27T12:00:00Z"), None, Hour, Some(("2026-02-27T12:00:00+00:00", now))),
            (Some("2025-11-01T00:00:00Z"), None, Hour, None),
            (Some("0001-01-01T00:00:00Z"), None, Day, None),
            (None, Some("1990-01-01T00:00:00Z"), Day, None),
            (Some("2026-03-01T12:35:00Z"), None, Minute, None),
        ] {
            let expected = expected.map(|(since, until)| (since.to_owned(), until.to_owned()));
            assert_eq!(resolved(since, until, granularity), expected, "{since:?} {until:?} {granularity:?}");
        }
    }
}
