//! Settings of the http_push dispatcher.

use relay_egress::Policy;

/// Settings of the http_push dispatcher of one worker.
#[derive(Debug, Clone, clap::Args)]
pub struct PushConfig {
    /// Proxy for calls of nodes with `use_proxy`, which carry the original URL in `X-Forward-To`. Without a proxy, such
    /// calls fail.
    #[arg(long = "push-proxy-url", env = "RELAY_PUSH_PROXY_URL", value_parser = parse_proxy_url)]
    pub proxy_url: Option<String>,
    /// Credentials for the proxy, sent in `X-Proxy-Auth`.
    #[arg(long = "push-proxy-auth", env = "RELAY_PUSH_PROXY_AUTH", hide_env_values = true)]
    pub proxy_auth: Option<String>,
    /// Maximum number of concurrent calls of this worker. Each takes about 20 kB of memory.
    #[arg(long = "push-concurrency", env = "RELAY_PUSH_CONCURRENCY", default_value_t = 1024,
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub concurrency: u32,
    /// Maximum number of concurrent calls to one node's endpoint, from all workers together. The ordered deliveries of
    /// an agent use one.
    #[arg(long = "push-endpoint-concurrency", env = "RELAY_PUSH_ENDPOINT_CONCURRENCY", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub endpoint_concurrency: u32,
    /// Maximum number of calls per second to one node's endpoint, from all workers together.
    #[arg(long = "push-endpoint-rate", env = "RELAY_PUSH_ENDPOINT_RATE", default_value_t = 1000,
          value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub endpoint_rate: u32,
}

/// Parses the URL of the operator's own proxy.
fn parse_proxy_url(text: &str) -> Result<String, String> {
    Policy::default().trust_url(text).map_err(|refusal| refusal.to_string())?;
    Ok(text.to_owned())
}

/// Divides a figure that is meant for all workers among them, rounded up: each must be able to call.
pub(super) fn share_per_worker(figure: usize, workers: usize) -> usize {
    figure.div_ceil(workers.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_divided_among_live_workers() {
        for (figure, workers, each) in [(16, 1, 16), (16, 3, 6), (16, 16, 1), (16, 40, 1), (1000, 3, 334), (16, 0, 16)]
        {
            assert_eq!(share_per_worker(figure, workers), each, "{figure} by {workers}");
        }
    }

    #[test]
    fn proxies_are_urls() {
        assert!(parse_proxy_url("http://proxy.corp:3128/push").is_ok());
        assert!(parse_proxy_url("proxy.corp:3128").is_err());
    }
}
