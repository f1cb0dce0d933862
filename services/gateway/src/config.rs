//! What a gateway is told at its start, by flags or environment.

use std::net::SocketAddr;

use clap::Parser;

/// The HTTP and WebSocket edge of the engine.
#[derive(Debug, Clone, Parser)]
#[command(name = "relay-gateway", version)]
pub struct Config {
    /// Where Postgres is: `postgres://user:password@host:port/database`.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
    pub database_url: String,

    /// Where NATS is: `nats://host:port`.
    #[arg(long, env = "NATS_URL", default_value = "nats://127.0.0.1:4222", hide_env_values = true)]
    pub nats_url: String,

    /// Where clients and nodes connect.
    #[arg(long, env = "RELAY_LISTEN", default_value = "127.0.0.1:8787")]
    pub listen: SocketAddr,

    /// Where Prometheus scrapes. Keep it private: it answers without authentication.
    #[arg(long, env = "RELAY_METRICS_LISTEN", default_value = "127.0.0.1:9464")]
    pub metrics_listen: SocketAddr,

    /// Postgres connections at most. Past 16 more of them slow commits down.
    #[arg(long, env = "RELAY_DATABASE_CONNECTIONS", default_value_t = 16)]
    pub database_connections: u32,
}
