//! What every service process needs around its work: logs, traces, metrics, and an orderly end.
//!
//! Used by `main` functions only. It knows nothing of messages, Postgres or NATS.

pub mod cost;
pub mod metrics;
mod otel;
pub mod settings;
pub mod shutdown;
pub mod telemetry;
