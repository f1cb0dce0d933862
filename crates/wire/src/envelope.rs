//! Envelopes of all responses. Main types: [`Success`], [`Paged`], [`ListFrame`] and [`Failure`]; constructed by the
//! gateway.

use serde::Serialize;
use utoipa::ToSchema;

/// Envelope of a success: `{"ok":true,"data":…}`. `data` is always present, for strict clients.
#[derive(Debug, Clone, Serialize)]
pub struct Success<T> {
    ok: bool,
    data: T,
}

impl<T> Success<T> {
    /// Wraps the data of a response.
    pub const fn new(data: T) -> Self {
        Self { ok: true, data }
    }
}

/// Envelope of a page of a list: `cursor` names the start of the next page.
#[derive(Debug, Clone, Serialize)]
pub struct Paged<T> {
    ok: bool,
    data: Vec<T>,
    cursor: Cursor,
}

/// Position of the next page.
#[derive(Debug, Clone, Serialize)]
struct Cursor {
    next: Option<String>,
    has_more: bool,
}

impl<T> Paged<T> {
    /// Wraps a page. `None` marks the last page.
    #[must_use]
    pub const fn new(data: Vec<T>, next: Option<String>) -> Self {
        Self { ok: true, data, cursor: Cursor { has_more: next.is_some(), next } }
    }
}

/// Text around the items of a list that is sent a few items at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListFrame {
    /// Text before the first item.
    pub open: String,
    /// Text after the last item.
    pub close: String,
}

impl ListFrame {
    /// Cuts a response at its last empty array, whose items are sent apart from it.
    ///
    /// # Errors
    /// When the response does not encode, or has no empty array.
    pub fn split_at_items<T: Serialize>(response: &T) -> Result<Self, serde_json::Error> {
        let text = serde_json::to_string(response)?;
        // From the end: a text in an earlier field may contain `[]`.
        let (open, close) =
            text.rsplit_once("[]").ok_or_else(|| <serde_json::Error as serde::ser::Error>::custom("no empty array"))?;
        Ok(Self { open: format!("{open}["), close: format!("]{close}") })
    }
}

/// Envelope of an error: `{"ok":false,"error":{"code","message"}}`.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Failure<'a> {
    /// Always false.
    #[schema(example = false)]
    ok: bool,
    /// Error details.
    error: ErrorBody<'a>,
}

impl<'a> Failure<'a> {
    /// Wraps a stable code and a text for people.
    #[must_use]
    pub const fn new(code: &'a str, message: &'a str) -> Self {
        Self { ok: false, error: ErrorBody { code, message } }
    }
}

/// Details of an error.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ErrorBody<'a> {
    /// Stable code for programs.
    #[schema(pattern = "^[a-z0-9_]+$", example = "invalid_request")]
    code: &'a str,
    /// Text for people; it may change.
    #[schema(min_length = 1, example = "Invalid request")]
    message: &'a str,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channels::conversation::MessagesPage;

    #[test]
    fn a_list_is_the_same_whether_it_is_sent_whole_or_in_parts() {
        let framed = |frame: ListFrame| format!("{}1,2{}", frame.open, frame.close);
        let list = ListFrame::split_at_items(&Success::new(Vec::<u8>::new())).unwrap();
        assert_eq!(framed(list), serde_json::to_string(&Success::new([1, 2])).unwrap());
        let page = ListFrame::split_at_items(&Paged::<u8>::new(Vec::new(), Some("c1".into()))).unwrap();
        assert_eq!(framed(page), serde_json::to_string(&Paged::new(vec![1, 2], Some("c1".into()))).unwrap());
        let empty = MessagesPage { messages: Vec::new(), next_before: Some("7".into()), exhausted: false };
        let page = ListFrame::split_at_items(&Success::new(empty)).unwrap();
        assert_eq!(framed(page), r#"{"ok":true,"data":{"messages":[1,2],"next_before":"7","exhausted":false}}"#);
        assert!(ListFrame::split_at_items(&Success::new(1)).is_err());
    }
}
