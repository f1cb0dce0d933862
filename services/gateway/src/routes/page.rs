//! Limits and cursors of lists.

use relay_domain::MessageId;
use relay_engine::{MessagePage, history};
use relay_wire::message::PageQuery;

use crate::error::ApiError;

/// A limit: the default when absent, the maximum when above it, refused when it is no positive number.
pub(super) fn limit(given: Option<&str>, (default, max): (i64, i64)) -> Result<i64, ApiError> {
    let Some(text) = given else {
        return Ok(default);
    };
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(0) => Err(invalid()),
        Ok(limit) if digits => Ok(max.min(limit)),
        // More digits than any number has is more than the maximum.
        Err(_) if digits => Ok(max),
        _ => Err(invalid()),
    }
}

/// A page of messages. Both cursors are message ids and exclusive.
pub(super) fn messages(query: &PageQuery) -> Result<MessagePage, ApiError> {
    Ok(MessagePage {
        before: cursor(query.before.as_deref())?,
        after: cursor(query.after.as_deref())?,
        limit: limit(query.limit.as_deref(), history::PAGE)?,
    })
}

/// A message id to begin at.
pub(super) fn cursor(given: Option<&str>) -> Result<Option<MessageId>, ApiError> {
    given.map(|text| text.parse().map_err(|_| invalid())).transpose()
}

fn invalid() -> ApiError {
    ApiError::invalid_request("Invalid pagination query")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_clamped_from_above_and_refused_from_below() {
        for (given, expected) in [
            (None, Some(50)),
            (Some("7"), Some(7)),
            (Some("1000"), Some(100)),
            (Some("99999999999999999999"), Some(100)),
            (Some("0"), None),
            (Some("-1"), None),
            (Some("+1"), None),
            (Some("1.5"), None),
            (Some(""), None),
            (Some("x"), None),
        ] {
            assert_eq!(limit(given, (50, 100)).ok(), expected, "{given:?}");
        }
    }
}
