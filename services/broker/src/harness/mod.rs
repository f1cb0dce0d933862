//! Knowledge about agent programs: a table in TOML, built in and extended by the operator. Used when an agent is
//! spawned; the terminal code knows no program. Main types: [`HarnessTable`], [`Harness`], one of its programs, and
//! [`McpServer`].

mod arguments;
mod mcp_file;
mod servers;
mod table;

pub(crate) use mcp_file::McpFile;
pub(crate) use servers::{McpServer, RelayContext, node_server, relay_server};
pub(crate) use table::{Gate, Harness, HarnessTable, McpStyle, RUN_TIMEOUT, ReadyRule};
