//! [`ListReply`]: a list that is encoded and sent a part at a time. Used by the routes that list message bodies.

use std::marker::PhantomData;

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use futures::StreamExt as _;
use relay_engine::parts::{Part, Parts};
use relay_tasks::byte_budget::ByteLease;
use relay_wire::envelope::{ListFrame, Success};
use serde::Serialize;

use crate::error::ApiError;

/// Successful response whose items are read while it is sent. A failure after the first part breaks the connection,
/// so that no client takes the list for complete.
pub struct ListReply<T> {
    response: Response,
    _item: PhantomData<T>,
}

impl<T: Serialize + Send + 'static> ListReply<T> {
    /// Responds with a list that is empty.
    pub fn empty() -> Result<Self, ApiError> {
        let text = serde_json::to_vec(&Success::new(Vec::<()>::new())).map_err(|error| not_encoded(&error))?;
        Ok(Self::json(Body::from(text)))
    }

    /// Responds with a list of `parts`.
    pub fn list(parts: Parts<T>) -> Result<Self, ApiError> {
        Self::framed(&Success::new(Vec::<()>::new()), parts)
    }

    /// Responds with a structure whose last empty array gets the items of `parts`.
    pub fn framed(structure: &impl Serialize, parts: Parts<T>) -> Result<Self, ApiError> {
        let frame = ListFrame::split_at_items(structure).map_err(|error| not_encoded(&error))?;
        let mut encoder = Encoder { text: frame.open.into_bytes(), has_items: false };
        let Part { rows, memory } = parts.first;
        // Before the status is sent: a failure of the first part is still answered with 500.
        encoder.push(rows).map_err(|error| not_encoded(&error))?;
        let body = match parts.rest {
            None => {
                encoder.text.extend_from_slice(frame.close.as_bytes());
                Body::from(encoder.take(memory))
            }
            Some(rest) => {
                let first = futures::stream::iter([Ok::<_, axum::Error>(encoder.take(memory))]);
                let rest = rest.map(move |part| {
                    let Part { rows, memory } = part.map_err(axum::Error::new)?;
                    encoder.push(rows).map_err(axum::Error::new)?;
                    Ok::<_, axum::Error>(encoder.take(memory))
                });
                let close = futures::stream::iter([Ok(Bytes::from(frame.close))]);
                Body::from_stream(first.chain(rest).chain(close))
            }
        };
        Ok(Self::json(body))
    }

    fn json(body: Body) -> Self {
        let mut response = Response::new(body);
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Self { response, _item: PhantomData }
    }
}

impl<T> IntoResponse for ListReply<T> {
    fn into_response(self) -> Response {
        self.response
    }
}

/// Encodes bytes that hold their memory until they are sent.
pub(crate) fn held_bytes(text: Vec<u8>, memory: ByteLease) -> Bytes {
    Bytes::from_owner(HeldText { text, _memory: memory })
}

struct HeldText {
    text: Vec<u8>,
    _memory: ByteLease,
}

impl AsRef<[u8]> for HeldText {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

struct Encoder {
    text: Vec<u8>,
    has_items: bool,
}

impl Encoder {
    /// Encodes items; each is freed as soon as it is encoded.
    fn push<T: Serialize>(&mut self, rows: Vec<T>) -> Result<(), serde_json::Error> {
        for row in rows {
            if self.has_items {
                self.text.push(b',');
            }
            self.has_items = true;
            serde_json::to_writer(&mut self.text, &row)?;
        }
        Ok(())
    }

    fn take(&mut self, memory: ByteLease) -> Bytes {
        held_bytes(std::mem::take(&mut self.text), memory)
    }
}

pub(crate) fn not_encoded(error: &serde_json::Error) -> ApiError {
    tracing::error!(error = error as &dyn std::error::Error, "a response could not be encoded");
    ApiError::internal()
}
