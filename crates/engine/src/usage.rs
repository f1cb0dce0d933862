//! What a workspace used, as its tenant and the operator may know it.

use chrono::{DateTime, DurationRound as _, TimeDelta, Utc};
use relay_domain::{WorkspaceScope, snowflake};
use relay_store::Store;
pub use relay_store::usage::{Granularity, Usage};

use crate::{Engine, EngineError, EngineResult, auth::Credential};

/// Whiles that one answer holds at most: more than a day of minutes, two months of hours.
const MOST: i32 = 1500;

/// Which while is asked for.
#[derive(Debug, Clone, Copy, Default)]
pub struct UsageQuery {
    /// From the minute, hour or day that this is in; unless given, an hour, a day or 30 days before `until`.
    pub since: Option<DateTime<Utc>>,
    /// Before this; now unless given, and never later.
    pub until: Option<DateTime<Utc>>,
    /// Into what minutes are added up.
    pub granularity: Option<Granularity>,
}

/// What a workspace used.
#[derive(Debug, serde::Serialize)]
pub struct UsageReport {
    /// Into what minutes were added up.
    #[serde(serialize_with = "word")]
    pub granularity: Granularity,
    /// The first minute is of this time or later.
    pub since: DateTime<Utc>,
    /// The last one is before this time.
    pub until: DateTime<Utc>,
    /// What began before this does not change any more; `None` while nothing is final.
    pub final_until: Option<DateTime<Utc>>,
    /// Whiles in which something was used, oldest first.
    pub usage: Vec<Usage>,
}

fn word<S: serde::Serializer>(granularity: &Granularity, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(granularity.as_str())
}

impl Engine {
    /// What the caller's workspace used. It is nothing of single agents.
    ///
    /// # Errors
    /// When the while is too long for its granularity, or the caller is an observer whose token names agents.
    pub async fn usage(&self, caller: &Credential, query: UsageQuery) -> EngineResult<UsageReport> {
        if caller.view().filters.agent_ids.is_some() {
            return Err(EngineError::InsufficientScope("activity:read of all agents".into()));
        }
        report(self.store(), caller.scope(), query, self.now()).await
    }
}

/// What a workspace used.
pub(crate) async fn report(
    store: &Store,
    scope: WorkspaceScope,
    query: UsageQuery,
    now: DateTime<Utc>,
) -> EngineResult<UsageReport> {
    let (since, until, granularity) = span(query, now)?;
    let (usage, final_until) = store.usage(scope, since, until, granularity).await?;
    Ok(UsageReport { granularity, since, until, final_until, usage })
}

fn span(query: UsageQuery, now: DateTime<Utc>) -> EngineResult<(DateTime<Utc>, DateTime<Utc>, Granularity)> {
    let granularity = query.granularity.unwrap_or(Granularity::Minute);
    let usual = match granularity {
        Granularity::Minute => TimeDelta::hours(1),
        Granularity::Hour => TimeDelta::days(1),
        Granularity::Day => TimeDelta::days(30),
    };
    let out_of_range = || EngineError::InvalidRequest("since or until is out of range".into());
    let until = query.until.unwrap_or(now).min(now);
    let since = match query.since {
        Some(since) => since,
        None => until.checked_sub_signed(usual).ok_or_else(out_of_range)?,
    };
    let since = since.duration_trunc(granularity.length()).map_err(|_| out_of_range())?;
    // What a timestamp of Postgres cannot be is before the epoch of the ids, too.
    if since.timestamp_millis() < snowflake::EPOCH_MS - usual.num_milliseconds() {
        return Err(out_of_range());
    }
    if until < since {
        return Err(EngineError::InvalidRequest("until must not be before since, nor since after now".into()));
    }
    if until - since > granularity.length() * MOST {
        let name = granularity.as_str();
        return Err(EngineError::InvalidRequest(format!(
            "that is more than {MOST} {name}s: ask for less, or by a longer granularity"
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

    fn spanned(since: Option<&str>, until: Option<&str>, granularity: Granularity) -> Option<(String, String)> {
        let query = UsageQuery { since: since.map(at), until: until.map(at), granularity: Some(granularity) };
        let (since, until, _) = span(query, at("2026-03-01T12:34:56Z")).ok()?;
        Some((since.to_rfc3339(), until.to_rfc3339()))
    }

    #[test]
    fn a_span_begins_with_a_whole_while_and_is_bounded() {
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
            assert_eq!(spanned(since, until, granularity), expected, "{since:?} {until:?} {granularity:?}");
        }
    }
}
