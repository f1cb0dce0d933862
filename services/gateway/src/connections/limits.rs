//! Settings of connections. Flattened into the gateway's configuration.

use clap::{Args, builder::RangedU64ValueParser};
use relay_runtime::server::Timeouts;
use std::time::Duration;

/// Limits of the connections of clients.
#[derive(Debug, Clone, Args)]
pub struct ConnectionLimits {
    /// Open connections of this gateway, at most its limit of open files less 512. Each takes up to 20 kB.
    #[arg(long, env = "RELAY_MAX_CONNECTIONS", default_value_t = 32_768, value_parser = at_least_one())]
    pub max_connections: usize,

    /// Connections of one client address to this gateway; behind a trusted proxy, its requests in progress and sockets.
    /// Connections from this machine are not limited.
    #[arg(long, env = "RELAY_MAX_CONNECTIONS_PER_ADDRESS", default_value_t = 4096, value_parser = at_least_one())]
    pub max_connections_per_address: usize,

    /// Node sockets of one workspace and of those created with its key at this gateway, their observers, and their
    /// requests in progress: this many of each.
    #[arg(long, env = "RELAY_MAX_CONNECTIONS_PER_WORKSPACE", default_value_t = 8192, value_parser = at_least_one())]
    pub max_connections_per_workspace: usize,

    /// The same for one token.
    #[arg(long, env = "RELAY_MAX_CONNECTIONS_PER_TOKEN", default_value_t = 600, value_parser = at_least_one())]
    pub max_connections_per_token: usize,

    /// Seconds within which the head of a request must arrive.
    #[arg(long, env = "RELAY_HEAD_TIMEOUT_SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=300))]
    pub head_timeout_seconds: u64,

    /// Seconds for which a connection stays open between two requests. A proxy must close it earlier than that.
    #[arg(long, env = "RELAY_IDLE_TIMEOUT_SECONDS", default_value_t = 75, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub idle_timeout_seconds: u64,

    /// Seconds within which a node must register on its socket.
    #[arg(long, env = "RELAY_REGISTRATION_TIMEOUT_SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=300))]
    pub registration_timeout_seconds: u64,
}

impl ConnectionLimits {
    /// Returns the timeouts of connections.
    #[must_use]
    pub fn timeouts(&self) -> Timeouts {
        Timeouts {
            head: Duration::from_secs(self.head_timeout_seconds),
            idle: Duration::from_secs(self.idle_timeout_seconds),
            ..Timeouts::default()
        }
    }
}

fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=1_000_000)
}
