//! What a worker is told at its start.

use std::net::SocketAddr;

use relay_engine::{EngineConfig, worker::Retention};

/// Loops take turns, so a few connections are enough; more only lets more of them run at once.
const DATABASE_CONNECTIONS: u32 = 6;

/// Runs the background loops of a Relay engine.
#[derive(Debug, clap::Parser)]
#[command(name = "relay-worker", version)]
pub(crate) struct Config {
    /// The Postgres database, migrated by `relayctl migrate`.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
    database_url: String,
    /// The NATS server or servers, separated by commas.
    #[arg(long, env = "NATS_URL", hide_env_values = true, default_value = "nats://127.0.0.1:4222")]
    nats_url: String,
    /// Where /metrics, /health and /ready are served. Not for clients: keep it inside the cluster.
    #[arg(long, env = "RELAY_METRICS_LISTEN", default_value = "127.0.0.1:9465")]
    pub(crate) metrics_listen: SocketAddr,
    /// Days to keep deliveries and the ack log, besides today. At least 8.
    #[arg(long, env = "RELAY_DELIVERY_RETENTION_DAYS", default_value_t = 8,
          value_parser = clap::value_parser!(u32).range(i64::from(Retention::LEAST_DAYS)..=3650))]
    delivery_retention_days: u32,
    /// Days to keep messages, besides today. Raised to the deliveries' if lower.
    #[arg(long, env = "RELAY_MESSAGE_RETENTION_DAYS", default_value_t = 90,
          value_parser = clap::value_parser!(u32).range(i64::from(Retention::LEAST_DAYS)..=36500))]
    message_retention_days: u32,
}

impl Config {
    pub(crate) fn engine(&self) -> EngineConfig {
        EngineConfig {
            database_url: self.database_url.clone(),
            nats_url: self.nats_url.clone(),
            database_connections: DATABASE_CONNECTIONS,
        }
    }

    pub(crate) const fn retention(&self) -> Retention {
        Retention { delivery_days: self.delivery_retention_days, message_days: self.message_retention_days }
    }
}
