//! Nodes: enrolment and roster, provider connections, and node kinds.

pub(crate) mod heartbeats;
pub(crate) mod kinds;
pub mod providers;
pub mod roster;
pub mod silence;
