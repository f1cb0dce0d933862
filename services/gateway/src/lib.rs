//! The gateway: HTTP and WebSocket in front of the engine. It holds sockets and no other state.

pub mod caller;
pub mod config;
pub mod envelope;
pub mod error;
pub mod extract;
pub mod middleware;
pub mod node;
pub mod router;
pub mod routes;
pub mod state;
