//! How a worker pushes.

/// What a worker is told of pushing.
#[derive(Debug, Clone, clap::Args)]
pub struct PushConfig {
    /// The proxy that calls of nodes with `use_proxy` go through: the true URL rides in `X-Forward-To`. Without one,
    /// such calls fail.
    #[arg(long = "push-proxy-url", env = "RELAY_PUSH_PROXY_URL", value_parser = crate::settings::proxy_url)]
    pub proxy_url: Option<String>,
    /// What is shown to the proxy, in `X-Proxy-Auth`.
    #[arg(long = "push-proxy-auth", env = "RELAY_PUSH_PROXY_AUTH", hide_env_values = true)]
    pub proxy_auth: Option<String>,
    /// Calls that this worker has under way at most. More of them cost memory, about 20 kB each.
    #[arg(long = "push-concurrency", env = "RELAY_PUSH_CONCURRENCY", default_value_t = 1024,
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub concurrency: u32,
    /// Calls that one node's endpoint gets at a time, from all workers together. One agent's ordered deliveries need
    /// one.
    #[arg(long = "push-endpoint-concurrency", env = "RELAY_PUSH_ENDPOINT_CONCURRENCY", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub endpoint_concurrency: u32,
    /// Calls that one node's endpoint gets in a second, from all workers together.
    #[arg(long = "push-endpoint-rate", env = "RELAY_PUSH_ENDPOINT_RATE", default_value_t = 1000,
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub endpoint_rate: u32,
}

/// What each of so many workers has of a figure that is meant for all of them, rounded up: each must be able to call.
pub(super) fn of_each(figure: usize, workers: usize) -> usize {
    figure.div_ceil(workers.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::of_each;

    #[test]
    fn a_figure_is_shared_by_the_workers_that_live() {
        for (figure, workers, each) in [(16, 1, 16), (16, 3, 6), (16, 16, 1), (16, 40, 1), (1000, 3, 334), (16, 0, 16)]
        {
            assert_eq!(of_each(figure, workers), each, "{figure} by {workers}");
        }
    }
}
