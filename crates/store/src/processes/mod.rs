//! Processes of the installation: gateway leases ([`gateway_leases`]), cleanup after expired gateways
//! ([`expired_gateways`]) and worker numbers for ids. Main types: `LeaseRenewal`, `ConnectedProvider`. Called by the
//! engine's process use cases and by the id generator.

pub mod expired_gateways;
pub mod gateway_leases;
pub(crate) mod worker_ids;
