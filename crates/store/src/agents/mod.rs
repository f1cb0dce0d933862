//! Agents: registration, presence, location, spawning, and the sessions that nodes run for them. Called by the engine's
//! agent use cases, and by statements about nodes and actions that change agents in their own transaction. Main types:
//! `NewAgent` with `Registration`, `NewBinding` with `BindOutcome`, `AgentRelease`.

pub(crate) mod addresses;
pub(crate) mod bindings;
pub mod details;
pub(crate) mod lifecycle;
pub mod presence;
pub(crate) mod respawn;
pub mod session_events;
pub mod sessions;
pub mod spawn;
