//! Agents: life cycle, location, spawning and session events.

pub(crate) mod addresses;
pub mod bindings;
pub mod ended_sessions;
pub(crate) mod last_seen;
pub mod lifecycle;
pub mod session_events;
pub mod spawn;
