//! What clients and nodes see on the network: REST bodies, frames, events. Types and serde only.
//!
//! Requests ignore unknown keys. Answers are supersets that the strictest published client accepts:
//! fields that may be null are there as null, ids are strings, instants have milliseconds.

pub mod agent;
pub mod channel;
pub mod delivery;
pub mod dm;
pub mod envelope;
pub mod field;
pub mod frame;
pub mod message;
pub mod node;
pub mod workspace;
