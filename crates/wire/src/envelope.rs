//! What every answer is wrapped in.

use serde::Serialize;

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

/// A refusal or failure: `{"ok":false,"error":{"code","message"}}`.
#[derive(Debug, Clone, Serialize)]
pub struct Failure<'a> {
    ok: bool,
    error: ErrorBody<'a>,
}

impl<'a> Failure<'a> {
    /// Wraps a stable code and a text for people.
    #[must_use]
    pub const fn new(code: &'a str, message: &'a str) -> Self {
        Self { ok: false, error: ErrorBody { code, message } }
    }
}

#[derive(Debug, Clone, Serialize)]
struct ErrorBody<'a> {
    code: &'a str,
    message: &'a str,
}
