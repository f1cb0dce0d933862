//! What the broker knows about agent programs: a table in TOML, built in and extended by the operator. Used when an
//! agent is spawned; the terminal code knows no program.

mod arguments;
mod table;

pub(crate) use arguments::McpServer;
pub(crate) use table::{Harness, HarnessTable, McpStyle, ReadyRule};
