//! Nodes: enrolment and roster, provider connections, and node kinds.

pub(crate) mod kinds;
pub mod providers;
pub mod roster;
