//! Test support for the engine: everything of [`relay_stack`], the engine that tests share, an HTTP endpoint that
//! the engine can call, a name server, and the rules that every history of clients keeps.
//!
//! Nothing here is linked into a shipped binary.
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

pub mod history;
mod memory_limit;
pub mod names;
pub mod receiver;
mod shared;

pub use memory_limit::limit_memory;
pub use relay_stack::{binaries, client, http, node, ports, process, proxy, servers, stack, wait};
pub use shared::{Shared, shared};
