//! What every answer is wrapped in.

use serde::Serialize;
use utoipa::ToSchema;

/// A success: `{"ok":true,"data":…}`. `data` is always there, for strict clients.
#[derive(Debug, Clone, Serialize)]
pub struct Success<T> {
    ok: bool,
    data: T,
}

impl<T> Success<T> {
    /// Wraps an answer.
    pub const fn new(data: T) -> Self {
        Self { ok: true, data }
    }
}

/// A success that is a page of a list: `cursor` says where the next one begins.
#[derive(Debug, Clone, Serialize)]
pub struct Paged<T> {
    ok: bool,
    data: Vec<T>,
    cursor: Cursor,
}

/// Where the next page begins.
#[derive(Debug, Clone, Serialize)]
struct Cursor {
    next: Option<String>,
    has_more: bool,
}

impl<T> Paged<T> {
    /// Wraps a page. Without a next one there is no more.
    #[must_use]
    pub const fn new(data: Vec<T>, next: Option<String>) -> Self {
        Self { ok: true, data, cursor: Cursor { has_more: next.is_some(), next } }
    }
}

/// A refusal or failure: `{"ok":false,"error":{"code","message"}}`.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Failure<'a> {
    /// Always false.
    #[schema(example = false)]
    ok: bool,
    /// Why.
    error: ErrorBody<'a>,
}

impl<'a> Failure<'a> {
    /// Wraps a stable code and a text for people.
    #[must_use]
    pub const fn new(code: &'a str, message: &'a str) -> Self {
        Self { ok: false, error: ErrorBody { code, message } }
    }
}

/// Why something was refused or failed.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ErrorBody<'a> {
    /// A stable word for programs.
    #[schema(pattern = "^[a-z0-9_]+$", example = "invalid_request")]
    code: &'a str,
    /// A text for people; it may change.
    #[schema(min_length = 1, example = "Invalid request")]
    message: &'a str,
}
