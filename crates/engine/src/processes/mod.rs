//! This process as seen by others: gateway lease and connection gauges.

pub(crate) mod connection_gauges;
pub mod gateway_lease;
