//! Gateway: HTTP and WebSocket in front of the engine. It holds sockets and no other state.

pub mod caller;
pub mod config;
pub mod connections;
mod console;
mod cross_origin;
pub mod envelope;
pub mod error;
pub mod extract;
mod list_reply;
pub mod middleware;
pub mod node;
pub mod observe;
pub mod openapi;
pub mod origin_client;
pub mod rate_limits;
pub mod router;
pub mod routes;
pub mod state;
