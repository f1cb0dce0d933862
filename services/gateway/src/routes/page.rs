//! Parsing of limits and cursors, for all list routes.

use relay_domain::{MessageId, messages::MessagePage};
use relay_engine::messages::history;
use relay_wire::messages::PageQuery;

use crate::error::ApiError;

/// Parses a limit: the default if absent, clamped to the maximum, refused if not a positive number.
pub(super) fn parse_limit(text: Option<&str>, (default, max): (i64, i64)) -> Result<i64, ApiError> {
    let Some(text) = text else {
        return Ok(default);
    };
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(0) => Err(invalid_pagination()),
        Ok(limit) if digits => Ok(max.min(limit)),
        // A number that overflows is above the maximum.
        Err(_) if digits => Ok(max),
        _ => Err(invalid_pagination()),
    }
}

/// Parses a limit that is refused above the maximum, where clients would take a shorter page for the last one.
pub(super) fn parse_strict_limit(text: Option<&str>, (default, max): (i64, i64)) -> Result<i64, ApiError> {
    let limit = parse_limit(text, (default, max + 1))?;
    if limit > max {
        return Err(ApiError::invalid_request(format!("limit must be at most {max}")));
    }
    Ok(limit)
}

/// Parses a page of messages. Both cursors are message ids and exclusive.
pub(super) fn parse_message_page(query: &PageQuery) -> Result<MessagePage, ApiError> {
    Ok(MessagePage {
        before: parse_cursor(query.before.as_deref())?,
        after: parse_cursor(query.after.as_deref())?,
        limit: parse_limit(query.limit.as_deref(), history::PAGE)?,
    })
}

/// Parses a message id used as a cursor.
pub(super) fn parse_cursor(text: Option<&str>) -> Result<Option<MessageId>, ApiError> {
    text.map(|text| text.parse().map_err(|_| invalid_pagination())).transpose()
}

fn invalid_pagination() -> ApiError {
    ApiError::invalid_request("Invalid pagination query")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_clamped_from_above_and_refused_from_below() {
        for (text, expected) in [
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
            assert_eq!(parse_limit(text, (50, 100)).ok(), expected, "{text:?}");
        }
    }
}
