//! What operators do and see.

mod operators;
mod recovery;
mod recovery_told;
mod relayctl;
mod traces;
