//! Runtime of the service processes: configuration, logs, traces, metrics, the HTTP server, and graceful shutdown.
//!
//! Used by the `main` functions of the services and by their request middleware. It knows nothing of messages,
//! Postgres or NATS.

pub mod allocator;
pub mod cost;
mod environment;
mod log_lines;
pub mod metrics;
mod otel;
pub mod server;
pub mod settings;
pub mod shutdown;
pub mod telemetry;
