//! Settings of the http_push dispatcher.

/// Settings of the http_push dispatcher of one worker.
#[derive(Debug, Clone)]
pub struct PushConfig {
    /// Proxy for calls of nodes with `use_proxy`, which carry the original URL in `X-Forward-To`. Without a proxy, such
    /// calls fail.
    pub proxy_url: Option<String>,
    /// Credentials for the proxy, sent in `X-Proxy-Auth`.
    pub proxy_auth: Option<String>,
    /// Concurrent calls of this worker at most.
    pub concurrency: u32,
    /// Concurrent calls to one node's endpoint at most, from all workers together.
    pub endpoint_concurrency: u32,
    /// Calls per second to one node's endpoint at most, from all workers together.
    pub endpoint_rate: u32,
}

/// Divides a figure that is meant for all workers among them, rounded up: each must be able to call.
pub(super) fn share_per_worker(figure: usize, workers: usize) -> usize {
    figure.div_ceil(workers.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::share_per_worker;

    #[test]
    fn limits_are_divided_among_live_workers() {
        for (figure, workers, each) in [(16, 1, 16), (16, 3, 6), (16, 16, 1), (16, 40, 1), (1000, 3, 334), (16, 0, 16)]
        {
            assert_eq!(share_per_worker(figure, workers), each, "{figure} by {workers}");
        }
    }
}
