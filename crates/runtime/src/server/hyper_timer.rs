//! Timer of hyper's connections, which never ends.
//!
//! [`GuardedStream`](super::stream::GuardedStream) times the heads of requests, and distinguishes them from pauses. But
//! hyper reads an idle connection at once, which starts the stream's timer, only if it has a timeout itself. With a
//! real timer, each request would set and drop a second one.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use hyper::rt::{Sleep, Timer};

/// Timer whose sleeps never end.
#[derive(Debug, Clone, Copy)]
pub(super) struct NeverEndingTimer;

impl Timer for NeverEndingTimer {
    fn sleep(&self, _: Duration) -> Pin<Box<dyn Sleep>> {
        Box::pin(NeverEndingSleep)
    }

    fn sleep_until(&self, _: Instant) -> Pin<Box<dyn Sleep>> {
        Box::pin(NeverEndingSleep)
    }
}

struct NeverEndingSleep;

impl Sleep for NeverEndingSleep {}

impl Future for NeverEndingSleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}
