//! One call to a tenant's endpoint, and what its answer says to all kinds of deliveries.

use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, TimeDelta, Utc};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use relay_domain::workspaces::family::FamilyId;
use relay_egress::{Answer, CallOptions, Client, Failure, Target, Tenant};
use tracing::{Instrument as _, Span};

/// Request to an endpoint.
#[derive(Debug)]
pub(crate) struct HttpCall {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// Makes one call for a tenant, as a child of the trace in `traceparent`, if there is one, under the span that
/// `make_span` creates.
pub(crate) async fn post(
    client: &Client,
    family: FamilyId,
    target: &Target,
    call: HttpCall,
    traceparent: Option<&str>,
    make_span: impl FnOnce() -> Span,
) -> Result<Answer, Failure> {
    let span = relay_trace::child_span(traceparent, make_span);
    let HttpCall { mut headers, body } = call;
    relay_trace::insert_traceparent(&mut headers, span.as_ref(), traceparent);
    let options = CallOptions { tenant: Tenant(family.root().get()), ..CallOptions::default() };
    let post = client.post(target, headers, body, options);
    post.instrument(span.unwrap_or_else(Span::none)).await
}

/// Sets a header. Names and values were checked when the endpoint was registered; an invalid one is left out.
pub(crate) fn set_header(headers: &mut HeaderMap, name: &str, value: &str) {
    if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), HeaderValue::from_str(value)) {
        headers.insert(name, value);
    }
}

/// Parses `Retry-After`: seconds or a date (RFC 9110, 10.2.3).
pub(crate) fn retry_after(headers: &HeaderMap, now: DateTime<Utc>) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let at = DateTime::parse_from_rfc2822(text).ok()?;
    // A date that has passed is a wait of no time.
    Some((at.with_timezone(&Utc) - now).to_std().unwrap_or_default())
}

/// Returns an error text of at most so many characters.
pub(crate) fn bounded(error: &str, most_chars: usize) -> String {
    error.chars().take(most_chars).collect()
}

/// Returns the instant after a pause. Pauses are bounded by a day, so that the sum exists.
pub(crate) fn instant_after(now: DateTime<Utc>, pause: Duration) -> DateTime<Utc> {
    let pause = TimeDelta::from_std(pause).unwrap_or(TimeDelta::MAX);
    now.checked_add_signed(pause).unwrap_or(DateTime::<Utc>::MAX_UTC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now = DateTime::parse_from_rfc3339("2026-05-01T10:00:00Z").unwrap().with_timezone(&Utc);
        for (text, seconds) in [
            ("120", Some(120)),
            ("0", Some(0)),
            ("Fri, 01 May 2026 10:01:00 GMT", Some(60)),
            ("Fri, 01 May 2026 09:00:00 GMT", Some(0)),
            ("soon", None),
            ("-5", None),
        ] {
            let headers = HeaderMap::from_iter([(header::RETRY_AFTER, text.parse().unwrap())]);
            assert_eq!(retry_after(&headers, now).map(|wait| wait.as_secs()), seconds, "{text}");
        }
        assert_eq!(retry_after(&HeaderMap::new(), now), None);
    }
}
