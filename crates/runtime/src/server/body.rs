//! Body of a response that holds something until its end.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};

/// Body that drops its guard when it is sent or given up.
#[derive(Debug)]
pub struct GuardedBody<G> {
    body: Body,
    _guard: G,
}

impl<G: Send + Unpin + 'static> GuardedBody<G> {
    /// Returns `body`, which holds `guard` until its end.
    pub fn wrap(body: Body, guard: G) -> Body {
        Body::new(Self { body, _guard: guard })
    }
}

impl<G: Unpin> HttpBody for GuardedBody<G> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
