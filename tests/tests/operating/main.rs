//! Operation of the engine: operators, relayctl, recovery and telemetry.

mod operators;
mod recovery;
mod recovery_told;
mod relayctl;
mod secured;
mod snapshots;
mod traces;
