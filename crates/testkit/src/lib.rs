//! The engine as a test, `cargo xtask` or the load generator sees it: real servers, real processes, real sockets.
//!
//! Nothing here is linked into a shipped binary. Everything talks to the engine the way a stranger would,
//! over HTTP, WebSockets and signals; only the servers' own ports are touched besides.
//!
//! ```no_run
//! # async fn example() -> anyhow::Result<()> {
//! use relay_testkit::{client::Api, stack::Stack};
//! let stack = Stack::builder().gateways(2).start().await?;
//! let workspace = Api::create_workspace(stack.gateway(0).url(), "demo").await?;
//! let ada = workspace.register_agent("ada").await?;
//! stack.gateway(0).kill9();
//! stack.gateway(0).restart().await?;
//! # let _ = ada;
//! # Ok(())
//! # }
//! ```
//!
//! Children die with the process that started them, also when it is killed (see [`process`]).

pub mod binaries;
pub mod client;
pub mod http;
mod os;
pub mod ports;
pub mod process;
pub mod proxy;
pub mod receiver;
pub mod servers;
mod shared;
pub mod stack;
pub mod wait;

pub use shared::{Shared, shared};
