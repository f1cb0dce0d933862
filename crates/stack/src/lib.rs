//! The engine as processes on this machine: servers, gateways and workers that are started, watched, cut off and
//! stopped, and thin clients of their public interfaces.
//!
//! Used by `cargo xtask`, the load generator and, through `relay-testkit`, the tests. Everything uses the engine like
//! an external client, over HTTP, WebSockets and signals; apart from that only the servers' own ports are used.
//! Children end with the process that started them, even if it is killed (see [`process`]).

pub mod binaries;
pub mod client;
pub mod http;
pub mod node;
mod os;
pub mod ports;
pub mod process;
pub mod proxy;
pub mod servers;
pub mod stack;
pub mod wait;
