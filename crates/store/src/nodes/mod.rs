//! Nodes: enrolment, deletion, roster, provider connections, hosting of agents, heartbeats, liveness and advertised
//! capabilities. Called by the engine's node, agent and liveness use cases. Everything that a connection changes is
//! fenced by its epoch ([`fence::Fence`]).

pub(crate) mod assignment;
pub(crate) mod capabilities;
pub mod deletion;
pub mod direct;
pub(crate) mod enrolment;
pub mod fence;
pub mod heartbeats;
pub mod hosting;
pub mod liveness;
pub mod locations;
pub(crate) mod presence;
pub mod providers;
pub(crate) mod roster;
