//! Requests of a node that wait for the engine. They run one at a time and in arrival order, except for consecutive
//! action results.

use std::collections::VecDeque;

use relay_wire::nodes::frame::InboundFrame;

use super::{control::Request, jobs::Job};

/// Requests that may wait for the engine. Beyond it the socket is not read, which slows the sender down.
const MAX_QUEUED_REQUESTS: usize = 64;
/// Results recorded concurrently.
const MAX_CONCURRENT_RESULTS: usize = 64;

#[derive(Default)]
pub(super) struct RequestQueue {
    /// Requests that have not started.
    waiting: VecDeque<Request>,
    /// A request other than a result is in progress.
    is_busy: bool,
    /// Results in progress. Later requests wait for them.
    results: usize,
}

impl RequestQueue {
    pub(super) fn is_full(&self) -> bool {
        self.waiting.len() >= MAX_QUEUED_REQUESTS
    }

    /// Returns whether a request other than a result is in progress.
    pub(super) const fn is_busy(&self) -> bool {
        self.is_busy
    }

    pub(super) fn is_empty(&self) -> bool {
        !self.is_busy && self.results == 0 && self.waiting.is_empty()
    }

    pub(super) fn push(&mut self, request: Request) {
        self.waiting.push_back(request);
    }

    /// Returns memory that no waiting request needs.
    pub(super) fn shrink_to_fit(&mut self) {
        self.waiting.shrink_to_fit();
    }

    /// Returns the next request that may start.
    pub(super) fn start_next(&mut self) -> Option<Job> {
        if self.is_busy {
            return None;
        }
        if matches!(self.waiting.front()?.frame, InboundFrame::ActionResult(_)) {
            if self.results >= MAX_CONCURRENT_RESULTS {
                return None;
            }
            self.results += 1;
            return self.waiting.pop_front().map(Job::Result);
        }
        // An inventory that overtakes results could have their invocations placed again.
        if self.results > 0 {
            return None;
        }
        self.is_busy = true;
        self.waiting.pop_front().map(Job::Request)
    }

    pub(super) fn on_request_done(&mut self) {
        self.is_busy = false;
    }

    pub(super) fn on_result_done(&mut self) {
        self.results = self.results.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use relay_wire::nodes::frame;

    use super::*;

    fn request(text: &str) -> Request {
        let decoded = frame::decode(text).unwrap();
        Request { id: decoded.id, frame: decoded.frame, memory: None }
    }

    fn deregister() -> Request {
        request(r#"{"v":1,"type":"node.deregister"}"#)
    }

    fn result() -> Request {
        request(r#"{"v":1,"type":"action.result","invocation_id":"inv_1","output":{}}"#)
    }

    fn started(queue: &mut RequestQueue) -> Vec<&'static str> {
        let name = |job| match job {
            Job::Request(_) => "request",
            Job::Result(_) => "result",
            Job::Read(_) => "read",
        };
        std::iter::from_fn(|| queue.start_next().map(name)).collect()
    }

    #[test]
    fn requests_run_one_at_a_time_and_only_results_together() {
        let mut queue = RequestQueue::default();
        for next in [deregister(), result(), result(), deregister(), result()] {
            queue.push(next);
        }
        assert_eq!(started(&mut queue), ["request"]);
        queue.on_request_done();
        assert_eq!(started(&mut queue), ["result", "result"]);
        queue.on_result_done();
        assert!(started(&mut queue).is_empty(), "a later request waits for every result before it");
        queue.on_result_done();
        assert_eq!(started(&mut queue), ["request"]);
        queue.on_request_done();
        assert_eq!(started(&mut queue), ["result"]);
        queue.on_result_done();
        assert!(queue.is_empty());
    }

    #[test]
    fn results_and_waiting_requests_are_bounded() {
        let mut queue = RequestQueue::default();
        (0..MAX_CONCURRENT_RESULTS + MAX_QUEUED_REQUESTS).for_each(|_| queue.push(result()));
        assert_eq!(started(&mut queue).len(), MAX_CONCURRENT_RESULTS);
        assert!(queue.is_full());
        queue.on_result_done();
        assert_eq!(started(&mut queue), ["result"]);
        assert!(!queue.is_full());
    }
}
