//! Thin clients of the engine's public interfaces, for tests and tools. They know formats, not rules.

mod api;
mod frames;
mod helpers;
mod node_socket;
mod observer;

pub use api::{Api, Reply};
pub use helpers::{Agent, NodeToken};
pub use node_socket::{ConnectError, NodeSocket};
pub use observer::{EventSource, ObserverSocket, ServerEvent};
