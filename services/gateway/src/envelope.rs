//! Response envelope: every response except 204 is JSON with a boolean `ok`. Used by all handlers.

use axum::{
    Json,
    http::{HeaderName, HeaderValue, StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use relay_tasks::byte_budget::ByteLease;
use relay_wire::envelope::Success;
use serde::Serialize;

use crate::list_reply::{held_bytes, not_encoded};

/// Header of a response that repeats an earlier one.
pub const IDEMPOTENCY_REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");

/// Successful response with `data`.
#[derive(Debug)]
pub struct Reply<T> {
    status: StatusCode,
    replayed: bool,
    memory: Option<ByteLease>,
    data: T,
}

impl<T> Reply<T> {
    /// 200.
    pub const fn ok(data: T) -> Self {
        Self { status: StatusCode::OK, replayed: false, memory: None, data }
    }

    /// 201.
    pub const fn created(data: T) -> Self {
        Self { status: StatusCode::CREATED, replayed: false, memory: None, data }
    }

    /// Any success status.
    pub const fn with_status(status: StatusCode, data: T) -> Self {
        Self { status, replayed: false, memory: None, data }
    }

    /// Marks the response as a repetition under the same idempotency key.
    #[must_use]
    pub fn replayed(mut self, replayed: bool) -> Self {
        self.replayed = replayed;
        self
    }
}

impl<T> Reply<T> {
    /// Holds the memory of the data until they are sent.
    #[must_use]
    pub fn holding(mut self, memory: ByteLease) -> Self {
        self.memory = Some(memory);
        self
    }
}

impl<T: Serialize> IntoResponse for Reply<T> {
    fn into_response(self) -> Response {
        let body = Success::new(self.data);
        let mut response = match self.memory {
            None => (self.status, Json(body)).into_response(),
            // Not by `Json`, whose text could not hold the memory until it is sent.
            Some(memory) => match serde_json::to_vec(&body) {
                Ok(text) => {
                    (self.status, [(CONTENT_TYPE, "application/json")], held_bytes(text, memory)).into_response()
                }
                Err(error) => not_encoded(&error).into_response(),
            },
        };
        if self.replayed {
            response.headers_mut().insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("true"));
        }
        response
    }
}

/// Successful response with `data`.
#[must_use]
pub const fn acknowledged() -> Reply<()> {
    Reply::ok(())
}

/// 204 without a body.
#[derive(Debug, Clone, Copy)]
pub struct NoContent;

impl IntoResponse for NoContent {
    fn into_response(self) -> Response {
        StatusCode::NO_CONTENT.into_response()
    }
}
