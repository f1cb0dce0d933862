//! Handlers, one file per noun: parse, one engine call, convert.

pub mod agents;
pub mod channels;
pub mod deliveries;
pub mod dms;
pub mod health;
pub mod messages;
pub mod nodes;
mod page;
pub mod send;
pub mod workspaces;
