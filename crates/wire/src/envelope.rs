//! Envelopes of all responses. Main types: [`Success`], [`Paged`] and [`Failure`]; constructed by the gateway.

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
