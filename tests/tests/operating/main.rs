//! Operation of the engine: operators, relayctl, recovery and telemetry.

mod broker_positions;
mod operators;
mod recovery;
mod relayctl;
mod secured;
mod snapshots;
mod traces;
